"""`parallelize(..., same_bits=8)`: one, two, four and eight ranks train to the same bits, also after a resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.kept_mesh import once_per_pool
from tests.ops.same_bits import assert_same
from tests.sharding.same_bits_models import MODELS
from tpkernels.errors import UnprovenCallWarning
from tpkernels.nn import block_copies
from tpkernels.nn.gathering import gathered
from tpkernels.partition import halves
from tpkernels.selftest import same_bits as selftest
from tpkernels.selftest.same_bits import Case, Run
from tpkernels.selftest.small_decoder import SHAPES
from tpkernels.sharding import block_masks, sequence_blocks
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

SAME_BITS, STEPS = 8, 2


def train(name: str, dtype: torch.dtype, same_bits: int | None, along: bool = False) -> dict[str, Tensor]:
    """Losses, norms and gradients of each step, and the parameters afterwards; whole, on every rank.

    ``along``: with sequence parallelism.
    """
    torch.manual_seed(7)
    model, options, step = MODELS[name](dtype)
    found: dict[str, Tensor] = {}
    group = own_group(same_bits)
    if along:
        inputs = options.get("example_inputs", {"input_ids": torch.zeros(4, 24, dtype=torch.long)})
        plan = tpk.make_plan(
            model, group.size(), sequence_parallel=True, example_inputs=inputs, same_bits=same_bits or 0
        )
        assert plan.sequence_blocks and plan.local_blocks
        options = {"example_inputs": inputs, "plan": plan}
    model = tpk.parallelize(model, group, same_bits=same_bits, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(STEPS):
        ids = torch.randint(96, (8, 25), generator=torch.Generator().manual_seed(number))
        loss = step(model, ids)
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            found[f"gradient {number} of {key}"] = cast(Any, parameter.grad).full_tensor().clone()
        found[f"norm {number}"] = tpk.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found | tpk.full_state_dict(model)


@once_per_pool
def own_group(same_bits: int | None) -> Any:
    """One for each mode: DTensors of one process remember the groups of meshes that are equal."""
    return dist.new_group()


def differing(of_ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> list[str]:
    wrong = []
    for rank, found in enumerate(of_ranks):
        for key, value in expected.items():
            try:
                assert_same(found[key], value, f"rank {rank}, {key}")
            except AssertionError as error:
                wrong.append(str(error))
    return wrong


CASES = [("gpt", torch.float32), ("gpt", torch.bfloat16), ("llama", torch.bfloat16), ("llama", torch.float32),
         ("copies", torch.float32), ("copies", torch.bfloat16)]  # fmt: skip


@pytest.mark.full("plans take longer than training; explicit ones stand for them")
@pytest.mark.parametrize("along", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_training_gives_the_bits_of_one_rank(ranks: Pools, name: str, dtype: torch.dtype, along: bool) -> None:
    """Of models that `plan="auto"` cuts, and of transformers' Llama."""
    (expected,) = ranks(1).run(train, name, dtype, SAME_BITS, along, timeout=300.0)
    for world in (2, 4):
        assert not differing(ranks(world).run(train, name, dtype, SAME_BITS, along, timeout=300.0), expected)


@pytest.mark.slow("builds and trains a Mixtral on one, two and four ranks")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mixtral", torch.float32),
        ("mixtral, by features", torch.bfloat16),
        ("mixtral, dealt out", torch.float32),
        ("mixtral, dealt out", torch.bfloat16),
    ],
)
def test_a_mixture_trains_to_the_bits_of_one_rank(ranks: Pools, name: str, dtype: torch.dtype) -> None:
    """By a plan by hand, and by plans that are found."""
    (expected,) = ranks(1).run(train, name, dtype, SAME_BITS, timeout=300.0)
    assert any("experts" in key for key in expected)
    for world in (2, 4):
        assert not differing(ranks(world).run(train, name, dtype, SAME_BITS, timeout=300.0), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "along"),
    [(kind, dtype, along) for along in (False, True) for kind in SHAPES for dtype in ("float32", "bfloat16")],
)
def test_a_run_with_dropout_and_clipping_goes_on_at_another_degree(
    ranks: Pools, kind: str, dtype: str, along: bool, full: bool, tmp_path: Path
) -> None:
    """Losses, gradients, norms and parameters of AdamW at 1, 2, 4 and, in full, 8 ranks, and of runs resumed from 1 to
    2 to 4 to 8; ``along``: with sequence parallelism."""
    case = Case(kind, dtype, 20, sequence_parallel=along) if full else Case(kind, dtype, 2, layers=1)
    for found in ranks(8 if full else 4).run(check_degrees_and_resumes, case, tmp_path, timeout=1800.0):
        assert not found


