"""Grouped GEMMs of `symmetric`, as W processes with an emulated GPU each (emulated.py): values, gradients, bits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.backends.emulated import Emulation
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm.grouped import TokenRows
from tpkernels.testing.grouped import COPY, GATHER, REDUCE, SCATTER, GroupedCase, judge
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = {2: (9, 4), 3: (5, 0, 8), 4: (3, 1, 0, 6)}
PATIENCE_S = 180.0
OPS = (GATHER, SCATTER, REDUCE)


def cases(world: int) -> list[GroupedCase]:
    """Options of the ops, uneven tokens, ranks without any, one expert with all of them and one with none."""
    found = []
    for op in OPS:
        base = GroupedCase(op, SIZES[world], implementation="symmetric")
        found += [
            base.but(dtype=BF16, bias=True, load="one", num_experts=5, top_k=3, call=2),
            base.but(dtype=FP16, routing_dtype=FP16, load="few", top_k=1, strided=True, own=True, call=3),
            base.but(sizes=(0,) * world, bias=True, call=5),
            base.but(shape=(33, 40), num_experts=3, bias=True, dtype=BF16, call=7),
            base.but(shape=(1, 1), num_experts=1, top_k=1, call=6),
        ]
    base = GroupedCase(GATHER, SIZES[world], implementation="symmetric")
    found += [
        base.but(activation="swiglu", bias=True, dtype=BF16, return_gathered=True, call=8),
        base.but(activation="clamped_swiglu", shape=(6, 90), dtype=BF16, bias=True, call=14),
        base.but(activation="geglu", own=True, call=9),
        base.but(activation="silu", save_gathered=True, bias=True, dtype=FP16, call=12),
    ]
    return [*found, GroupedCase(COPY, SIZES[world], activation="swiglu", bias=True, implementation="symmetric")]


def judge_all(emulation: Emulation, chosen: Sequence[GroupedCase]) -> int:
    with emulation.group() as group:
        for case in chosen:
            judge(case, group)
    return len(chosen)


WHOLE = TokenRows.of_tokens


def first_uses(emulation: Emulation, spoiled: bool) -> list[str]:
    """What the first call of each op says; spoiled: all rows of a token are taken for the first row of all."""
    said, fault = [], mock.patch.object(TokenRows, "of_tokens", lambda rows: WHOLE(rows) * 0)
    with emulation.group() as group, fault if spoiled else nullcontext():
        for op in (SCATTER,) if spoiled else OPS:
            try:
                judge(GroupedCase(op, SIZES[2], implementation="symmetric"), group, backward=False)
            except UnsupportedProblem as error:
                said.append(str(error))
    return said


@pytest.mark.full("interpreted ranks, and larger problems than they are given elsewhere")
def test_first_calls_are_preceded_by_one_whose_answer_is_known(pools: Pools, emulation: Emulation) -> None:
    settings = replace(emulation, num_chunks=2, checks=True, one_shot_bytes=10**6)
    assert pools(2).run(first_uses, settings, False, timeout=PATIENCE_S) == [[], []]
    for said in pools(2).run(first_uses, settings, True, timeout=PATIENCE_S):
        assert len(said) == 1 and SCATTER in said[0] and "elements are wrong" in said[0], said


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.slow("10 s: grouped ops, forward and backward, on interpreted ranks; tests/kernels interprets the kernel")
def test_values_and_gradients_are_within_the_bound(pools: Pools, emulation: Emulation, world: int, full: bool) -> None:
    chosen = cases(world) if full else cases(world)[world % 3 :: 3]
    settings = replace(emulation, num_chunks=2, late_us=500)
    pools(world).run(judge_all, settings, chosen, timeout=PATIENCE_S)
    # Few tokens: they are gathered, or summed, before anything else.
    apart = replace(settings, fuse_from_rows=10**6, one_shot_bytes=10**6 if world == 2 else 0)
    pools(world).run(judge_all, apart, chosen[::2], timeout=PATIENCE_S)
