"""The contract of `tpkernels/ops/contract.py` as checks that run on real ranks, for any implementation of any op.

Owns: which implementations this machine can run on gloo ranks, one call of each of the six ops forced to one of them,
and the judges: values (those of the case's reference), bits of ``unfused``, inputs left alone, nothing
left of earlier calls, outputs that belong to the caller. Each raises; `test_seeded_faults.py` shows that each does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.support import new_group, own_part
from tpkernels import dispatch
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm.resources import Standing
from tpkernels.dispatch import OPS, Problem
from tpkernels.gemm.native import why_not
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import COLLECTIVES, DTYPES, GATHER, REDUCE, SCATTER, Case, Operands, call, operands
from tpkernels.testing.faults import poisoned_memory
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.references import check_values

BASE = Case(GATHER, (13, 24), ns=(10,), integers=True, bias=True)


def refusals() -> dict[str, dict[str, str | None]]:
    """name -> {op: None, or why two ranks of this host cannot run it}, for everything that is registered."""
    found: dict[str, dict[str, str | None]] = {}
    shared = Standing(SharedMemory.name, why_not() or None)
    for op in OPS:
        local = Problem(op, 64, 64, 64, torch.float32, 2, co_located=True, resources=(shared,))
        for offer in dispatch.implementations(op):
            found.setdefault(offer.name, {})[op] = offer.refuses(local)
    return found


def ops_of(name: str) -> list[str]:
    return [op for op in OPS if any(offer.name == name for offer in dispatch.implementations(op))]


def placed(parts: Operands, rank: int) -> Operands:
    """The same operands, this rank's own ones where it computes."""
    x, ws, bs = own_part(parts, rank)

    def but(values: list[Any], own: Any) -> list[Any]:
        return [own if r == rank else value for r, value in enumerate(values)]

    return Operands(but(parts.xs, x), but(parts.ws, ws), but(parts.bs, bs))


def own_tensors(parts: Operands, rank: int) -> list[Tensor]:
    return [t for t in (parts.xs[rank], *parts.ws[rank], *parts.bs[rank]) if t is not None]


def run(case: Case, parts: Operands, group: Any) -> list[Tensor]:
    """One call on this rank: its outputs, the gathered x last if it was asked for."""
    outs, gathered = call(case, own_part(parts, dist.get_rank(group)), group)
    return outs if gathered is None else [*outs, gathered]


def run_and_judge(case: Case, group: Any) -> list[Tensor]:
    """Values, and inputs left alone."""
    rank = dist.get_rank(group)
    parts = operands(case, dist.get_world_size(group))
    mine = placed(parts, rank)
    inputs = own_tensors(mine, rank)
    kept = [t.clone() for t in inputs]
    outs = run(case, mine, group)
    for now, before in zip(inputs, kept, strict=True):  # first: values are judged by these inputs
        assert_bitwise_equal(now, before, f"rank {rank}, {case}: an input after the call")
    values = [out.cpu() for out in outs]
    check_values(case, parts, values[: case.num_outputs], values[-1] if case.return_gathered else None, rank)
    return outs


def judge_against_unfused(case: Case, group: Any) -> None:
    """Values, inputs, and every bit of what ``unfused`` returns (exact payloads only: they round nowhere)."""
    outs = run_and_judge(case, group)
    if case.implementation == "unfused":
        return
    for now, expected in zip(outs, run_and_judge(case.but(implementation="unfused"), group), strict=True):
        assert_bitwise_equal(now, expected, f"{case} against unfused")


