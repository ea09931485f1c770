"""Our layers in Megatron-Core's GPT: the bits of its own with two ranks, and what is refused or left as it is."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations import counting
from tests.integrations.megatron import models
from tests.integrations.megatron.exact import Expected, Given, Results, column, row
from tests.nn.reference import LIMIT_S
from tpkernels.testing.numeric import Bounded, BoundExceeded
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR, Bound, bounds_of

pytest.importorskip("megatron.core", reason="the package megatron-core is missing: pip install megatron-core")

from megatron.core import parallel_state, tensor_parallel

from tpkernels.integrations import megatron as tpk_megatron

STEPS = 6
OPS = ("all_gather_matmul", "copy_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "all_gather")


def counted() -> contextlib.AbstractContextManager[collections.Counter[str]]:
    return counting.counted([(tpk_megatron.__name__, name) for name in OPS])


# ---------------------------------------------------------------- whole models


def alone() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One process in fp64 and in fp32."""
    with models.on_cpu(1):
        return models.train(models.gpt(1).double(), STEPS), models.train(models.gpt(1), STEPS)


def trained(tp: int, sequence_parallel: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with models.on_cpu(tp):
        stock = models.gpt(tp, sequence_parallel=sequence_parallel)
        found["stock"] = models.train(stock, STEPS)
        layers = models.gpt(tp, tpk_megatron.layer_spec, sequence_parallel=sequence_parallel)
        with counted() as counts:
            models.loss_of(layers, 0)
        found["counts"] = dict(counts)
        found["layers"] = models.train(layers, STEPS)
        swap = functools.partial(tpk_megatron.layer_spec, strict=True)
        whole = tpk_megatron.convert_output(models.gpt(tp, swap, sequence_parallel=sequence_parallel), strict=True)
        with counted() as counts:
            models.loss_of(whole, 0)
        found["whole counts"] = dict(counts)
        found["whole"] = models.train(whole, STEPS)
        found["files"] = files(stock) == files(whole)
        stock.load_state_dict(whole.state_dict())
    return found


def files(model: Any) -> dict[str, tuple[object, ...]]:
    """What Megatron's checkpoints are told of each parameter."""
    entries = {}
    for key, entry in model.sharded_state_dict().items():
        where = [getattr(entry, name, None) for name in ("key", "local_shape", "global_shape", "global_offset")]
        entries[key] = (type(entry).__name__, *where)
    return entries


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("replicas", "tp", "sequence_parallel"),
    [
        (1, 2, True),
        pytest.param(1, 2, False, marks=pytest.mark.full("each layer is compared by itself as well")),
        pytest.param(1, 3, True, marks=pytest.mark.full("three ranks")),
        pytest.param(2, 2, True, marks=pytest.mark.full("four ranks")),
    ],
)
def test_a_gpt_has_the_bits_of_stock_megatron_and_is_as_exact_as_one_process(
    ranks: Pools, replicas: int, tp: int, sequence_parallel: bool
) -> None:
    """Of three ranks nobody promises the order of a sum: there both are as exact as one process."""
    ((exact, plain),) = ranks(1).run(alone, timeout=LIMIT_S)
    bounds = bounds_of({name: (exact[name], plain[name]) for name in exact}, {})
    results = ranks(replicas * tp).run(trained, tp, sequence_parallel, timeout=LIMIT_S)
    column, row = ("all_gather_matmul", "matmul_reduce_scatter") if sequence_parallel else OPS[1:3]
    for result in results:
        assert result["counts"] == {column: 2, row: 2}, "query, key and value; the projection; the block's two"
        assert result["whole counts"] == {column: 3, row: 2, "all_gather": 2}, "and the head with its loss"
        assert result["files"], "sharded_state_dict is Megatron's"
        assert result["layers"].keys() == result["stock"].keys() == plain.keys()
        for kind in ("layers", "whole"):
            different = [name for name, value in result["stock"].items() if not torch.equal(result[kind][name], value)]
            assert tp > 2 or not different, (kind, different)
    for first, other in zip(results[:tp], results[tp:], strict=replicas == 2):
        assert all(torch.equal(first["whole"][name], value) for name, value in other["whole"].items())
    shapes = {name: value.shape for name, value in plain.items()}
    for kind in ("layers", "whole"):
        found = models.whole([result[kind] for result in results[:tp]], shapes)
        worst = {name: bounds[name].ratio(found[name]) / FACTOR for name in bounds}
        assert max(worst.values()) <= 1, (kind, max(worst.items(), key=lambda item: item[1]))


