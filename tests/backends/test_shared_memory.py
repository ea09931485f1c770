"""What `shared_memory` promises beyond the contract: where it runs, what it keeps in memory, what it chooses."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.backends.contract import BASE, exact_cases, judge_all
from tests.ops.support import new_group
from tpkernels.backends.shared_memory import implementations as shared_memory
from tpkernels.backends.shared_memory import segments as shared_segments
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm.groups import resolve
from tpkernels.comm.resources import Standing
from tpkernels.dispatch import Costs, Problem
from tpkernels.gemm.native import native, why_not
from tpkernels.testing.cases import GATHER, SCATTER
from tpkernels.testing.spawn import Pools

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(native() is None, reason=why_not() or "the compiled core is there"),
]

ROWS, COLUMNS = 1536, 1024  # 3 MiB in bf16
STEP = 2 * 1024 * 1024  # segments grow in steps
SHARED = {"implementation": "shared_memory"}


def staged_by(call: str, world: int) -> int:
    """Bytes that csrc/README.md says a call stages per rank."""
    whole = ROWS * COLUMNS * 2
    return {
        "all_gather_matmul": whole // world,
        "matmul_reduce_scatter": whole // world * (world - 1),
        "matmul_all_reduce": whole,
        "all_gather": whole // world,
        "reduce_scatter": whole,
        "all_reduce": 512 * 1024,
    }[call]


def make_call(call: str, group: Any) -> None:
    size = dist.get_world_size(group)
    whole = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    shard = tpk.array_split(whole, size)[0].contiguous()
    weight = torch.ones(COLUMNS, COLUMNS, dtype=torch.bfloat16)
    {
        "all_gather_matmul": lambda: tpk.all_gather_matmul(shard, weight[:8], group, **SHARED),
        "matmul_reduce_scatter": lambda: tpk.matmul_reduce_scatter(whole, weight, group, **SHARED),
        "matmul_all_reduce": lambda: tpk.matmul_all_reduce(whole, weight, group, **SHARED),
        "all_gather": lambda: tpk.all_gather(shard, group, **SHARED),
        "reduce_scatter": lambda: tpk.reduce_scatter(whole, group, **SHARED),
        "all_reduce": lambda: tpk.all_reduce(whole, group, **SHARED),
    }[call]()


def data_segments() -> dict[int, int]:
    """Bytes that are really there of each data segment that this process holds open, by inode: its own ones."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{fd}"
        with contextlib.suppress(FileNotFoundError):  # other threads close theirs meanwhile
            if "tpkernels-data" in os.readlink(link):
                status = os.stat(link)
                found[status.st_ino] = status.st_blocks * 512
    return found


def memory_of(call: str) -> tuple[int, int]:
    before = data_segments()
    with new_group() as group:
        make_call(call, group)
        segments = resolve(group).resources[SharedMemory.name].segments
        assert segments is not None
        (pages,) = [size for inode, size in data_segments().items() if inode not in before]
        return int(segments.channel.capacity), pages


