"""Norms that run with the sum over the ranks before them: values, gradients, and code that looks in between."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, half, plan_once, tp_mesh
from tpkernels.nn import fused_norm
from tpkernels.nn.fused_norm import FusedNorm, PendingSum
from tpkernels.ops import residual_norm
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, LENGTH, BLOCKS = 6, 5, 2


class Block(nn.Module):
    """Two rows, each followed by an addition and a norm; ``how`` says what the code does in between."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-2)
        self.one, self.two = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 12)
        self.out, self.down = nn.Linear(10, WIDTH), nn.Linear(12, WIDTH, bias=False)
        self.drop = nn.Dropout(0.0)
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        inner: Callable[[Tensor], Tensor] = self.second
        if self.how in ("inner region", "inner reentrant region"):
            return x + checkpoint(inner, self.middle(x), use_reentrant="reentrant" in self.how)
        y = self.drop(inner(self.middle(x)))
        if self.how == "looks":
            assert torch.equal(y, y.detach().clone()) and y.shape == x.shape
        if self.how == "scales":
            y = y * 0.5
        if self.how == "writes":
            y.mul_(0.5)
        if self.how == "adds otherwise":
            return torch.add(y, x, alpha=2)
        if self.how == "adds twice":
            return (x + y) + y
        if self.how == "without gradient":
            with torch.no_grad():
                x + y
        total = y + x
        if self.how == "writes the sum":
            total.add_(1)
        return total

    def first(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.one(self.before(x))))
        return y

    def second(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.two(x)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.how in ("region", "reentrant region"):
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant region")
            else:
                x = block(x)
        y: Tensor = self.norm(x)
        return y

    def turn(self, how: str) -> Net:
        self.how = how
        for block in self.blocks:
            block.how = how
        return self


def reset(model: nn.Module) -> nn.Module:
    """Weights of norms that are not all 1, so that their gradients tell something."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "before" in name or "middle" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


@functools.cache
def plan_of(world: int, sequence: bool) -> tpk.ShardingPlan:
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    plan = tpk.make_plan(Net().double(), world, sequence_parallel=sequence, example_inputs=x)
    names = [("blocks.0.out", "blocks.0.middle"), ("blocks.0.down", "blocks.1.before"),
             ("blocks.1.out", "blocks.1.middle"), ("blocks.1.down", "norm")]  # fmt: skip
    found = {(row, norm) for row, norm, _ in plan.fused}
    assert found == set(names[: 3 if sequence else 4]), plan
    return plan


def pair(sequence: bool, fused: str | bool = True) -> tuple[Net, Net, Tensor]:
    torch.manual_seed(7)
    plain = reset(Net().double())
    model = copy.deepcopy(plain)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    plan = plan_of(dist.get_world_size(), sequence)
    return plain, tpk.parallelize(model, tp_mesh(), plan, fused_norm=fused), x


def ties(model: nn.Module) -> list[FusedNorm]:
    return [tie for module in model.modules() if (tie := getattr(module, "followed_by", None)) is not None]


def counts(model: nn.Module) -> tuple[int, int]:
    """Sums that were fused, and results that norms took."""
    return sum(tie.sums for tie in ties(model)), sum(tie.taken for tie in ties(model))


def _nothing(module: nn.Module, grads: Any, dys: Any) -> None:
    pass


_nothing.takes_parts = True  # type: ignore[attr-defined]


def goes(how: str, sequence: bool) -> tuple[tuple[int, int], list[str]]:
    """What was fused in one step, and what is wrong with its values."""
    plain, model, x = pair(sequence)
    model(x)  # the first call of a kind is followed op by op
    before = counts(model)
    outputs = []
    for net in (plain, model):
        net.turn(how)
        if how == "hooked":
            net.blocks[0].down.register_full_backward_hook(_nothing)
            net.blocks[1].register_forward_hook(lambda module, args, y: y * 1)
        run: Any = torch.compile(net, backend="aot_eager") if how == "compiled" and net is model else net
        outputs.append(run(x.clone().requires_grad_()))
        outputs[-1].square().sum().backward()
    after = counts(model)
    wrong = compare_tensors(model, plain, LIMIT[False])
    problem = differs(outputs[1], outputs[0], LIMIT[False])
    if any(tie._waiting is not None for tie in ties(model)) and how not in ("writes the sum", "hooked"):
        wrong.append("results wait")
    with torch.no_grad():
        problem = problem or differs(model(x), plain(x), LIMIT[False])
    return (after[0] - before[0], after[1] - before[1]), wrong + ([problem] if problem else [])


def ways(cases: list[tuple[str, bool]]) -> dict[tuple[str, bool], tuple[tuple[int, int], list[str]]]:
    return {case: goes(*case) for case in cases}


EXPECTED = {
    "plain": ((4, 4), (3, 3)),
    "looks": ((2, 2), (2, 2)),
    "scales": ((2, 2), (2, 2)),
    "writes": ((2, 2), (2, 2)),
    "adds otherwise": ((2, 2), (2, 2)),
    "adds twice": ((6, 4), (4, 3)),
    "without gradient": ((2, 2), (2, 2)),
    "compiled": ((0, 0), (0, 0)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_right_whatever_the_code_does_between_row_and_norm(
    ranks: Pools, world: int, full: bool
) -> None:
    cases = [(how, sequence) for how in EXPECTED for sequence in (False, True)]
    some = [case for case in half(cases) if case[0] != "compiled"]  # where nothing is fused
    for found in ranks(world).run(ways, cases if full else some, timeout=2 * LIMIT_S):
        for (how, sequence), (count, wrong) in found.items():
            assert not wrong, (how, sequence, wrong)
            assert count == EXPECTED[how][sequence], (how, sequence, count)


REGIONS = ("region", "reentrant region", "inner region", "inner reentrant region", "hooked")


def test_checkpointed_regions_and_hooks_change_no_value(ranks: Pools) -> None:
    cases = [(how, sequence) for how in REGIONS for sequence in (False, True)]
    for found in ranks(2).run(ways, cases, timeout=2 * LIMIT_S):
        for (how, sequence), (count, wrong) in found.items():
            assert not wrong, (how, sequence, wrong)
            assert count[1] > 0, (how, sequence, count)


def one_rank_looks() -> list[str]:
    plain, model, x = pair(sequence=False)
    seen: list[Tensor] = []
    if dist.get_rank() == 0:

        def look(module: nn.Module, args: Any, y: Tensor) -> None:
            seen.append(y.detach() * 1)

        look.takes_parts = True  # type: ignore[attr-defined]
        model.blocks[0].down.register_forward_hook(look)
    for net in (plain, model):
        for _ in range(2):
            net(x).square().sum().backward()
    assert len(seen) == 2 * (dist.get_rank() == 0)
    return compare_tensors(model, plain, LIMIT[False])


def test_a_hook_that_looks_at_a_row_on_one_rank_alone_keeps_the_ranks_in_step(ranks: Pools) -> None:
    assert ranks(2).run(one_rank_looks, timeout=LIMIT_S) == [[], []]


# ---------------------------------------------------------------- three steps of models


def llama() -> nn.Module:
    return reset(zoo.build("llama", torch.float32, num_attention_heads=6, num_key_value_heads=6))


def trains(name: str, sequence: bool, fused: str | bool) -> tuple[int, list[str]]:
    """Three steps of AdamW against the unsharded model."""
    torch.manual_seed(3)
    if name == "llama":
        plain, model, given = llama(), llama(), zoo.inputs("llama", torch.float32)
        plan = plan_once(model, tp_mesh(), sequence_parallel=sequence, example_inputs=given)
        assert len(plan.fused) == (3 if sequence else 4), plan
        tpk.parallelize(model, tp_mesh(), plan, fused_norm=fused)
        limit = 2e-4  # three steps of fp32
    else:
        plain, model, x = pair(sequence, fused)
        given, limit = {"x": x}, LIMIT[False]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (plain, model)]
    wrong: list[str] = []
    for step in range(3):
        results = []
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            y = zoo.output(net(**given)) if name == "llama" else net(**given)
            y.float().square().mean().backward() if name == "llama" else y.square().mean().backward()
            results.append(y)
        problem = differs(results[1], results[0], limit)
        wrong += [f"output of step {step}: {problem}"] if problem else []
        wrong += [f"step {step}: {what}" for what in compare_tensors(model, plain, limit)]
        for optimizer in optimizers:
            optimizer.step()
    return counts(model)[1], wrong


def many(cases: list[tuple[str, bool, str | bool]]) -> list[tuple[int, list[str]]]:
    return [trains(*case) for case in cases]


@pytest.mark.full("three steps of what is compared for one")
@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_three_steps_are_those_of_the_unsharded_model(ranks: Pools, world: int, full: bool) -> None:
    pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
    cases = [(name, sequence, fused) for name in ("llama", "block") for sequence in (False, True)
             for fused in (True, False)]  # fmt: skip
    cases = [*(cases if full or world == 2 else cases[::3]), ("block", False, "auto")]  # of few rows
    for found in ranks(world).run(many, cases, timeout=3 * LIMIT_S):
        for (name, sequence, fused), (taken, wrong) in zip(cases, found, strict=True):
            assert not wrong, (name, sequence, fused, wrong[:3])
            assert taken == (0 if fused is not True else 3 * (3 if sequence else 4)), (name, sequence, fused, taken)


# ---------------------------------------------------------------- faults


def faulty(fault: str, sequence: bool) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if fault == "residual on every rank":
            run = fused_norm.RowCall.run

            def adds(self: Any, residual: Tensor, weight: Tensor, eps: float) -> Any:
                return run(self, residual * dist.get_world_size(), weight, eps)

            patch.setattr(fused_norm.RowCall, "run", adds)
        elif fault == "weight's gradient of one rank":
            patch.setattr(residual_norm.agreed_call, "run", _alone(residual_norm.agreed_call.run))
        elif fault == "epsilon":
            patch.setattr(FusedNorm, "__init__", _with_epsilon(FusedNorm.__init__))
        elif fault == "version":
            patch.setattr(fused_norm, "_version", lambda x: 0)
        plain, model, x = pair(sequence)
        outputs = []
        for net in (plain, model):
            if fault in ("version", "none"):
                with torch.no_grad():
                    outputs.append(net.turn("writes the sum")(x))
                continue
            outputs.append(net(x))
            outputs[-1].square().sum().backward()
    problem = differs(outputs[1], outputs[0], LIMIT[False])
    return compare_tensors(model, plain, LIMIT[False]) + ([f"output: {problem}"] if problem else [])


def _alone(run: Any) -> Any:
    def alone(group: Any, signature: Any, k: int, arguments: Any, device: Any) -> Any:
        total = run(group, signature, k, arguments, device)
        return arguments.x.clone() if signature.detail == "gradient of a norm's weight" else total

    return alone


def _with_epsilon(init: Any) -> Any:
    def made(self: FusedNorm, norm: nn.Module, eps: float, **options: Any) -> None:
        init(self, norm, 2 * eps, **options)

    return made


@pytest.mark.parametrize(
    ("fault", "sequence", "where"),
    [
        ("residual on every rank", False, "output"),
        ("residual on every rank", True, "output"),
        ("weight's gradient of one rank", True, "gradient of blocks.0.middle.weight"),
        ("epsilon", False, "output"),
        ("version", False, "output"),
    ],
)
def test_faults_are_noticed(ranks: Pools, fault: str, sequence: bool, where: str) -> None:
    assert not any(ranks(2).run(faulty, "none", sequence, timeout=LIMIT_S))
    for wrong in ranks(2).run(faulty, fault, sequence, timeout=LIMIT_S):
        assert any(where in line for line in wrong), wrong


# ---------------------------------------------------------------- what plans say


class Like(nn.Module):
    """A norm with a weight alone, of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "one more":  # gemma
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        if self.kind == "centred":
            x = x - x.mean(-1, keepdim=True)
        if self.kind == "mean of all":
            return x * torch.rsqrt(x.square().mean() + 1e-6) * self.weight
        if self.kind == "without gradient":
            return x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6) * self.weight
        if self.kind == "single":
            return self.weight * nn.functional.rms_norm(x.float(), (WIDTH,), None, 1e-6).to(x.dtype)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def plan_with(norm: nn.Module, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> tpk.ShardingPlan:
    model = Net()
    model.blocks[0].middle = norm
    model.blocks[0].drop.p = dropout
    x = torch.randn(2, LENGTH, WIDTH, dtype=dtype)
    return tpk.make_plan(model.to(dtype), 2, example_inputs=x)


@pytest.mark.parametrize("kind", ["rms", "one more", "centred", "mean of all", "without gradient", "single"])
def test_a_norm_is_tried_on_numbers_before_it_is_fused(kind: str) -> None:
    plan = plan_with(Like(kind))
    fused = {row: (norm, eps) for row, norm, eps in plan.fused}
    if kind in ("rms", "single"):
        assert fused["blocks.0.out"] == ("blocks.0.middle", pytest.approx(1e-6))
    else:
        assert "blocks.0.out" not in fused
        assert "blocks.0.out: the Like behind its sum does not compute RMS norm" in " ".join(str(plan).split())
    assert fused["blocks.1.out"] == ("blocks.1.middle", 1e-2)
    assert fused["blocks.1.down"] == ("norm", torch.finfo(torch.float32).eps)


def test_a_norm_that_computes_in_fp32_is_not_fused_in_a_model_of_fp64() -> None:
    assert "or not in torch.float64" in " ".join(str(plan_with(Like("single"), torch.float64)).split())
    assert "blocks.0.out" in {row for row, _, _ in plan_with(Like("rms"), torch.float64).fused}


def test_plans_print_what_is_fused_and_why_the_rest_is_not() -> None:
    text = str(plan_with(nn.LayerNorm(WIDTH), dropout=0.5))
    assert "the sum of blocks.1.out is one op with blocks.1.middle" in text
    assert "no norm is fused with blocks.0.out: what takes its sum is a LayerNorm, not a norm with one weight" in text
    assert "no norm is fused with blocks.0.down: its result goes into 2 ops, not into one addition" in text


def test_a_plan_keeps_its_norms_in_json_and_reads_plans_from_before() -> None:
    plan = plan_with(Like("rms"))
    assert plan.fused and tpk.ShardingPlan.from_json(plan.to_json()) == plan
    text = plan.to_json().replace('"blocks.0.middle"', '"blocks.0.one"')
    with pytest.raises(ValueError, match="digest"):
        tpk.ShardingPlan.from_json(text)
    broken = replace(plan, fused=(("blocks.0.one", "blocks.0.middle", 1e-6),))
    with pytest.raises(ValueError, match="cannot be fused"):
        tpk.ShardingPlan.from_json(broken.to_json())


def refused() -> str:
    with pytest.raises(ValueError) as error:
        tpk.parallelize(Net(), tp_mesh(), fused_norm="always")
    return str(error.value)


def test_the_option_takes_auto_or_false(ranks: Pools) -> None:
    assert ranks(2).run(refused)[0] == """fused_norm must be "auto", True or False, got 'always'"""


def a_result_that_nobody_needs() -> list[Any]:
    _, model, _ = pair(sequence=False)
    y = model.blocks[0].down(torch.randn(2, LENGTH, 12 // dist.get_world_size(), dtype=torch.float64))
    copied = copy.deepcopy(model)
    return [type(y) is PendingSum, y.numpy(force=True).shape, (y * 2).shape, ties(copied)[0] is not ties(model)[0]]


def test_a_row_that_is_called_by_itself_gives_a_tensor(ranks: Pools) -> None:
    shape = torch.Size((2, LENGTH, WIDTH))
    assert ranks(2).run(a_result_that_nobody_needs) == [[True, tuple(shape), shape, True]] * 2


def fused_by_rows() -> list[int]:
    """Sums that "auto" has fused, after a call of few rows and after one of many."""
    _, model, _ = pair(sequence=False, fused="auto")
    found = []
    for batch in (2, -(-fused_norm.LEAST_ROWS_ON_CPU // LENGTH)):
        with torch.no_grad():
            model(torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64))
        found.append(counts(model)[0])
    return found


def test_on_a_cpu_auto_leaves_calls_of_few_rows_alone(ranks: Pools) -> None:
    assert ranks(2).run(fused_by_rows) == [[0, 4]] * 2
