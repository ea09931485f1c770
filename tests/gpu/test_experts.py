"""Ops with experts on a GPU: the grouped kernel by itself, and `symmetric` as ranks that share the GPU.

The scenarios are those of the interpreter, with the tiles that users get; the judges those of every implementation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.grouped_cases import cases, dealt_cases, fp8_cases
from tests.gpu import ranks as scenarios
from tests.gpu.conftest import Shared
from tests.gpu.test_kernels import NANOSECONDS
from tests.kernels import grouped_scenarios
from tests.kernels.grouped_scenarios import Experts
from tests.kernels.test_grouped import COMBINE, GATHER
from tpkernels.dispatch import GROUPED
from tpkernels.kernels.config import configure_grouped
from tpkernels.testing.dealt import DEALT, DealtCase
from tpkernels.testing.grouped import GATHER as GATHER_OP
from tpkernels.testing.grouped import GroupedCase
from tpkernels.testing.numeric import GATED

pytestmark = pytest.mark.gpu

CALL_S = 120.0


def on_gpu(options: dict[str, Any]) -> Experts:
    """A case of the interpreter, some tiles large, with the configuration of this GPU."""
    case = Experts(**{**options, "device": "cuda", "patience": 20 * NANOSECONDS})
    case = replace(case, shards=tuple(9 * tokens for tokens in case.shards), n=5 * case.n, k=4 * case.k)
    properties = torch.cuda.get_device_properties(0)
    tiles = configure_grouped(
        capability=10 * properties.major + properties.minor, num_sms=properties.multi_processor_count,
        tokens=case.rows, top_k=case.top_k, experts=case.experts, n=case.n, k=case.k,
        dtype=str(case.dtype).removeprefix("torch."), world_size=len(case.shards), moved_row_bytes=2 * case.k,
        dual=case.activation in GATED, reserved_sms=8,
    )  # fmt: skip
    return replace(case, tiles=tiles)


@pytest.mark.parametrize("name", GATHER)
def test_rows_of_experts_are_right_when_tokens_come_late_and_shuffled(name: str) -> None:
    grouped_scenarios.gather(on_gpu(GATHER[name]))


@pytest.mark.parametrize("name", COMBINE)
def test_sums_of_tokens_are_complete_when_their_chunk_is_announced(name: str) -> None:
    grouped_scenarios.combine(on_gpu(COMBINE[name]))


def test_tokens_that_never_come_are_reported_the_kernel_ends_and_the_context_survives() -> None:
    case = replace(on_gpu({"shards": (20, 30, 20), "rank": 1, "first_epoch": 5}), patience=NANOSECONDS // 20)
    told, done, undone = grouped_scenarios.missing_tokens(case)
    assert (told["state"], told["kind"], told["op"], told["peer"], told["got"]) == (1, 1, 7, 2, 4)
    assert done > 0 and undone > 0
    assert torch.ones(4, device="cuda").sum().item() == 4.0


def cases_of(op: str, world: int, full: bool) -> list[GroupedCase | DealtCase]:
    """Small ones for every option, and tokens enough for the kernels that overlap; each of them compiles its own."""
    every: list[GroupedCase | DealtCase] = [*cases(world), *dealt_cases(world), *fp8_cases(world)]
    small = [case for case in every if case.op == op]
    kind: Any = DealtCase if op in DEALT else GroupedCase
    base = kind(op, (*(190,) * (world - 1), 131), (136, 200), num_experts=8, implementation="symmetric", bias=True)
    large = [base.but(dtype=dtype, call=20) for dtype in (torch.bfloat16, torch.float32)]
    large += [base.but(sizes=(0, *(190,) * (world - 1)), dtype=torch.float16, load="one", top_k=3, call=21)]
    if op in (GATHER_OP, DEALT[0]):
        large.append(base.but(activation="swiglu", dtype=torch.bfloat16, call=22))
    fp8 = base.but(dtype=torch.bfloat16, fp8=("row", "row"), call=23)
    return [*small, *large, fp8] if full else [small[0], large[0], large[-1], fp8]


@pytest.mark.parametrize("op", GROUPED)
@pytest.mark.parametrize("world", [2, 3])  # the outer loop: ranks are started anew for another number of them
def test_values_and_gradients_are_within_the_bound(symmetric_ranks: Shared, world: int, op: str, full: bool) -> None:
    chosen = cases_of(op, world, full)
    if torch.cuda.get_device_capability() < (8, 9):
        chosen = [case for case in chosen if not case.fp8]
    if world == 3 and not full:
        chosen = chosen[1:]
    judged = symmetric_ranks(world).run(scenarios.judge_experts, chosen, 3, timeout=CALL_S)
    assert judged == [len(chosen)] * world
