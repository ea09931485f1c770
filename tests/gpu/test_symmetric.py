"""`symmetric` through the public ops, as W processes on one GPU: values, gradients, graphs, a peer that does not come.

What this can show and what not: csrc/cuda/README.md. The judges are those of all backends: tests/backends/contract.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.backends.contract import BASE, exact_cases
from tests.gpu import ranks as scenarios
from tests.gpu.conftest import Shared
from tests.ops import test_gated
from tests.ops.scaled import SCALED, ScaledCase
from tests.ops.scaled import exact_cases as scaled_exact_cases
from tests.ops.test_gradients import within_bounds
from tpkernels.dispatch import OPS
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import COLLECTIVES, COPY, FUSED, GATHER, REDUCE, SCATTER, Case

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CALL_S = 120.0


def cases_of(op: str, world: int, full: bool) -> list[Case]:
    """Small ones for every dim, dtype and cut, and rows enough for the kernels that overlap."""
    small = [case for case in exact_cases(op, "symmetric", world) if case.dtype in DTYPES]
    large = []
    for dtype in DTYPES:
        case = BASE.but(op=op, implementation="symmetric", dtype=dtype, shape=(101 * world + 7, 264), ns=(200,))
        if op in (GATHER, SCATTER, "all_gather", "reduce_scatter"):
            rows = case.shape[0]
            cuts = ((rows, *[0] * (world - 1)), (rows - 65, *[0] * (world - 2), 65), array_split_sizes(rows, world))
            large += [case.but(sizes=cut) for cut in cuts]
        else:
            large.append(case)
            if dtype == torch.bfloat16:  # too large for one shot
                large.append(case.but(shape=(8197, 264)))
    large = [case.but(bias=False, ns=()) if op in COLLECTIVES else case for case in large]
    return [case.but(call=number) for number, case in enumerate([*(small if full else small[::5]), *large])]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3])  # the outer loop: ranks are started anew for another number of them
def test_integers_are_exact_for_every_op_dtype_and_cut(
    symmetric_ranks: Shared, world: int, op: str, full: bool
) -> None:
    cases = cases_of(op, world, full)
    if world == 3 and not full:
        cases = cases[1::3]
    assert symmetric_ranks(world).run(scenarios.judge_all, cases, "values", 3, timeout=CALL_S) == [len(cases)] * world


def scaled_cases_of(name: str, world: int) -> list[ScaledCase]:
    """fp8: integers, which every accumulator sums exactly, and numbers at random, within what tensor cores keep.

    Small ones, and rows enough for the kernels that overlap, with K and N that fp8 GEMMs take, and that they do not.
    """
    base = ScaledCase(GATHER, (256 * world, 512), ns=(320,), bias=True, integers=True, implementation=name)
    large = [base.but(op=op, dtype=dtype) for op in SCALED for dtype in (torch.bfloat16, torch.float32)]
    large += [base.but(op=op, shape=(101 * world, 264), ns=(200,), per_x=("tensor",)) for op in SCALED]
    large.append(base.but(ns=(320, 48), activation="relu", return_gathered=True, per_x=("tensor", "row")))
    real = [case.but(integers=False) for case in large[: 2 * len(SCALED)]]
    real.append(base.but(integers=False, ns=(320, 320), activation="swiglu", return_gathered=True))
    cases = [*scaled_exact_cases(name, world), *large, *real]
    return [case.but(call=number) for number, case in enumerate(cases)]


@pytest.mark.parametrize("world", [2, 3])
def test_fp8_is_exact_and_brings_its_scales_along(symmetric_ranks: Shared, world: int, full: bool) -> None:
    cases = scaled_cases_of("symmetric", world)
    cases = cases if full else [*cases[world % 2 : -7 : 2], *cases[-7:]]
    symmetric_ranks(world).run(scenarios.judge_all, cases, "values", 3, timeout=CALL_S)


@pytest.mark.parametrize("world", [2])
def test_real_numbers_are_within_the_bound(symmetric_ranks: Shared, world: int) -> None:
    cases = [
        BASE.but(op=op, implementation="symmetric", integers=False, dtype=dtype, shape=(400, 520), ns=(328,))
        for op in (GATHER, SCATTER, REDUCE)
        for dtype in DTYPES
    ]
    cases += [cases[0].but(activation=activation) for activation in ("relu", "gelu", "gelu_tanh", "silu")]
    gates = ("swiglu", "geglu")
    cases += [cases[0].but(activation=gated, ns=(328, 328), dtype=dtype) for gated in gates for dtype in DTYPES]
    cases.append(cases[0].but(ns=(120, 72), bias=(True, False), return_gathered=True))
    symmetric_ranks(world).run(scenarios.judge_all, cases, "values", 4, timeout=CALL_S)


def test_modules_and_decoders_are_right_in_every_implementation(symmetric_ranks: Shared, full: bool) -> None:
    """Forward and backward, sequence parallel and not, from parts and through `parallelize`."""
    dtypes = ("fp32", "bf16", "fp16", "fp64") if full else ("bf16",)
    assert symmetric_ranks(2).run(scenarios.modules_of_the_selftest, dtypes, timeout=4 * CALL_S) == [[], []]


def test_nothing_of_an_earlier_call_is_left_and_outputs_are_the_callers(symmetric_ranks: Shared) -> None:
    cases = []
    for op in OPS:
        case = BASE.but(op=op, implementation="symmetric", shape=(264, 64), ns=(80,))
        cases.append(case.but(bias=False, ns=()) if op in COLLECTIVES else case)
    for judge in ("poison", "ownership"):
        symmetric_ranks(2).run(scenarios.judge_all, cases, judge, 3, timeout=CALL_S)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_within_the_bound(symmetric_ranks: Shared, dtype: torch.dtype) -> None:
    assert set(FUSED) == {GATHER, SCATTER, REDUCE, COPY}
    for rows in (48, 264):  # gathered first, and overlapped
        symmetric_ranks(2).run(within_bounds, dtype, 3, ("symmetric",), rows, timeout=CALL_S)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_a_gated_pair_are_within_the_bound(symmetric_ranks: Shared, dtype: torch.dtype) -> None:
    symmetric_ranks(2).run(test_gated.judge_all, ("symmetric",), dtype, 264, timeout=CALL_S)


@pytest.mark.parametrize("op", [GATHER, SCATTER, REDUCE])
def test_a_captured_graph_replays_with_fresh_data(symmetric_ranks: Shared, op: str, full: bool) -> None:
    count = 2000 if full else 100
    for rows in (32, 384):
        judged = symmetric_ranks(2).run(scenarios.replay, "symmetric", op, count, rows, timeout=CALL_S)
        assert judged == [2 * count] * 2


def test_a_residual_and_a_norm_behind_a_sum_are_right(symmetric_ranks: Shared) -> None:
    """In the kernel that sums in one step, behind that of two steps, and behind the reducer of copied partials."""
    judged = symmetric_ranks(2).run(scenarios.sums_with_a_norm, "symmetric", (1, 7, 300, 9000), timeout=CALL_S)
    assert judged == [24, 24]


def test_a_peer_that_does_not_come_is_named_and_the_context_survives(symmetric_ranks: Shared) -> None:
    timeout_s = 3.0
    *others, late = symmetric_ranks(3).run(scenarios.late_peer, timeout_s, timeout=CALL_S)
    assert any(told["error"] == "CollectiveTimeout" and told["ranks"] == [2] for told in others), others
    for told in others:
        assert timeout_s <= told["seconds"] + 0.1 and told["seconds"] < timeout_s + 2.0
        assert told["error"] in ("CollectiveTimeout", "PeerLost", "GroupPoisoned")
    for told in (*others, late):
        assert told["context"] == 4.0 and told["new group"] == 24.0
