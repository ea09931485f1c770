"""`symmetric` with `same_bits`: one, two and four emulated GPUs give the same bits, and right ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends.contract import JUDGES
from tests.backends.emulated import Emulation
from tests.ops import same_bits as calls
from tests.ops.same_bits import SAME_BITS, Draw, Result
from tests.ops.test_same_bits import check_fp8, compare
from tests.ops.test_same_bits_experts import Mixture
from tests.ops.test_same_bits_experts import run as run_experts
from tpkernels.backends.symmetric import kernel_launches, tuning
from tpkernels.backends.symmetric import same_bits as symmetric
from tpkernels.comm.groups import resolve
from tpkernels.dispatch import Problem
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import fp8
from tpkernels.testing import dealt, grouped
from tpkernels.testing.cases import COPY, FUSED, GATHER, REDUCE, SCATTER, Case
from tpkernels.testing.dealt import COMBINE, DISPATCH, DealtCase
from tpkernels.testing.grouped import GATHER as GATHER_EXPERTS
from tpkernels.testing.grouped import REDUCE as REDUCE_EXPERTS
from tpkernels.testing.grouped import SCATTER as SCATTER_EXPERTS
from tpkernels.testing.grouped import GroupedCase
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 180.0
FEW = [
    Draw(GATHER, (32,), (4,), 12, 0, torch.float16, True, None, False, 1),
    Draw(SCATTER, (8,), (2,), 5, 0, torch.float32, True, None, False, 2),
]
# Blocks that lie across tiles; several weights, which are terms of one block in the backward pass; and features that
# are gathered and scattered.
DRAWS = [
    Draw(GATHER, (64,), (24, 12), 20, 0, torch.float16, True, None, False, 1),
    Draw(SCATTER, (40,), (9,), 17, 0, torch.float32, True, None, False, 2),
    Draw(REDUCE, (2, 11), (5,), 40, 0, torch.float32, True, None, True, 3),
    Draw(GATHER, (3, 8), (6, 6), 9, 1, torch.bfloat16, True, "swiglu", False, 4),
    Draw(SCATTER, (5, 4), (4,), 7, 2, torch.bfloat16, False, None, False, 5),
    Draw(GATHER, (9,), (3,), 16, 1, torch.float32, False, "gelu", False, 6),
    Draw(COPY, (10,), (3,), 6, 0, torch.float32, True, "silu", False, 7),
]
# fp8: rows and features gathered; blocks that are no multiple of what is multiplied at once; one scale for all and one
# for each row; and the only element that one rank of eight has.
SCALED = [
    Draw(GATHER, (40,), (12, 5), 17, 0, fp8.DTYPE, True, None, False, 7),
    Draw(GATHER, (2, 9), (6, 6), 9, 2, fp8.DTYPE, False, "swiglu", False, 12),
    Draw(SCATTER, (40,), (9,), 17, 0, fp8.DTYPE, True, None, True, 9),
    Draw(SCATTER, (5, 4), (4,), 24, 2, fp8.DTYPE, False, None, False, 10),
    Draw(REDUCE, (2, 11), (5,), 40, 0, fp8.DTYPE, True, None, False, 8),
    Draw(GATHER, (1,), (1,), 5, 0, fp8.DTYPE, True, None, False, 6),
]


# Features in several blocks and in one, tokens of each rank and of all, experts that are dealt out.
EXPERTS = [
    Mixture(11, 24, 3, num_experts=3, bias=True),
    Mixture(40, 16, 2, sequence_parallel=True, activation="gelu", dtype=torch.float16),
    Mixture(11, 24, 3, num_experts=3, bias=True, layout="experts", dtype=torch.bfloat16),
    Mixture(40, 16, 2, sequence_parallel=True, layout="experts"),
]
SCALED_EXPERTS = [
    Mixture(11, 24, 3, num_experts=3, bias=True, dtype=fp8.DTYPE),
    Mixture(40, 16, 2, sequence_parallel=True, dtype=fp8.DTYPE),
    Mixture(23, 24, 3, sequence_parallel=True, bias=True, layout="experts", dtype=fp8.DTYPE),
]


def run_all(emulation: Emulation, draws: Sequence[Draw | Mixture], fault: str | None = None) -> list[list[Result]]:
    with emulation.group() as group, nullcontext() if fault is None else FAULTS[fault]():
        resolve(group).keep_same_bits(SAME_BITS)
        return [(calls.run if isinstance(of, Draw) else run_experts)(of, group, "symmetric") for of in draws]


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, wrong in changes:
            patch.setattr(owner, name, wrong)
        yield


def cancelling(of: Draw, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Halves of K whose products are each other's opposite, almost: what is left shows how the sums were rounded."""
    made = WHOLE(of, name, shape)
    half = shape[-1] // 2
    if name == "x":
        made[..., half:] = made[..., half:] / 64 - made[..., :half]
    elif name.startswith("w"):
        made[..., half:] = made[..., :half]
    return made


