"""`explain` against what a call really does: same problem, costs, estimates and choice; refusals that all ranks see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels import dispatch
from tpkernels.backends.shared_memory import segments as shared_segments
from tpkernels.comm.groups import resolve
from tpkernels.dispatch import OPS, Costs, Explanation, Implementation
from tpkernels.errors import GroupMismatch, UnsupportedProblem
from tpkernels.gemm.native import why_not
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

FP32, BF16 = torch.float32, torch.bfloat16
M, N, K = 2048, 256, 192  # several chunks per shard for 2 and 3 ranks

# Machines on which one implementation must win, whatever this machine is like.
MACHINES = {
    "shared_memory": Costs(copy_gbytes=1e3, signal_us=0.01, link_gbytes=1e-3, link_latency_us=1e5),
    "chunked": Costs(
        gemm_gflops=0.01, gemm_overhead_us=0.1, weight_gbytes=1e3, link_gbytes=1e-4, link_latency_us=1.0, link_cpu=0.0,
        signal_us=1e9,
    ),
    "unfused": Costs(gemm_overhead_us=1e4, link_gbytes=1e3, link_latency_us=0.01, signal_us=1e9),
}  # fmt: skip


@contextmanager
def recording() -> Iterator[list[tuple[str, str]]]:
    """(op, implementation) of everything that is run on this rank."""
    ran: list[tuple[str, str]] = []
    before = dict(dispatch._registry)

    def observed(offer: Implementation) -> Implementation:
        def run(context: Any, call: Any) -> Any:
            ran.append((offer.op, offer.name))
            return offer.run(context, call)

        return replace(offer, run=run)

    dispatch._registry.update({key: observed(offer) for key, offer in before.items()})
    try:
        yield ran
    finally:
        dispatch._registry.clear()
        dispatch._registry.update(before)


def call_with_auto(op: str, dtype: torch.dtype, group: Any, scale: int = 1) -> dict[str, int]:
    """One call of the op; the whole problem's m, n and k as `explain` documents them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, m = M // scale // world, M // scale // world * world

    def t(*shape: int) -> torch.Tensor:
        return payload(shape, dtype, rank=rank)

    if op == GATHER:
        tpk.all_gather_matmul(t(rows, K), t(N, K), group)
        return {"m": m, "n": N * world, "k": K}
    if op in (SCATTER, REDUCE):
        reducing = tpk.matmul_reduce_scatter if op == SCATTER else tpk.matmul_all_reduce
        reducing(t(m, K), t(N, K), group)
        return {"m": m, "n": N, "k": K * world}
    if op == "all_gather":
        tpk.all_gather(t(rows, K), group)
        return {"m": m, "n": 0, "k": K}
    (tpk.reduce_scatter if op == "reduce_scatter" else tpk.all_reduce)(t(m, N), group)
    return {"m": m, "n": N, "k": 0}