@pytest.mark.parametrize("call", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_fused_op_stages_what_the_documentation_says(ranks: Pools, call: str, world: int) -> None:
    check_memory(ranks(world).run(memory_of, call), staged_by(call, world))


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_collective_stages_what_the_documentation_says(ranks: Pools, call: str) -> None:
    check_memory(ranks(2).run(memory_of, call), staged_by(call, 2))


def check_memory(measured: list[tuple[int, int]], staged: int) -> None:
    expected = -(-staged // STEP) * STEP
    for capacity, pages in measured:
        assert capacity == expected, (capacity, expected)
        # Two slots; the kernel adds a little of its own for large sparse files.
        assert 2 * expected <= pages <= 2 * expected + STEP, (pages, expected)


def chosen_on_one_host() -> tuple[str, str, str]:
    with new_group() as group:
        problem: dict[str, Any] = {"m": 4096, "n": 4096, "k": 4096, "dtype": torch.bfloat16, "group": group}
        automatic = tpk.explain("all_gather_matmul", **problem)
        x, weight = torch.ones(4, 8), torch.ones(5, 8)
        tpk.all_gather_matmul(x, weight, group, implementation="chunked")
        forced = next(
            plan for signature, plan in resolve(group).agreed.items() if signature.implementation == "chunked"
        )
        return automatic.chosen, str(automatic), forced.implementation.name


def test_it_is_what_one_host_gets_and_another_name_still_forces(ranks: Pools) -> None:
    for chosen, text, forced in ranks(2).run(chosen_on_one_host):
        assert chosen == "shared_memory" and "-> shared_memory: smallest estimate" in text
        assert forced == "chunked"


def without_memory() -> tuple[str, str]:
    """As on ranks of two hosts: every rank says why it cannot."""
    original = shared_segments._why_not_here
    shared_segments._why_not_here = lambda group: "seeded: no memory to share"
    try:
        with new_group() as group:
            explanation = tpk.explain("all_reduce", m=8, n=8, k=8, dtype=torch.float32, group=group)
            assert torch.equal(tpk.all_reduce(torch.ones(3, 2), group), torch.ones(3, 2) * dist.get_world_size())
            try:
                tpk.all_reduce(torch.ones(3, 2), group, **SHARED)
            except tpk.errors.UnsupportedProblem as error:
                return str(explanation), str(error)
    finally:
        shared_segments._why_not_here = original
    return str(explanation), "forced, and it ran"


def test_a_rank_that_cannot_share_makes_all_say_why(ranks: Pools) -> None:
    for explanation, error in ranks(2).run(without_memory):
        assert "shared_memory  cannot run: rank 0: seeded: no memory to share" in explanation
        assert "seeded: no memory to share" in error


def with_small_files() -> tuple[str, list[float]]:
    """Rank 1 may not make files of the size that a segment's addresses have: slot 1 begins at 2^35."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, hard))
    try:
        with new_group() as group:
            explanation = tpk.explain("all_reduce", m=8, n=8, k=8, dtype=torch.float32, group=group)
            sums = [float(tpk.all_reduce(torch.ones(3, 2), group)[0, 0]) for _ in range(3)]
            return str(explanation), sums
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_the_size_of_files_is_found_at_set_up_and_calls_work(ranks: Pools) -> None:
    """It failed every second call with EFBIG."""
    for explanation, sums in ranks(2).run(with_small_files):
        assert "shared_memory  cannot run: rank 1: this process may make files of 1073741824 bytes only" in explanation
        assert "ulimit -f unlimited" in explanation and sums == [2.0] * 3


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize(("m", "relay_gbytes", "one"), [(2, 40.0, True), (8192, 40.0, False), (2048, 1.0, True)])
def test_rows_are_one_gemm_where_a_cut_costs_more_than_the_memory(
    op: str, m: int, relay_gbytes: float, one: bool
) -> None:
    """Few rows, because each GEMM streams the whole weight; many, if each lays it out anew at a cost."""
    costs = Costs(gemm_gflops=200.0, gemm_overhead_us=3.0, weight_gbytes=10.0, copy_gbytes=5.0)
    costs = replace(costs, relay_gbytes=relay_gbytes, measured=True)
    problem = Problem(op, m, 4096, 4096, torch.bfloat16, 2, co_located=True, resources=(Standing(SharedMemory.name),))
    assert shared_memory.in_one_gemm(problem, costs) is one


def judge_one_way(cases: list[Any], one_gemm: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "in_one_gemm", lambda problem, costs: one_gemm)
        judge_all(cases, "unfused", 3)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize("one_gemm", [True, False])
def test_both_ways_are_exact_whatever_the_costs_say(ranks: Pools, op: str, one_gemm: bool) -> None:
    ranks(3).run(judge_one_way, exact_cases(op, "shared_memory", 3), one_gemm)


def judge_beside_a_pause(cases: list[Any], slow: int) -> None:
    """Rank ``slow`` pauses before the second part that it computes for others, when the first can be read."""
    original, begun = shared_memory.partial_rows, itertools.count()

    def partial_rows(*args: Any) -> None:
        if next(begun) % dist.get_world_size() == 1 and dist.get_rank() == slow:
            time.sleep(0.1)
        original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "partial_rows", partial_rows)
        judge_one_way(cases, one_gemm=False)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_part_is_read_when_it_is_there_and_not_when_the_first_one_is(ranks: Pools, slow: int) -> None:
    case = BASE.but(op=SCATTER, implementation="shared_memory")
    ranks(3).run(judge_beside_a_pause, [case.but(call=number) for number in range(3)], slow)


def sums_much() -> list[bool]:
    """An all-reduce whose stores bypass the caches, with an end that is no whole vector; and one in bf16."""
    found, rank, size = [], dist.get_rank(), dist.get_world_size()
    for dtype, count in ((torch.float32, 3_500_003), (torch.bfloat16, 7_000_001)):
        numbers = torch.arange(count).remainder(7).to(dtype)
        whole = tpk.all_reduce(numbers + rank, dist.group.WORLD, **SHARED)
        found.append(torch.equal(whole, size * numbers + sum(range(size))))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_large_sums_that_bypass_the_caches_are_exact(ranks: Pools, world: int) -> None:
    assert all(all(found) for found in ranks(world).run(sums_much))