def token_losses(kind: str) -> list[tuple[str, Tensor, Tensor]]:
    """Losses and gradients of 9 x 4 tokens, by Megatron's function and by ours."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(9, 4, 35 * world, generator=generator)
    if kind == "exact sums":  # each exp() is 1 or 0, and all ranks have a largest logit
        logits = torch.where(logits > 2, 0.0, -200.0)
        logits[..., ::35] = 0
    target, grads = torch.randint(35 * world, (9, 4), generator=generator), torch.randn(9, 4, generator=generator)
    mine = logits.to(torch.bfloat16 if kind == "bf16" else torch.float32).chunk(world, -1)[rank]
    both, found = (tensor_parallel.vocab_parallel_cross_entropy, tpk_megatron.vocab_parallel_cross_entropy), []
    with models.on_cpu(world):
        for function in both:
            leaf = mine.clone().requires_grad_()
            given = leaf * 1 if kind != "strided" else (leaf * 1).transpose(0, 1).contiguous().transpose(0, 1)
            kept = given.detach().clone()
            losses = function(given.contiguous() if function is both[0] else given, target)
            losses.backward(grads)
            assert leaf.grad is not None
            found.append((losses.detach(), leaf.grad))
        assert torch.equal(given.detach(), kept), "ours leaves its input alone"
        hidden = mine.clone().requires_grad_()
        without = target.masked_fill(target % 3 == 0, tpk_megatron.IGNORED)
        losses = tpk_megatron.vocab_parallel_cross_entropy(hidden, without)
        losses.backward(grads)
    named = [(name, *tensors) for name, *tensors in zip(("losses", "gradients"), *found, strict=True)]
    ignored, (theirs, gradient) = without < 0, found[0]
    assert hidden.grad is not None
    named.append(("losses without some", theirs.masked_fill(ignored, 0), losses.detach()))
    named.append(("gradients without some", gradient.masked_fill(ignored.unsqueeze(-1), 0), hidden.grad))
    return named


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (2, ("fp32", "bf16", "strided")),
        # Nobody promises the order of three sums, which does not matter where they are exact.
        pytest.param(3, ("exact sums",), marks=pytest.mark.full("three ranks")),
        pytest.param(4, ("exact sums",), marks=pytest.mark.full("four ranks")),
    ],
)
def test_the_loss_has_the_bits_of_stock_megatron(ranks: Pools, world: int, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        for found in ranks(world).run(token_losses, kind, timeout=LIMIT_S):
            for name, theirs, ours in found:
                assert theirs.dtype == ours.dtype and torch.equal(theirs, ours), (kind, name)


# ---------------------------------------------------------------- single layers

COLUMNS: list[dict[str, Any]] = [
    {},
    {"bias": False, "skip_bias_add": False, "gather_output": True},
    {"skip_bias_add": True},
    {"runtime": True},
    {"gather_output": True, "runtime": False},
    {"given": True, "bias": False},
    {"frozen": True, "bias": False},  # Megatron forgets the gradient of the bias then
]
ROWS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"skip_bias_add": True},
    {"input_is_parallel": False},
    {"frozen": True},
]


def run_layer(kind: type[nn.Module], sequence_parallel: bool, options: dict[str, Any]) -> tuple[Results, Given]:
    """What goes out of a layer, and the gradients of what goes in; and what went in."""
    column, world, rank = "Column" in kind.__name__, dist.get_world_size(), dist.get_rank()
    given = {"bias": True, "skip_bias_add": False, **({} if column else {"input_is_parallel": True}), **options}
    extra = {name: given.pop(name, None) for name in ("runtime", "given", "frozen")}
    heads = {"num_attention_heads": world, "num_query_groups": world, "hidden_size": 8 * world}
    config = models.config(world, sequence_parallel=sequence_parallel, add_bias_linear=True, **heads)
    torch.manual_seed(1)
    layer: Any = kind(12, 18, config=config, init_method=nn.init.xavier_normal_, **given)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    layer.weight.requires_grad_(not extra["frozen"])
    whole = torch.randn(6, 2, 12)
    x = whole.chunk(world)[rank] if sequence_parallel and column else whole
    x = x.chunk(world, -1)[rank] if not column and given["input_is_parallel"] else x
    x = x.clone().requires_grad_()
    more: dict[str, Any] = {"runtime_gather_output": extra["runtime"]} if column else {}
    weight = layer.weight
    if extra["given"]:
        weight = more["weight"] = (2 * layer.weight.detach()).requires_grad_()
    y, bias = layer(x, **more)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2 + rank * sequence_parallel))
    y.mul(dy).sum().backward()
    bias, held = (None if one is None else one.detach() for one in (bias, layer.bias))
    results = (y.detach(), bias, x.grad, weight.grad, getattr(layer.bias, "grad", None))
    return results, Given(whole, weight.detach(), held, dy)


def layers() -> list[tuple[str, Results, Results, Expected]]:
    found = []
    with models.on_cpu(dist.get_world_size()):
        for name, cases in (("ColumnParallelLinear", COLUMNS), ("RowParallelLinear", ROWS)):
            for options in cases:
                for sequence_parallel in (False, True):
                    whole = options.get("gather_output") or options.get("runtime")
                    if sequence_parallel and (whole or options.get("input_is_parallel") is False):
                        continue  # Megatron does not, either
                    both = [getattr(library, name) for library in (tensor_parallel, tpk_megatron)]
                    (stock, _), (ours, given) = (run_layer(kind, sequence_parallel, options) for kind in both)
                    expected = (column if name.startswith("Column") else row)(given, sequence_parallel, options)
                    found.append((f"{name} {options} {sequence_parallel}", stock, ours, expected))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full("three ranks"))])
def test_every_option_of_a_layer_gives_what_megatron_gives(ranks: Pools, world: int) -> None:
    for result in ranks(world).run(layers, timeout=LIMIT_S):
        assert len(result) == 20 - 4 + 4
        for name, stock, ours, expected in result:
            for theirs, mine, bound, what in zip(stock, ours, expected, ("y", "bias", "dx", "dw", "db"), strict=True):
                assert (theirs is None) == (mine is None) == (bound is None), (name, what)
                if theirs is not None and mine is not None and bound is not None:
                    bound.check(mine, f"{name}: {what}")
                    assert world > 2 or what == "y" or torch.equal(mine, theirs), f"{name}: {what}"


def faulty_layers() -> list[tuple[Tensor | None, Bounded | None]]:
    """Outputs with a bias that is added twice, and with the sum of one rank, and what they have to be."""
    real = tpk_megatron.copy_matmul

    def twice(x: Tensor, weight: Tensor, group: Any, *, bias: Tensor, **options: Any) -> Any:
        return real(x, weight, group, bias=bias, **options) + bias

    def alone(x: Tensor, weight: Tensor, group: Any, *, bias: Tensor | None = None, **options: Any) -> Tensor:
        return F.linear(x, weight, bias)

    found = []
    with models.on_cpu(dist.get_world_size()):
        for name, op, fault, expected in (
            ("ColumnParallelLinear", "copy_matmul", twice, column),
            ("RowParallelLinear", "matmul_all_reduce", alone, row),
        ):
            with mock.patch.object(tpk_megatron, op, fault):
                (y, *_), given = run_layer(getattr(tpk_megatron, name), False, {})
            found.append((y, expected(given, False, {})[0]))
    return found


@pytest.mark.gloo
def test_a_bias_added_twice_and_the_sum_of_one_rank_are_beyond_the_bound(ranks: Pools) -> None:
    for found in ranks(2).run(faulty_layers, timeout=LIMIT_S):
        for y, bound in found:
            assert y is not None and bound is not None
            with pytest.raises(BoundExceeded):
                bound.check(y)


def micro_batches(sequence_parallel: bool) -> dict[str, tuple[Tensor, Tensor | None, Any, Bound]]:
    """Two micro-batches: gradients in fp32 beside bf16 weights, and those of one process in fp64, with their bound."""
    found = {}
    with models.on_cpu(dist.get_world_size()):
        for fused in (True, False):
            config = models.config(
                dist.get_world_size(),
                sequence_parallel=sequence_parallel,
                gradient_accumulation_fusion=fused,
                params_dtype=torch.bfloat16,
            )
            options = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
            torch.manual_seed(1)
            ours: Any = tpk_megatron.ColumnParallelLinear(12, 18, **options)
            exact, plain = (
                nn.Linear(12, len(ours.weight), False, dtype=one) for one in (torch.float64, torch.bfloat16)
            )
            for layer in (exact, plain):
                layer.weight.data.copy_(ours.weight)
            total = torch.zeros(ours.weight.shape)
            ours.weight.main_grad = torch.zeros(ours.weight.shape)
            ours.weight.grad_added_to_main_grad = False
            for step in range(2):
                x = torch.randn(6, 2, 12, generator=torch.Generator().manual_seed(step)).bfloat16()
                mine = x.chunk(dist.get_world_size())[dist.get_rank()] if sequence_parallel else x
                ours(mine.clone().requires_grad_())[0].float().square().sum().backward()
                exact(x.double()).square().sum().backward()
                y = plain(x)
                y.float().square().sum().backward()
                total += 2 * y.detach().flatten(0, 1).float().t() @ x.flatten(0, 1).float()
                if not fused:
                    assert ours.weight.grad is not None
                elif step == 0:
                    ours.weight.grad = None  # what the hook of Megatron's buffer drops
            weight, grads = ours.weight, (exact.weight.grad, total if fused else plain.weight.grad)
            (bound,) = bounds_of({"weight": grads}, {}).values()
            found[str(fused)] = (weight.main_grad, weight.grad, weight.grad_added_to_main_grad, bound)
    return found


@pytest.mark.gloo
def test_micro_batches_are_added_to_main_grad_where_the_fusion_is_on(ranks: Pools) -> None:
    for sequence_parallel in (False, True):
        for found in ranks(2).run(micro_batches, sequence_parallel, timeout=LIMIT_S):
            main_grad, _, added, bound = found["True"]
            assert added is True and main_grad.dtype == torch.float32
            assert bound.ratio(main_grad) <= FACTOR
            main_grad, grad, added, bound = found["False"]
            assert added is False and not main_grad.any() and grad is not None, "Megatron's own hook adds it"
            assert bound.ratio(grad) <= FACTOR


# ---------------------------------------------------------------- the page and the example


def run_texts(page: str, example: str) -> str:
    output = io.StringIO()
    with models.on_cpu(dist.get_world_size()):
        exec(compile(page, "the block of the page", "exec"), {})
        with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", [example, "--steps", "3"]):
            runpy.run_path(example, run_name="__main__")
    return output.getvalue()


@pytest.mark.gloo
def test_the_page_and_the_example_run(ranks: Pools) -> None:
    root = Path(__file__).resolve().parents[3]
    section = root.joinpath("docs", "trainers.md").read_text(encoding="utf-8").partition("## Megatron-Core\n")[2]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.M | re.S)
    ours = [line for line in block.splitlines() if "tpk_megatron" in line]
    assert len(ours) == 3, "three lines are ours, the import among them"
    example = root / "examples" / "megatron_gpt.py"
    ours = [line for line in example.read_text(encoding="utf-8").splitlines() if "tpk_megatron" in line]
    assert len(ours) == 3
    output, other = ranks(2).run(run_texts, block, str(example), timeout=LIMIT_S)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.M)]
    assert len(losses) == 3 and losses[2] < losses[0] and other == "", output


# ---------------------------------------------------------------- what is left, and what is refused


def refusals() -> list[str]:
    said = []

    def ask(what: Callable[[], object]) -> None:
        with pytest.raises(ValueError) as caught:
            what()
        said.append(str(caught.value))

    with models.on_cpu(dist.get_world_size()):
        given = {"init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
        column = tpk_megatron.ColumnParallelLinear
        ask(lambda: column(4, 8, config=models.config(2), disable_grad_reduce=True, **given))
        ask(lambda: column(4, 8, config=models.config(2), is_expert=True, **given))
        loss, logits = tpk_megatron.vocab_parallel_cross_entropy, torch.ones(2, 4)
        ask(lambda: loss(logits, torch.ones(2).long(), 0.1))
        ask(lambda: loss(logits, torch.full((2,), 8)))
        ask(lambda: loss(logits, torch.ones(3).long()))
        layer: Any = column(4, 8, config=models.config(2), **given)
        layer.explicit_expert_comm = True  # as a shared expert that overlaps does, later
        ask(lambda: layer(torch.ones(2, 1, 4)))
        model = models.gpt(2, cross_entropy_loss_fusion=True)
        ask(lambda: tpk_megatron.convert_output(model, strict=True))
        with pytest.raises(RuntimeError, match="supplied weight's shape"):
            column(4, 8, config=models.config(2), **given)(torch.ones(2, 1, 4), torch.ones(3, 4))
    return said


@pytest.mark.gloo
def test_options_that_would_be_ignored_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(refusals, timeout=LIMIT_S):
        labels = ("label_smoothing", "target must be within [0, 8)", "target must have the shape of")
        parts = ("disable_grad_reduce", "of an expert", *labels, "of an expert", "cross_entropy_loss_fusion")
        assert len(said) == len(parts)
        for text, part in zip(said, parts, strict=True):
            assert part in text, text


@pytest.mark.cpu
def test_experts_and_layers_of_others_stay_and_are_named() -> None:
    from megatron.core.transformer.mlp import MLPSubmodules

    moe = models.spec(num_experts=4, moe_grouped_gemm=False)
    with pytest.warns(UserWarning, match=r"mlp\..*experts.*linear_fc1: experts exchange their tokens"):
        ours = tpk_megatron.layer_spec(moe)
    attention = ours.submodules.self_attention.submodules
    assert attention.linear_qkv is tpk_megatron.ColumnParallelLinear
    assert moe.submodules.self_attention.submodules.linear_qkv is tensor_parallel.ColumnParallelLinear, "a copy"
    with pytest.raises(ValueError, match=r"run no op of tpkernels.*experts"):
        tpk_megatron.layer_spec(moe, strict=True)

    class TEColumnLinear(nn.Linear):
        """Stands for Transformer Engine's."""

    with pytest.raises(ValueError, match=r"no ColumnParallelLinear.*linear_fc1: TEColumnLinear has a GEMM"):
        tpk_megatron.layer_spec(MLPSubmodules(linear_fc1=TEColumnLinear, linear_fc2=TEColumnLinear))


@pytest.mark.cpu
def test_the_first_name_of_megatron_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpk_megatron.first_missing() is None
    for owner, name, said in (
        (parallel_state, "get_tensor_model_parallel_group", r"parallel_state\.get_tensor_model_parallel_group"),
        (tensor_parallel.RowParallelLinear, "forward", r"RowParallelLinear takes \['self'\]"),
    ):
        with monkeypatch.context() as patch:
            if name == "forward":
                patch.setattr(owner, name, lambda self: None)
            else:
                patch.delattr(owner, name)
            tpk_megatron.first_missing.cache_clear()
            with pytest.raises(ValueError, match=said):
                tpk_megatron.layer_spec(models.spec())
        tpk_megatron.first_missing.cache_clear()
    layer = tensor_parallel.RowParallelLinear.__new__(tensor_parallel.RowParallelLinear)
    nn.Module.__init__(layer)
    with pytest.raises(ValueError, match=re.escape("'s RowParallelLinear has no attribute bias")):
        tpk_megatron._check(layer, "RowParallelLinear")
