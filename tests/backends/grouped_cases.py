"""Cases of grouped GEMMs for `symmetric`, experts cut or dealt out: on emulated GPUs, and on real ones."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.testing.dealt import DEALT, DISPATCH, DealtCase
from tpkernels.testing.grouped import COPY, GATHER, REDUCE, SCATTER, GroupedCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = {2: (9, 4), 3: (5, 0, 8), 4: (3, 1, 0, 6)}
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


def dealt_cases(world: int) -> list[DealtCase]:
    """The same of experts that are dealt out, and ranks without experts, without tokens, or without either."""
    found = []
    for op in DEALT:
        base = DealtCase(op, SIZES[world], implementation="symmetric")
        found += [
            base.but(dtype=BF16, bias=True, load="one", top_k=3, call=2),
            base.but(dtype=FP16, routing_dtype=FP16, load="few", top_k=1, strided=True, call=3),
            base.but(sizes=(0,) * world, bias=True, call=5),
            base.but(shape=(33, 40), dealt=(0,) * (world - 1) + (5,), bias=True, dtype=BF16, call=7),
            base.but(shape=(1, 1), num_experts=2, load="one", call=6),
            base.but(sizes=(*(0,) * (world - 1), 11), num_experts=2 * world + 1, top_k=3, call=4),
        ]
    base = DealtCase(DISPATCH, SIZES[world], implementation="symmetric")
    found += [
        base.but(activation="swiglu", bias=True, dtype=BF16, call=8),
        base.but(activation="clamped_swiglu", shape=(6, 90), dtype=BF16, bias=True, call=14),
        base.but(activation="silu", bias=True, dtype=FP16, call=12),
    ]
    return found


def fp8_cases(world: int) -> list[GroupedCase | DealtCase]:
    """Every op, kind of scale and dtype of results."""
    found: list[GroupedCase | DealtCase] = []
    for op in (*OPS, *DEALT):
        kind: Any = DealtCase if op in DEALT else GroupedCase
        base = kind(op, SIZES[world], (33, 40), bias=True, fp8=("row", "row"), implementation="symmetric")
        found += [
            base.but(dtype=BF16, call=20),
            base.but(dtype=FP32, shape=(6, 9), fp8=("tensor", "matrix"), load="one", num_experts=5, top_k=3, call=21),
        ]
        if op in (GATHER, DISPATCH):
            found.append(base.but(dtype=FP16, activation="swiglu", fp8=("row", "matrix"), call=22))
    return [*found, GroupedCase(GATHER, SIZES[world], fp8=("mixed", "tensor"), dtype=BF16, return_gathered=True)]
