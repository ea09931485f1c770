"""The shapes that `tpkernels bench` knows by name, MxKxN over the whole group.

"standard" has the linears of known models, as tensor parallelism cuts them, and the few rows of decoding. It is what
runs are compared by; `scaled` makes it small enough to try the command anywhere.
"""

from __future__ import annotations

from tpkernels.measure.cases import Shape

__all__ = ["FIRST_NODE", "STANDARD_TP", "SUITES", "problems", "scaled"]

FIRST_NODE = "first-node"
"""The suite that is no list of shapes: :mod:`tpkernels.selftest.first_node`."""

STANDARD_TP = (2, 4, 8)

# Columns of the up-projection and of the residual stream.
_MODELS = {
    "LLaMA-7B": (11008, 4096),
    "LLaMA-3-8B": (14336, 4096),
    "LLaMA-3-70B": (28672, 8192),
    "LLaMA-3-405B": (53248, 16384),
    "Qwen2-72B": (29568, 8192),
    "GPT-3": (49152, 12288),
}
_TOKENS = 8192
_DECODING = (1, 8, 32, 128, 256)

SUITES: dict[str, dict[str, list[str]]] = {
    "small": {
        "all_gather_matmul": ["64x256x512", "512x512x1024"],
        "matmul_reduce_scatter": ["64x512x256", "512x1024x512"],
        "matmul_all_reduce": ["64x512x256", "512x1024x512"],
    },
    "host": {  # from decoding to training, for the cores of one host
        "all_gather_matmul": ["1x1024x4096", "16x2048x8192", "256x2048x8192", "1024x1024x4096", "2048x2048x8192"],
        "matmul_reduce_scatter": ["1x4096x1024", "16x8192x2048", "256x8192x2048", "1024x4096x1024", "2048x8192x2048"],
        "matmul_all_reduce": ["1x4096x1024", "16x8192x2048", "256x8192x2048", "1024x4096x1024", "2048x8192x2048"],
    },
    "standard": {
        "all_gather_matmul": [f"{_TOKENS}x{narrow}x{wide}" for wide, narrow in _MODELS.values()],
        "matmul_reduce_scatter": [f"{_TOKENS}x{wide}x{narrow}" for wide, narrow in _MODELS.values()],
        "matmul_all_reduce": [f"{m}x14336x4096" for m in (*_DECODING, _TOKENS)],
    },
    "scorecard": {
        "all_gather_matmul": ["4096x2048x8192", "2048x4096x4096"],
        "matmul_reduce_scatter": ["4096x8192x2048", "2048x4096x2048"],
        "matmul_all_reduce": ["2x4096x4096", "2048x4096x4096"],
    },
}


def problems(suite: str, ops: tuple[str, ...], divisor: int = 1) -> list[tuple[str, Shape]]:
    """(op, shape) of a suite, its sizes divided by `divisor`."""
    found = [(op, scaled(Shape.parse(text), divisor)) for op in ops for text in SUITES[suite][op]]
    return list(dict.fromkeys(found))  # small sizes may have become equal


def scaled(shape: Shape, divisor: int) -> Shape:
    """Sizes divided and rounded up to multiples of 8, except for those that are below 8."""
    if divisor < 1:
        raise ValueError(f"the divisor of a suite's sizes must be at least 1, got {divisor}")
    return Shape(*(size if divisor == 1 or size < 8 else -(-size // (8 * divisor)) * 8 for size in
                   (shape.m, shape.k, shape.n)))  # fmt: skip
