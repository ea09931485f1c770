"""Plans of torch's parallelize_module with our styles: the same numbers as one process; what has no counterpart."""

from __future__ import annotations

import abc
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import tpkernels as tpk
from tests.integrations.counting import counted
from tests.integrations.curves import STEPS, Reference, batches, reference, train
from tests.integrations.styles.models import LAYOUTS, Model, build, loss_of, parallel, plain_layouts, run
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.integrations import styles
from tpkernels.integrations.styles import ColumnParallel, Replicated, RowParallel, SequenceParallel, VocabParallel
from tpkernels.testing.spawn import Pools

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sequence", {"positions": False}),
    ("plain", {"tied": True}),
    ("plain", {}),
    ("dtensors", {"tied": True}),
]
QUICK = 2


OPS = {
    "plain": {"copy_matmul": (5, 1), "matmul_all_reduce": (2, 0), "all_reduce": (0, 1)},
    "sequence": {"all_gather_matmul": (5, 1), "matmul_reduce_scatter": (2, 0), "reduce_scatter": (0, 1)},
}
"""In each forward pass, of one block and outside of blocks: columns and the head, rows, the table."""


def calls(layouts: str, checkpoints: bool) -> dict[str, int]:
    """Of a run with two blocks, which checkpoints compute once more."""
    ops = OPS.get(layouts, OPS["plain"])
    return {name: STEPS * (2 * (1 + checkpoints) * block + rest) for name, (block, rest) in ops.items()}


def trained(cases: list[tuple[str, dict[str, Any], Reference]]) -> list[dict[str, float]]:
    found = []
    for number, (layouts, options, expected) in enumerate(cases):
        model = parallel(layouts, **options)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert (model.head.weight is model.table.weight) == options.get("tied", False)
        model.checkpoints = number == 1
        with counted() as counts:
            found.append(expected.wrong(run(model)))
        assert counts == calls(layouts, model.checkpoints), "each style's op runs"
    return found


def cases_for(world: int, count: int) -> list[tuple[str, dict[str, Any], Reference]]:
    sizes = {"heads": 3, "groups": 3} if world == 3 else {}
    return [
        (layouts, one, reference(build(**one), run)) for layouts, options in CASES[:count] for one in [options | sizes]
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full("three ranks"))])
def test_plans_with_our_styles_train_as_one_process_does(ranks: Pools, world: int, full: bool) -> None:
    """57 hidden features, 67 tokens and 9 positions divide by neither; with checkpoints in one of the cases."""
    count = len(CASES) if full else QUICK
    for found in ranks(world).run(trained, cases_for(world, count), timeout=LIMIT_S):
        assert found == [{}] * count


def replicas(cases: list[tuple[str, dict[str, Any], Reference]]) -> list[dict[str, float]]:
    """Two replicas of two ranks, each with a row of each batch, and FSDP2 over them."""
    mesh, found = tpk.init(dp=2, tp=2), []
    for layouts, options, expected in cases:
        model = build(**options)
        parallelize_module(model, mesh["tp"], LAYOUTS[layouts]())
        fully_shard(model, mesh=mesh["dp"])
        own = [ids.chunk(2)[mesh.get_local_rank("dp")] for ids in batches()]
        curve = train(model, own, loss_of=loss_of)
        losses = torch.tensor(curve.losses, dtype=torch.float64)
        dist.all_reduce(losses, group=mesh["dp"].get_group())
        curve.losses = (losses / 2).tolist()
        found.append(expected.wrong(curve))
    return found


@pytest.mark.gloo
@pytest.mark.full("more than two ranks")
def test_replicas_with_our_styles_train_as_one_process_does(ranks: Pools) -> None:
    for found in ranks(4).run(replicas, cases_for(4, QUICK), timeout=LIMIT_S):
        assert found == [{}] * QUICK


def _bias_twice(model: Model) -> None:
    layer: Any = model.blocks[1].down
    layer.register_forward_hook(lambda m, args, y: y + m.bias.to_local())


def _one_rank_has_another_batch(model: Model) -> None:
    rank = tp_mesh().get_local_rank()
    model.register_forward_pre_hook(lambda m, args: (args[0].roll(rank, 1),))


def faulty(expected: Reference, without_positions: Reference) -> list[dict[str, float]]:
    found = []
    for spoil in (_bias_twice, _one_rank_has_another_batch):
        model = parallel("plain")
        spoil(model)
        found.append(expected.wrong(run(model)))
    real = styles._replicate
    with mock.patch.object(styles, "_replicate", lambda module, mesh, **_: real(module, mesh, sequence_parallel=False)):
        found.append(without_positions.wrong(run(parallel("sequence", positions=False))))
    return found


@pytest.mark.gloo
@pytest.mark.full("tests/mutations seeds such faults in the product, and tests of the quick run kill them")
def test_the_comparison_catches_a_bias_added_twice_other_batches_and_a_gradient_not_summed(ranks: Pools) -> None:
    references = [reference(build(positions=positions), run) for positions in (True, False)]
    for found in zip(*ranks(2).run(faulty, *references, timeout=LIMIT_S), strict=True):
        assert any(found), "no rank noticed"