WHOLE = calls.whole


def tiles_of_the_degree(problem: Any, device: Any) -> Any:
    return tuning.gemm_of(problem).configure(device, pointers=True).tiles


def one_launch(context: Any, channel: Any, *rest: Any) -> Any:
    """The rank's part of K as one block."""
    problem = replace(context.problem, same_bits=channel.size)
    return RIGHT(context._replace(problem=problem), channel, *rest)


def one_product(context: Any, channel: Any, call: Any, blocks: range) -> Any:
    """The same of experts."""
    problem = replace(context.problem, same_bits=channel.size)
    return RIGHT_OF_EXPERTS(context._replace(problem=problem), channel, call, range(1))


RIGHT, RIGHT_OF_EXPERTS = symmetric._launches, symmetric._sums_of_blocks
FAULTS = {
    "tiles": lambda: patched((kernel_launches, "tiles_of_blocks", tiles_of_the_degree), (calls, "whole", cancelling)),
    "": lambda: patched((calls, "whole", cancelling)),
    "order along K": lambda: patched((symmetric, "_launches", one_launch)),
    "blocks of experts": lambda: patched((symmetric, "_sums_of_blocks", one_product)),
    "top of the tree": lambda: calls.seeded("tree order"),
}


def judge(ranks: Pools, emulation: Emulation, draws: Sequence[Draw | Mixture], worlds: Sequence[int]) -> None:
    (expected,) = ranks(1).run(run_all, emulation, draws, timeout=PATIENCE_S)
    for world in worlds:
        found = ranks(world).run(run_all, emulation, draws, timeout=PATIENCE_S)
        for i, of in enumerate(draws):
            compare(expected[i], [results[i] for results in found], f"{of} on {world} ranks")


def test_two_ranks_give_the_bits_of_one(pools: Pools, emulation: Emulation) -> None:
    draws = [*FEW, SCALED[1], SCALED[3], SCALED_EXPERTS[0]]
    judge(pools, replace(emulation, num_chunks=2, capability=90), draws, (2,))


@pytest.mark.slow("interpreted ranks")
def test_two_and_four_ranks_give_the_bits_of_one_in_every_op(pools: Pools, emulation: Emulation) -> None:
    """Forward and backward."""
    judge(pools, replace(emulation, num_chunks=2, multicast=True, late_us=200), DRAWS, (2, 4))


@pytest.mark.slow("interpreted ranks")
def test_two_and_four_ranks_give_the_bits_of_one_with_experts(pools: Pools, emulation: Emulation) -> None:
    judge(pools, replace(emulation, num_chunks=2), EXPERTS, (2, 4))


@pytest.mark.slow("interpreted ranks")
def test_two_and_four_ranks_give_the_bits_of_one_with_fp8_operands(pools: Pools, emulation: Emulation) -> None:
    judge(pools, replace(emulation, num_chunks=2, capability=90), [*SCALED, *SCALED_EXPERTS], (2, 4))


@pytest.mark.slow("interpreted ranks")
def test_values_of_fp8_are_right(pools: Pools, emulation: Emulation) -> None:
    """Those of one rank, whose bits the others have."""
    (found,) = pools(1).run(run_all, replace(emulation, capability=90), SCALED, timeout=PATIENCE_S)
    for of, results in zip(SCALED, found, strict=True):
        check_fp8(of, results)
    pools(2).run(check_fp8_of_experts, replace(emulation, num_chunks=2, capability=90), timeout=PATIENCE_S)


def check_fp8_of_experts(emulation: Emulation) -> None:
    """The scales of integers are equal on all ranks, as those of a contraction that is cut have to be."""
    of_features = GroupedCase(GATHER_EXPERTS, (9, 4), shape=(16, 16), fp8=("row", "row"), integers=True)
    of_whole = DealtCase(DISPATCH, (9, 4), shape=(16, 24), bias=True, fp8=("row", "matrix"))
    options: Any = {"dtype": torch.bfloat16, "implementation": "symmetric"}
    with emulation.group() as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for number, op in enumerate((GATHER_EXPERTS, SCATTER_EXPERTS, REDUCE_EXPERTS)):
            grouped.judge(of_features.but(op=op, bias=op == GATHER_EXPERTS, call=number, **options), group)
        for op in (DISPATCH, COMBINE):
            dealt.judge(of_whole.but(op=op, **options), group)


