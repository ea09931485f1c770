"""Layers that read one tensor run as one op: what travels, and what happens where the model's code goes another way."""

from __future__ import annotations

import copy
import functools
import warnings
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
from tests.models.wire import bytes_of
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.nn import shared_input
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, LENGTH = 6, 5


class Gated(nn.Module):
    """Three layers read ``y``; ``how`` says what the code does between their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.third = (nn.Linear(WIDTH, 12) for _ in range(3))
        self.down = nn.Linear(12, WIDTH)
        self.how = "plain"

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            return x + checkpoint(self.inner, self.norm(x), use_reentrant=False)
        if self.how == "reentrant":
            return x + checkpoint(self.inner, self.norm(x), use_reentrant=True)
        return x + self.inner(self.norm(x))

    def inner(self, y: Tensor) -> Tensor:
        gate = self.gate(y)
        if self.how == "writes":
            y.add_(1)
        if self.how == "raises":
            raise RuntimeError("between two calls")
        if self.how == "copies":
            y = y * 1
        up = self.up(y)
        third = self.third(y * 1 if self.how == "copies" else y)
        if self.how == "again":
            gate = gate + self.gate(y)
        if self.how == "without gradient":
            with torch.no_grad():
                self.gate(y)
            gate = gate + self.gate(y)
        z: Tensor = self.down(torch.tanh(gate) * up * third)
        return z


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Gated(), Gated()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def turn(self, how: str) -> Net:
        for block in self.blocks:
            block.how = how
        return self


@functools.cache
def plan_of(world: int, sequence: bool) -> tpk.ShardingPlan:
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    plan = tpk.make_plan(Net().double(), world, sequence_parallel=sequence, example_inputs=x)
    assert plan.shared == tuple(tuple(f"blocks.{i}.{n}" for n in ("gate", "up", "third")) for i in range(2))
    return plan


def pair(sequence: bool) -> tuple[Net, Net, Tensor, tpk.ShardingPlan]:
    torch.manual_seed(7)
    plain = Net().double()
    model = copy.deepcopy(plain)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    plan = plan_of(dist.get_world_size(), sequence)
    return plain, tpk.parallelize(model, tp_mesh(), plan), x, plan


class Calls:
    """Counts ops of column layers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("all_gather_matmul", "copy_matmul"):
            patch.setattr(shared_input, name, self._counting(getattr(shared_input, name)))

    def _counting(self, op: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return op(*args, **kwargs)

        return counted


def waiting(model: nn.Module) -> list[int]:
    groups = {id(m.shared): m.shared for m in model.modules() if getattr(m, "shared", None) is not None}
    return [len(group._waiting) for group in groups.values()]  # type: ignore[union-attr]


def goes(how: str, sequence: bool) -> tuple[int, list[str]]:
    """Ops of column layers in one step of two blocks, and what is wrong with its values."""
    plain, model, x, _ = pair(sequence)
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        model.first.forward = lambda x: x + 0  # type: ignore[method-assign]
        plain.first.forward = model.first.forward  # type: ignore[method-assign]
        for net in (plain, model):
            net.turn(how)
            run: Any = torch.compile(net, backend="aot_eager") if how == "compiled" and net is model else net
            y = run(x.clone().requires_grad_())
            y.square().sum().backward()
        count = calls.count
    wrong = compare_tensors(model, plain, LIMIT[False])
    problem = differs(model(x), plain(x), LIMIT[False])
    if any(waiting(model)):
        wrong.append(f"results wait: {waiting(model)}")
    return count, wrong + ([problem] if problem else [])


def ways(cases: list[tuple[str, bool]]) -> dict[tuple[str, bool], tuple[int, list[str]]]:
    return {case: goes(*case) for case in cases}


def test_layers_that_read_one_tensor_run_as_one_op_and_others_by_themselves(ranks: Pools, full: bool) -> None:
    """Two blocks: 2 ops where all share; more for a second call of a layer, another grad mode, a recomputation."""
    expected = {"plain": (2, 2), "again": (4, 4), "without gradient": (4, 6), "checkpoint": (4, 4), "reentrant": (2, 4)}
    cases = [(how, sequence) for how in (*expected, "compiled") for sequence in (False, True)]
    some = [("plain", True), ("again", False), ("checkpoint", True)]
    for found in ranks(2).run(ways, cases if full else some, timeout=2 * LIMIT_S):
        for (how, sequence), (count, wrong) in found.items():
            assert not wrong, (how, sequence, wrong)
            assert how == "compiled" or count == expected[how][sequence], (how, sequence, count)


def errors_and_strangers() -> dict[str, Any]:
    plain, model, x, _ = pair(sequence=True)
    seen: dict[str, Any] = {}
    try:
        model.turn("raises")(x)
    except RuntimeError as error:
        seen["error"] = str(error)
    seen["after the error"] = waiting(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for net in (plain, model):
                net.zero_grad()
                net.turn("copies")(x).square().sum().backward()
    seen["warnings"] = [str(warning.message) for warning in caught if "read one tensor" in str(warning.message)]
    seen["wrong"] = compare_tensors(model, plain, LIMIT[False])
    twin = copy.deepcopy(model)
    seen["twin"] = twin.blocks[0].gate.shared.layers[1] is twin.blocks[0].up
    return seen


def test_an_error_between_the_calls_leaves_nothing_and_layers_that_do_not_share_go_apart(ranks: Pools) -> None:
    for seen in ranks(2).run(errors_and_strangers, timeout=LIMIT_S):
        assert seen["error"] == "between two calls" and seen["after the error"] == [0, 0]
        assert not seen["wrong"]
        assert seen["twin"], "a copy's layers share among themselves"
        assert len(seen["warnings"]) == 2 and "blocks.0.gate, blocks.0.up, blocks.0.third" in seen["warnings"][0]


def written_while_results_wait(blind: bool) -> str | None:
    """``blind``: the check of a tensor's version is left out."""
    plain, model, x, _ = pair(sequence=True)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if blind:
            patch.setattr(shared_input, "_key", lambda source: (source, 0, torch.is_grad_enabled()))
        return differs(model.turn("writes")(x), plain.turn("writes")(x), LIMIT[False])


def test_a_version_that_is_not_looked_at_is_noticed(ranks: Pools) -> None:
    assert ranks(2).run(written_while_results_wait, False, timeout=LIMIT_S) == [None, None]
    assert all(ranks(2).run(written_while_results_wait, True, timeout=LIMIT_S)), "the comparison would miss it"


def sent_in_a_step(name: str, sequence: bool, shares: bool) -> tuple[int, int]:
    """Bytes that all ranks send in a step, and those that the plan says."""
    model, given = zoo.build(name), zoo.inputs(name)
    plan = tpk.make_plan(model, tp_mesh(), sequence_parallel=sequence, example_inputs=given)
    tpk.parallelize(model, tp_mesh(), plan if shares else replace(plan, shared=()))

    def step() -> None:
        outputs = model(**given)
        used = [zoo.output(outputs), getattr(outputs, "pooler_output", None)]  # a plan counts on gradients of them all
        sum(output.square().mean() for output in used if output is not None).backward()

    return bytes_of(step), plan.wire_bytes * plan.world_size


def many_steps(cases: list[tuple[str, bool, bool]]) -> list[tuple[int, int]]:
    return [sent_in_a_step(*case) for case in cases]


@pytest.mark.full("tests/models/grid.py lets nothing travel that is not planned")
@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_the_bytes_of_a_plan_are_those_that_travel(ranks: Pools, world: int, full: bool) -> None:
    pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
    sample = [("llama", True), ("transformer", False)] if world == 2 else [("qwen2 10", True)]
    every = [(name, sequence) for name in (*zoo.FAMILIES, *zoo.UNEVEN, "transformer") for sequence in (False, True)]
    every += [(name, False) for name in zoo.PLAIN]
    cases = [(*case, True) for case in (every if full else sample)]
    found = ranks(world).run(many_steps, [*cases, (*sample[0], False)], timeout=3 * LIMIT_S)[0]
    for case, (sent, planned) in zip(cases, found, strict=False):
        assert 0 <= sent - planned <= 40 * world, (case, sent, planned)  # each module's share is rounded down
    shared, alone = found[cases.index((*sample[0], True))][0], found[-1][0]
    assert shared < 0.7 * alone, f"{alone} bytes when each layer gathers by itself, {shared} when they share"