def check_degrees_and_resumes(case: Case, folder: Path) -> list[str]:
    """At each degree, and from half of the steps on as a run with other weights that loads what a smaller one saved."""
    half, expected, wrong = case.steps // 2, dict[str, str](), list[str]()
    for degree, group in small_groups(SAME_BITS).items():
        run = Run(case, group, SAME_BITS)
        resumed = Run(case, group, SAME_BITS, seed=1)
        if degree > 1:
            tpk.load_snapshot(resumed.model, resumed.optimizer, folder / str(degree // 2))
            resumed.steps(half, case.steps)
        run.steps(0, half)
        tpk.save_snapshot(run.model, run.optimizer, folder / str(degree))
        run.steps(half, case.steps)
        expected = expected or run.digests
        for what, found in (("run", run), ("resumed", resumed)):
            wrong += [f"{what} on {degree}: {name}" for name, one in found.digests.items() if one != expected[name]]
    return wrong


@once_per_pool
def small_groups(same_bits: int | None) -> dict[int, dist.ProcessGroup]:
    """This rank's group of 1, of 2, ... ranks."""
    return selftest.groups_of_degrees(selftest.degrees_of(dist.get_world_size(), SAME_BITS), 60.0)


HIDDEN = 509
"""Features that do not divide into blocks."""


class Dropping(nn.Module):
    """Dropout of parts between two layers, twice, and of the residual before and behind; recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.hidden, self.behind = nn.Dropout(0.1), nn.Dropout(0.25), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 64)

    def block(self, x: Tensor) -> Tensor:
        hidden = self.hidden(F.gelu(self.hidden(self.up(self.before(x)))))
        return cast(Tensor, x + self.behind(self.down(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.block, x, use_reentrant=False)) if self.recomputes else self.block(x)

    recomputes = False


def test_dropout_of_parts_drops_the_same_elements_at_every_degree(ranks: Pools, full: bool) -> None:
    for wrong, kept in ranks(4 if full else 2).run(check_dropout, None):
        assert not wrong and 0.5 < kept < 0.62, (wrong, kept)  # 0.75 * 0.75


@pytest.mark.parametrize("fault", ["numbers of blocks", "one seed"])
def test_other_seeds_of_masks_are_found(ranks: Pools, fault: str) -> None:
    """Blocks that are counted from each rank's first, and one seed for all of them, which the degrees do not show."""
    for wrong, _ in ranks(2).run(check_dropout, fault):
        assert any("on 2 ranks" in one if fault == "numbers of blocks" else one == "masks repeat" for one in wrong)


def check_dropout(fault: str | None) -> tuple[list[str], float]:
    """What differs between degrees or when it is recomputed, and the share of hidden features that is kept."""
    wrong: list[str] = []
    hidden: list[Tensor] = []
    expected: list[Tensor] = []

    def see(module: nn.Module, args: Any) -> None:
        hidden.append(args[0].detach())

    see.takes_parts = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        if fault == "one seed":
            patch.setattr(block_masks, "_mix", lambda seed, number: seed)
        if fault == "numbers of blocks":
            patch.setattr(
                block_masks.Region, "first", property(lambda self: 0, lambda self, first: None), raising=False
            )
        for degree, group in small_groups(SAME_BITS).items():
            torch.manual_seed(5)
            x = torch.randn(64, 64)
            model = tpk.parallelize(Dropping(), group, example_inputs=x, same_bits=SAME_BITS)
            model.down.register_forward_pre_hook(see)
            for model.recomputes in (False, True):
                torch.manual_seed(6)
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UnprovenCallWarning)  # the first call is followed through the masks
                    model(x).square().sum().backward()
                found = [gathered(cast(Tensor, parameter.grad)) for parameter in model.parameters()] + [torch.rand(2)]
                model.zero_grad()
                expected = expected or found
                for i, (one, other) in enumerate(zip(found, expected, strict=True)):
                    if not torch.equal(one, other):
                        wrong.append(f"gradient {i} on {degree} ranks, recomputed {model.recomputes}")
        kept = tpk.all_gather(hidden[-1], group, dim=1, shard_sizes=halves(HIDDEN, degree)) != 0
        one, other = kept.split(halves(HIDDEN, SAME_BITS), 1)[:2]
        if torch.equal(one[:, : other.shape[1]], other):
            wrong.append("masks repeat")
    return wrong, float(kept.float().mean())


class Block(nn.Module):
    """Works on parts of the sequence but for its two layers, between which it drops out hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden, self.behind = nn.LayerNorm(64), nn.Dropout(0.25), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.behind(self.down(self.hidden(F.gelu(self.up(self.norm(x)))))))


class DropsByItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind()])

    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


FAULTS_OF_SEQUENCES: dict[str, tuple[object, str, object]] = {
    "masks are numbered from each rank's first block": (sequence_blocks, "_mix", lambda seed, number: number % 4),
    "blocks of a norm's gradient are added in order": (
        block_copies,
        "tree_sum",
        SimpleNamespace(wide=lambda dtype: dtype, of_products=lambda parts, out: out.copy_(sum(parts))),
    ),
}


@pytest.mark.parametrize("fault", [None, *FAULTS_OF_SEQUENCES])
def test_a_sequence_that_is_cut_has_the_same_norms_and_masks_at_every_degree(
    ranks: Pools, full: bool, fault: str | None
) -> None:
    for wrong in ranks(4 if full else 2).run(check_sequence, fault, timeout=120.0):
        assert bool(wrong) == (fault is not None), wrong


def test_a_sequence_is_cut_into_a_block_for_each_rank(ranks: Pools) -> None:
    for wrong in ranks(2).run(check_sequence, None, 2, timeout=120.0):
        assert not wrong


def check_sequence(fault: str | None, same_bits: int = SAME_BITS) -> list[str]:
    wrong: list[str] = []
    expected: list[Tensor] = []
    for degree, group in small_groups(same_bits).items():
        torch.manual_seed(5)
        x = torch.randn(2, 16, 64)
        plan = tpk.make_plan(Stack(), degree, sequence_parallel=True, example_inputs=x)
        model = tpk.parallelize(Stack(), group, plan, example_inputs=x, same_bits=same_bits)
        for model.recomputes in (False, True):
            torch.manual_seed(6)
            with seeded(fault if degree > 1 else None):
                y = model(x)
                y.square().sum().backward()
            found = [y.detach(), *(gathered(cast(Tensor, p.grad)) for p in model.parameters()), torch.rand(2)]
            model.zero_grad()
            expected = expected or found
            wrong += [
                f"result {i} on {degree} ranks, recomputed {model.recomputes}"
                for i, (one, other) in enumerate(zip(found, expected, strict=True))
                if not torch.equal(one, other)
            ]
    return wrong


@contextmanager
def seeded(fault: str | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(*FAULTS_OF_SEQUENCES[fault])
        yield


def test_what_a_cut_sequence_cannot_keep_is_refused(ranks: Pools) -> None:
    ranks(2).run(check_refusals_of_sequences)


def check_refusals_of_sequences() -> None:
    x = torch.randn(2, 16, 64)
    for kind, given, why in (
        (DropsByItself, x, "something draws random numbers for a part of the sequence"),
        (Block, x[:, :12], "cuts a sequence into blocks of one length, got 12"),
    ):
        plan = tpk.make_plan(Stack(kind), 2, sequence_parallel=True, example_inputs=x)
        model = tpk.parallelize(Stack(kind), small_groups(SAME_BITS)[2], plan, example_inputs=x, same_bits=SAME_BITS)
        with pytest.raises(ValueError, match=why):
            model(given)


def test_without_the_mode_bits_differ_and_the_first_difference_is_named(ranks: Pools) -> None:
    """So that the comparison can fail."""
    for count, found in ranks(2).run(compare_without):
        assert count > 20 and {one.degree for one in found} == {2} and {one.rank for one in found} == {0, 1}
        assert "training on 2 ranks, first differs in the" in str(found[0]) and found[0].count > 10


def compare_without() -> tuple[int, list[selftest.Difference]]:
    return selftest.compare(Case("gpt", "float32", 1, layers=1), small_groups(None), None)


def test_overrides_of_a_plan_hold_at_every_degree(ranks: Pools) -> None:
    ranks(2).run(check_overrides)


def check_overrides() -> None:
    """One layer of a pair is left whole, and its neighbour is another one than without the override."""
    x, outputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), []
    for degree, group in small_groups(SAME_BITS).items():
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        options: dict[str, Any] = {"example_inputs": x, "same_bits": SAME_BITS}
        plan = tpk.make_plan(model, degree, overrides={"1": "replicate"}, **options)
        assert plan.styles != tpk.make_plan(model, degree, **options).styles
        outputs.append(tpk.parallelize(model, group, plan, **options)(x))
    assert torch.equal(*outputs)


class DropsPacked(nn.Module):
    """Drops out gate and up at once: a rank's part is two runs of features, not blocks of one."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.dropout, self.down = nn.Linear(64, 1024), nn.Dropout(0.1), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dropout(self.both(x)).chunk(2, -1)
        return cast(Tensor, self.down(F.silu(gate) * up))


def test_what_depends_on_the_degree_is_refused_before_anything_changes(ranks: Pools) -> None:
    ranks(2).run(check_refusals)


def check_refusals() -> None:
    group = own_group(SAME_BITS)
    x = torch.zeros(4, 64)

    def mlp(inner: int = 256, *between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(64, inner), nn.SiLU(), *between, nn.Linear(inner, 64))

    asked = {"0": tpk.sharding.Column(sequence_parallel=True)}
    along = tpk.make_plan(mlp(), dist.get_world_size(), overrides=asked, example_inputs=x, same_bits=SAME_BITS)
    for why, model, options in (
        ("works on a part of the sequence", mlp(), {"plan": {"0": tpk.sharding.Column(sequence_parallel=True)}}),
        ("which is in no blocks", nn.Sequential(nn.Embedding(32, 64)), {"plan": {"0": tpk.sharding.Features()}}),
        ("and an override does not say what else does", mlp(), {"plan": along}),
        (r"same_bits must be a power of two.*got 6", mlp(), {"same_bits": 6}),
    ):
        with pytest.raises(ValueError, match=why):
            tpk.parallelize(model, group, **({"example_inputs": x, "same_bits": SAME_BITS, "plan": "auto"} | options))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    for why, between in (
        ("something draws random numbers that is not nn.Dropout", nn.AlphaDropout(0.1)),
        ("dropout of a tensor of shape", nn.Sequential(nn.Unflatten(-1, (-1, 16)), nn.Dropout(0.1), nn.Flatten(-2))),
    ):
        dropping = tpk.parallelize(mlp(256, between), group, example_inputs=x, same_bits=SAME_BITS)
        dropping.eval()(x)
        with pytest.raises(ValueError, match=f"between '0' and '3' .*{why}|between '0' and '3' there is {why}"):
            dropping.train()(x)
    packed = tpk.parallelize(DropsPacked(), group, example_inputs=x, same_bits=SAME_BITS)
    with pytest.raises(ValueError, match="between 'both' and 'down' there is dropout of a tensor of shape"):
        packed(x)
    by_hand = tpk.parallelize(mlp(256, nn.Dropout(0.1)), group, plan={"0": "column", "3": "row"}, same_bits=SAME_BITS)
    by_hand.eval()(x)
    with pytest.raises(ValueError, match="a plan written by hand something draws random numbers"):
        by_hand.train()(x)
    norm = tpk.nn.LayerNorm(64, group, sequence_parallel=True)
    replicated = tpk.nn.replicate_parameters(nn.LayerNorm(64), group, sequence_parallel=True)
    for module, who in ((norm, "a norm"), (replicated, "a module")):
        with pytest.raises(ValueError, match=f"{who} with sequence_parallel does not give the same bits"):
            module(x)
    uneven = tpk.parallelize(mlp(264), group, example_inputs=x, same_bits=SAME_BITS)
    with pytest.raises(ValueError, match="must be a multiple of 64 elements, got 132"):
        uneven(x)


class TenHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(80, 80) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for of in (self.query, self.key, self.value))
        return cast(Tensor, x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


@pytest.mark.slow("plans and a verification")
def test_heads_that_do_not_divide_are_found_verified_and_cut_in_halves(ranks: Pools) -> None:
    (expected,) = ranks(1).run(ten_heads)
    for rank, found in enumerate(ranks(4).run(ten_heads)):
        assert_same(found, expected, f"output on rank {rank}")


def ten_heads() -> Tensor:
    group, x = own_group(SAME_BITS), torch.randn(2, 32, 80, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = tpk.parallelize(TenHeads(), group, example_inputs=x, same_bits=SAME_BITS, verify=True)
    if group.size() == 4:
        assert model.query.shard_sizes == (24, 16, 24, 16) and model.query.weight.shape == (16, 8, 80)
        other = tpk.make_plan(TenHeads(), 4, example_inputs=x)
        with pytest.raises(
            ValueError, match=r"cuts weight of module 'query' into \[24, 24, 24, 8\], and the blocks of 8"
        ):
            tpk.parallelize(TenHeads(), group, other, example_inputs=x, same_bits=SAME_BITS)
    return model(x).detach()