def judge_after_poison(case: Case, group: Any) -> None:
    """Nothing left of earlier calls: those before, in all slots and buffers, had NaN everywhere."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    with poisoned_memory():
        for _ in range(2):  # slots alternate
            poisoned = operands(case, world)
            poisoned.xs[rank].fill_(float("nan"))
            for out in run(case, poisoned, group):
                assert bool(out.isnan().all()), f"{case}: NaN did not arrive everywhere"
        for turn in range(3):
            run_and_judge(case.but(call=case.call + 1 + turn), group)


def judge_ownership(case: Case, group: Any) -> None:
    """Outputs are the caller's: writing into one changes nothing inside, and later calls leave them alone."""
    rank = dist.get_rank(group)
    parts = placed(operands(case, dist.get_world_size(group)), rank)
    outs = run(case, parts, group)
    first = [out.clone() for out in outs]
    inputs = {t.untyped_storage().data_ptr() for t in own_tensors(parts, rank) if t.numel()}
    for out in outs:
        assert out.numel() == 0 or out.untyped_storage().data_ptr() not in inputs, f"{case}: an output is an input"
        out.fill_(float("nan"))
    again = run(case, parts, group)
    for now, before in zip(again, first, strict=True):
        assert_bitwise_equal(now, before, f"{case}: after the previous output was overwritten")
    for turn in range(3):
        run(case, operands(case.but(call=case.call + 1 + turn), dist.get_world_size(group)), group)
    for now, before in zip(again, first, strict=True):
        assert_bitwise_equal(now, before, f"{case}: an output after later calls")


JUDGES = {
    "values": run_and_judge,
    "unfused": judge_against_unfused,
    "poison": judge_after_poison,
    "ownership": judge_ownership,
}


def judge_all(cases: Sequence[Case], judge_name: str, num_chunks: int | None = None) -> int:
    """Run on every rank: all cases on one new group; how many there were."""
    with new_group(num_chunks) as group:
        for case in cases:
            JUDGES[judge_name](case, group)
    return len(cases)


def cuts(whole: int, world: int) -> Iterator[tuple[int, ...]]:
    """Even, lopsided with empty shards in the middle, and everything on one rank."""
    yield array_split_sizes(whole, world)
    yield (1, *[0] * (world - 2), whole - 1) if whole else (0,) * world
    yield (*[0] * (world - 1), whole)


def exact_cases(op: str, name: str, world: int) -> list[Case]:
    """All dtypes; every dim of 2-D and 3-D inputs; uneven, empty and missing rows. Each has a payload of its own."""
    base = BASE.but(op=op, implementation=name)
    cases = [base.but(dtype=dtype, sizes=cut) for dtype in DTYPES for cut in tuple(cuts(13, world))[:2]]
    if op in (REDUCE, "all_reduce"):
        cases = [base.but(dtype=dtype, shape=shape) for dtype in DTYPES for shape in ((13, 24), (2, 5, 16))]
        cases += [base.but(shape=(rows, 24)) for rows in range(world + 2)]
    else:
        for shape in ((7, 16), (3, 7, 8), (2, 3, 5, 6)):
            for dim in range(-1, len(shape) - 1):
                features = op == SCATTER and dim == -1
                whole = 11 if features else shape[dim]
                ns = (11,) if features else (10,)
                cases += [base.but(shape=shape, dim=dim, sizes=cut, ns=ns) for cut in cuts(whole, world)]
        for rows in range(world):  # fewer rows than ranks, down to none
            cases += [base.but(shape=(rows, 24), sizes=cut) for cut in cuts(rows, world)]
    if op == GATHER:
        several = base.but(ns=(7, 3), bias=(True, False), activation="relu", return_gathered=True)
        cases += [several.but(sizes=cut) for cut in cuts(13, world)]
    if op in (SCATTER, REDUCE):
        k_sizes = (3, *[0] * (world - 2), 21)
        cases += [base.but(k_sizes=k_sizes), base.but(bias=False, strided=True)]
    if op in COLLECTIVES:
        vectors = [base.but(shape=(9,), sizes=cut) for cut in cuts(9, world)]
        cases = [case.but(bias=False, ns=()) for case in (*cases, *vectors)]
    return [case.but(call=number) for number, case in enumerate(cases)]