def compare(machine: str | None, explain_first: bool) -> list[tuple[str, Explanation, Explanation, str]]:
    """For every op: its name, what `explain` says, what the call agreed on, and what then ran."""
    results = []
    with recording() as ran, new_group(calibrate=True) as group:
        state = resolve(group)
        for dtype in (FP32, BF16):
            if machine is not None:
                for widens in (False, True):  # whichever this machine does
                    state.costs["cpu", dtype, widens] = replace(MACHINES[machine], widens=widens)
            for op in OPS:
                for scale in (1, 64):
                    del ran[:]
                    if explain_first:
                        sizes = {"m": M // scale // state.size * state.size, **WHOLE[op](state.size)}
                        said = tpk.explain(op, **sizes, dtype=dtype, group=group)
                        assert ran == [], "explain ran something"
                        assert call_with_auto(op, dtype, group, scale) == sizes
                    else:
                        said = tpk.explain(op, **call_with_auto(op, dtype, group, scale), dtype=dtype, group=group)
                    plan = next(reversed(state.agreed.values()))
                    (one,) = ran
                    assert one[0] == op
                    results.append((op, said, plan.explanation, one[1]))
    return results


WHOLE = {
    GATHER: lambda world: {"n": N * world, "k": K},
    SCATTER: lambda world: {"n": N, "k": K * world},
    REDUCE: lambda world: {"n": N, "k": K * world},
    "all_gather": lambda world: {"n": 0, "k": K},
    "reduce_scatter": lambda world: {"n": N, "k": 0},
    "all_reduce": lambda world: {"n": N, "k": 0},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("machine", [None, *MACHINES])
@pytest.mark.parametrize("world", [2, 3])
def test_explain_names_what_a_call_runs(ranks: Pools, world: int, machine: str | None) -> None:
    by_rank = ranks(world).run(compare, machine, world == 3)
    for results in zip(*by_rank, strict=True):
        for op, said, agreed, ran in results:
            assert said == agreed, f"{op}: explain says\n{said}\nthe call agreed on\n{agreed}"
            assert said.chosen == ran
            assert said.costs.measured == (machine is None)
        assert len({str(said) for _, said, _, _ in results}) == 1, "the ranks were told different things"
    chosen = {said.chosen for op, said, _, _ in by_rank[0] if op in (GATHER, SCATTER, REDUCE) and said.problem.m > 1000}
    if machine is not None and not (machine == "shared_memory" and why_not()):
        assert chosen == {machine}, "\n".join(str(said) for _, said, _, _ in by_rank[0])


def all_explanations(world_one: bool) -> list[Explanation]:
    if world_one:
        group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        found = [tpk.explain(op, m=M, n=N, k=K, dtype=FP32, group=group) for op in OPS]
        dist.destroy_process_group(group)
        return found
    with new_group() as group:
        return [tpk.explain(op, m=m, n=N, k=K, dtype=FP32, group=group) for op in OPS for m in (0, 1, M)]


@pytest.mark.parametrize("world_one", [False, True])
def test_every_implementation_is_listed_with_a_refusal_or_an_estimate(ranks: Pools, world_one: bool) -> None:
    for explanations in ranks(2).run(all_explanations, world_one):
        assert {explanation.problem.op for explanation in explanations} == set(OPS)
        for explanation in explanations:
            offers = [offer.name for offer in dispatch.implementations(explanation.problem.op)]
            assert [candidate.name for candidate in explanation.candidates] == offers
            text = str(explanation)
            for candidate in explanation.candidates:
                assert (candidate.refusal is None) == (candidate.estimate_us is not None), candidate
                (line,) = [line for line in text.splitlines() if line.startswith(f"   {candidate.name} ")]
                assert (candidate.refusal or "estimate") in line
            estimates = {c.name: c.estimate_us for c in explanation.candidates if c.estimate_us is not None}
            assert explanation.chosen == min(estimates, key=lambda name: estimates[name])
            assert f"-> {explanation.chosen}: " in text
            if world_one:
                assert list(estimates) == ["unfused"]
                assert "the only one that can run this" in text


def explain_differently() -> str:
    with new_group() as group, pytest.raises(GroupMismatch) as caught:
        tpk.explain(REDUCE, m=8 + dist.get_rank(), n=8, k=8, dtype=FP32, group=group)
    return str(caught.value)


def test_ranks_that_ask_about_different_problems_are_told(ranks: Pools) -> None:
    for said in ranks(2).run(explain_differently):
        assert "explain(matmul_all_reduce, m=8," in said and "explain(matmul_all_reduce, m=9," in said


def refused_and_then() -> dict[str, Any]:
    """Rank 1 alone has no compiled core: what forcing `shared_memory` says, twice, and whether the group goes on."""
    own_reasons = shared_segments._why_not_here

    def seeded(group: Any) -> str | None:
        return "its compiled core is missing" if group.rank == 1 else own_reasons(group)

    rank = dist.get_rank()
    x, w = payload((6, 8), rank=rank), payload((5, 8), rank=rank, name="w")
    calls = {
        GATHER: lambda g, name: tpk.all_gather_matmul(x, w, g, implementation=name),
        SCATTER: lambda g, name: tpk.matmul_reduce_scatter(x, w, g, implementation=name),
        REDUCE: lambda g, name: tpk.matmul_all_reduce(x, w, g, implementation=name),
    }
    said: dict[str, Any] = {}
    with mock.patch.object(shared_segments, "_why_not_here", seeded), new_group() as group:
        for op, call in calls.items():
            for turn in range(2):
                try:
                    call(group, "shared_memory")
                except UnsupportedProblem as error:
                    said[f"{op} {turn}"] = str(error)
            said[f"{op} explained"] = str(tpk.explain(op, m=6, n=10, k=8, dtype=FP32, group=group))
            outs = [call(group, name) for name in ("unfused", "chunked", "auto")]
            said[f"{op} works"] = all(torch.equal(out, outs[0]) for out in outs)
        said["poison"] = resolve(group).poison
    with new_group() as group:  # the reason was the group's, not the process's
        tpk.all_reduce(torch.ones(2), group)
        said["another group"] = resolve(group).resources[shared_segments.SharedMemory.name].refusal("cpu")
    return said


def test_a_forced_implementation_that_one_rank_cannot_run_is_refused_by_all_and_the_group_works_on(
    ranks: Pools,
) -> None:
    if why_not():
        pytest.skip(why_not())
    for said in ranks(3).run(refused_and_then):
        for op in (GATHER, SCATTER, REDUCE):
            for turn in range(2):
                message = said[f"{op} {turn}"]
                assert message.startswith("implementation 'shared_memory' cannot run Problem(op=")
                for line in ("unfused: can run this", "chunked: can run this"):
                    assert f"\n  {line}" in message
                assert "\n  shared_memory: rank 1: its compiled core is missing" in message
            assert "shared_memory  cannot run: rank 1: its compiled core is missing" in said[f"{op} explained"]
            assert said[f"{op} works"]
        assert said["poison"] is None
        assert said["another group"] is None


def refused_by_a_backend() -> tuple[str, list[float]]:
    """A backend that refuses on every rank, forced: the message, and the group's next sum."""
    key = (REDUCE, "seeded")
    dispatch.register(
        Implementation("seeded", REDUCE, lambda p: f"needs {p.world_size} anvils", lambda p, c: 0.0, lambda c, a: None)
    )
    try:
        with new_group() as group:
            with pytest.raises(UnsupportedProblem) as caught:
                tpk.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group, implementation="seeded")
            y = tpk.matmul_all_reduce(torch.ones(1, 3), torch.ones(1, 3), group)
            return str(caught.value), y.flatten().tolist()
    finally:
        del dispatch._registry[key]


@pytest.mark.parametrize("world", [2, 3])
def test_a_refusal_lists_every_implementation_and_auto_passes_over_it(ranks: Pools, world: int) -> None:
    for said, total in ranks(world).run(refused_by_a_backend):
        assert said.splitlines()[-1] == f"  seeded: needs {world} anvils"
        assert len(said.splitlines()) == 1 + len(dispatch.implementations(REDUCE)) + 1
        assert total == [3.0 * world]