def _clips_without_the_rest() -> str:
    model = build()
    plan = plain_layouts()
    del plan[""]
    parallelize_module(model, tp_mesh(), plan)
    loss_of(model, batches(1)[0]).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.gloo
def test_torch_refuses_to_clip_a_mixture_which_is_what_replicated_is_for(ranks: Pools) -> None:
    for said in ranks(2).run(_clips_without_the_rest, timeout=LIMIT_S):
        assert "mixed torch.Tensor and DTensor" in said


def _refusals() -> list[str]:
    mesh = tp_mesh()
    tied = build(tied=True)
    half = build(tied=True)

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    apply = lambda module, style, **options: parallelize_module(module, mesh, style, **options)  # noqa: E731
    given = DTensor.from_local(torch.randn(2, 4), mesh, [Replicate()], run_check=False)
    said = []
    for call in (
        lambda: ColumnParallel(output_layouts=Shard(1)),
        lambda: ColumnParallel(input_layouts=Shard(-1)),
        lambda: RowParallel(output_layouts=Shard(-1)),
        lambda: RowParallel(input_layouts=Shard(1)),
        lambda: VocabParallel(input_layouts=Shard(0)),
        lambda: SequenceParallel(input_layouts=Shard(0)),
        lambda: Replicated(output_layouts=Shard(0)),
        lambda: ColumnParallel(input_layouts=(Replicate(),)),  # type: ignore[arg-type]
        lambda: apply(nn.Linear(4, 4), VocabParallel()),
        lambda: apply(nn.Embedding(4, 4), RowParallel()),
        lambda: apply(nn.Embedding(4, 4), ColumnParallel(input_layouts=Shard(1))),
        lambda: apply(nn.LayerNorm(4), ColumnParallel()),
        lambda: apply(Own(4, 4), ColumnParallel()),
        lambda: apply(hooked, ColumnParallel()),
        lambda: apply(nn.Linear(4, 4), ColumnParallel(), src_data_rank=1),
        lambda: apply(nn.Linear(4, 4), RowParallel())(given),
        lambda: apply(tied, {"table": VocabParallel(), "head": RowParallel()}),
        lambda: apply(half, {"table": VocabParallel(), "": Replicated()}),
    ):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.gloo
def test_what_has_no_counterpart_is_refused_by_name(ranks: Pools) -> None:
    expected = [
        "ColumnParallel from R to S(1) has no counterpart",
        "ColumnParallel from S(-1) to S(-1) has no counterpart",
        "RowParallel from S(-1) to S(-1) has no counterpart",
        "RowParallel from S(1) to R has no counterpart",
        "VocabParallel from S(0) to R has no counterpart",
        "SequenceParallel from S(0) to S(1) has no counterpart",
        "Replicated from R to S(0) has no counterpart",
        "ColumnParallel: input_layouts must be Replicate() or Shard(dim)",
        "VocabParallel is for nn.Embedding, not for Linear",
        "RowParallel from S(-1) to R has no counterpart: every rank looks up all ids",
        "ColumnParallel from S(1) to S(-1) has no counterpart: a table",
        "ColumnParallel is for nn.Linear and nn.Embedding, and classes that compute as these do, not for LayerNorm",
        "not for Own",
        "ColumnParallel: the Linear has hooks",
        "src_data_rank must be 0",
        "was called with a DTensor of (Replicate(),): say so with input_layouts=",
        "the weight of this Linear is tied to one that has become a DTensor of (Shard(dim=0),)",
        "head.weight is tied to a parameter that is cut",
    ]
    for said in ranks(2).run(_refusals, timeout=LIMIT_S):
        assert len(said) == len(expected)
        for message, part in zip(said, expected, strict=True):
            assert part in message, (part, message)


def _dropout() -> list[Tensor]:
    mesh = tp_mesh()
    drop = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel(use_local_output=True))
    linear = nn.Linear(3, 3)
    linear.weight.data.fill_(float(mesh.get_local_rank()))
    parallelize_module(linear, mesh, ColumnParallel(), src_data_rank=None)
    torch.manual_seed(5)
    return [drop(torch.ones(2, 64, 8)), torch.rand(3), linear.weight.to_local()]


@pytest.mark.gloo
def test_dropout_differs_on_parts_and_each_rank_may_bring_its_own_data(ranks: Pools) -> None:
    (mask, after, own), (other, other_after, other_own) = ranks(2).run(_dropout, timeout=LIMIT_S)
    assert not torch.equal(mask, other) and torch.equal(after, other_after)
    assert bool((own == 0).all()) and bool((other_own == 1).all())


@pytest.mark.cpu
def test_a_method_that_torchs_styles_call_by_another_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``_apply`` is all that they have of torch's private names, and abstract there."""

    class Other(abc.ABC):
        @abc.abstractmethod
        def _cut(self, module: nn.Module, mesh: Any) -> nn.Module: ...

    monkeypatch.setattr("torch.distributed.tensor.parallel.ParallelStyle", Other)
    spec = importlib.util.find_spec(styles.__name__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    with pytest.raises(TypeError, match=r"abstract class ColumnParallel .*_cut"):
        again.ColumnParallel()