@pytest.mark.full("eight interpreted ranks")
def test_eight_ranks_give_the_bits_of_one_in_every_op(pools: Pools, emulation: Emulation) -> None:
    judge(pools, replace(emulation, capability=90), [*DRAWS, *EXPERTS, *SCALED, *SCALED_EXPERTS], (SAME_BITS,))


@pytest.mark.slow("interpreted ranks")
@pytest.mark.parametrize("fault", ["tiles", "order along K", "blocks of experts", "top of the tree"])
def test_a_seeded_fault_changes_bits(pools: Pools, emulation: Emulation, fault: str) -> None:
    # In 16-bit dtypes the steps along K depend on the rows of a shard: those of 2 ranks are not those of 8.
    draws: Sequence[Draw | Mixture] = EXPERTS[:1] if fault == "blocks of experts" else DRAWS[1:2]
    draws, world = (DRAWS[:1], 2) if fault == "tiles" else (draws, 4)
    (expected,) = pools(1).run(run_all, emulation, draws, "" if fault == "tiles" else None, timeout=PATIENCE_S)
    found = pools(world).run(run_all, emulation, draws, fault, timeout=PATIENCE_S)
    with pytest.raises(AssertionError, match="elements differ"):
        compare(expected[0], [results[0] for results in found], fault)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_tiles_do_not_depend_on_the_degree(capability: int) -> None:
    device: Any = SimpleNamespace(capability=capability, num_sms=108)
    differ = 0
    dtypes = [(torch.float32, None), (torch.bfloat16, None), (fp8.DTYPE, torch.bfloat16)][: 3 if capability > 80 else 2]
    for op, m, (dtype, out) in itertools.product((GATHER, SCATTER), (8, 64, 500, 8192), dtypes):
        problems = [
            Problem(op, m, 2048, 2048, dtype, world, out_dtype=out, same_bits=SAME_BITS) for world in (1, 2, 4, 8)
        ]
        assert len({tuning.tiles_of_blocks(problem, device) for problem in problems}) == 1, (op, m, dtype)
        differ += len({tiles_of_the_degree(problem, device) for problem in problems}) > 1
    assert differ > 4  # else this would show nothing


def test_a_gpu_without_fp8_is_refused() -> None:
    device: Any = SimpleNamespace(capability=80, num_sms=108)
    with pytest.raises(UnsupportedProblem, match=r"need GPUs of capability 8.9, these have 8.0"):
        tuning.tiles_of_blocks(
            Problem(SCATTER, 8, 64, 64, fp8.DTYPE, 2, out_dtype=torch.bfloat16, same_bits=SAME_BITS), device
        )


@pytest.mark.slow("interpreted ranks")
def test_values_are_right_and_auto_takes_what_shares_its_bits_with_others(pools: Pools, emulation: Emulation) -> None:
    pools(2).run(check_values, replace(emulation, num_chunks=2, checks=True), timeout=PATIENCE_S)


def check_values(emulation: Emulation) -> None:
    cases = [
        Case(op, (40, 48), ns=(24,), bias=True, dtype=dtype, integers=dtype == torch.bfloat16)
        for op in FUSED
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    cases += [Case(GATHER, (40, 32), ns=(16, 16), activation="swiglu"), Case(SCATTER, (3, 20, 32), ns=(16,), dim=1)]
    with emulation.group() as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for case in cases:
            JUDGES["values"](case.but(implementation="symmetric"), group)
        of_experts = GroupedCase(GATHER_EXPERTS, (9, 4), shape=(16, 16), bias=True, implementation="symmetric")
        for op in (GATHER_EXPERTS, SCATTER_EXPERTS, REDUCE_EXPERTS):
            grouped.judge(of_experts.but(op=op), group)
        of_whole = DealtCase(DISPATCH, (9, 4), shape=(16, 24), bias=True, implementation="symmetric")
        for op in (DISPATCH, COMBINE):
            dealt.judge(of_whole.but(op=op, dtype=torch.bfloat16), group)
        said = tpk.explain(GATHER, m=64, n=64, k=64, dtype=torch.float32, group=group)
        assert said.chosen != "symmetric" and "symmetric      no estimate, by name alone" in str(said), said
