"""Rows of tokens by expert: which rows a grouped GEMM multiplies with which matrix.

Each of T tokens goes to k experts, which makes T * k *slots*: slot ``t * k + j`` is the j-th expert of token t.  The
rows of a grouped GEMM are the slots sorted by expert and, for one expert, by slot.  So the rows of one expert lie
together, and so do those among them whose tokens are consecutive: a chunk of tokens is one range of rows per expert.

Owns this order, which is a function of the experts alone, and what one rank computes by itself.  Where all rows of a
call are few, as in decoding, the compiled kernel of :mod:`tpkernels.gemm.few_rows` may multiply them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.gemm import few_rows

__all__ = [
    "Run",
    "TokenRows",
    "bias_gradients",
    "are_few",
    "matrix_gradients",
    "multiply",
    "products",
    "reduced_bias_gradient",
    "reduced_matrix_gradient",
    "row_dots",
]


class Run(NamedTuple):
    """Rows ``[low, high)`` belong to ``expert``; there is at least one."""

    expert: int
    low: int
    high: int


class TokenRows:
    """The rows of a grouped GEMM: ``slots[i]`` and ``tokens[i]`` are those of row i.

    On a CUDA device this waits for the experts, because their counts decide the shapes of the GEMMs.
    """

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """``experts``: ``[T, k]``, each in ``[0, num_experts)``."""
        self.num_tokens, self.top_k = experts.shape
        self.num_experts = num_experts
        self._flat = experts.reshape(-1)
        self.slots = self._flat.argsort(stable=True)
        self.tokens = self.slots.div(self.top_k, rounding_mode="floor")
        counts = self._flat.bincount(minlength=num_experts)
        ends = counts.cumsum(0)
        self._starts: list[int] = (ends - counts).tolist()
        self._before = {0: self._starts, self.num_tokens: ends.tolist()}

    @property
    def count(self) -> int:
        return self.num_tokens * self.top_k

    def runs(self, start: int = 0, stop: int | None = None) -> list[Run]:
        """The rows of tokens ``[start, stop)``, by expert; by default those of all tokens."""
        lows, highs = self._up_to(start), self._up_to(self.num_tokens if stop is None else stop)
        pairs = zip(lows, highs, strict=True)
        return [Run(expert, low, high) for expert, (low, high) in enumerate(pairs) if low < high]

    def _up_to(self, token: int) -> list[int]:
        """Of each expert, the first row whose token is not before this one."""
        if token not in self._before:
            counts = self._flat[: token * self.top_k].bincount(minlength=self.num_experts).tolist()
            self._before[token] = [start + count for start, count in zip(self._starts, counts, strict=True)]
        return self._before[token]

    def of_slots(self, values: Tensor) -> Tensor:
        """``[T, k]`` in the order of the rows, ``[T * k]``."""
        return values.reshape(-1).index_select(0, self.slots)

    def to_slots(self, values: Tensor) -> Tensor:
        """The reverse of :meth:`of_slots`."""
        return torch.empty_like(values).index_copy_(0, self.slots, values).view(self.num_tokens, self.top_k)


def are_few(x: Tensor, matrices: Tensor, rows: TokenRows) -> bool:
    """Whether the compiled kernel for few rows was measured to be the one to take in this process.

    A function of all rows, so that a call has the same bits however its tokens are cut.
    """
    return x.is_cpu and few_rows.wins(rows.count, matrices.shape[2], matrices.shape[1], x.dtype)


def multiply(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None, few: bool) -> None:
    """out = x @ matrix + bias; ``few``: by the compiled kernel, if the transpose of the matrix lies by its rows."""
    if few and few_rows.multiply(x, matrix.t(), out, bias):
        return
    if bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)


def products(
    x: Tensor, matrices: Tensor, rows: TokenRows, biases: Tensor | None = None, *, few: bool = False
) -> Tensor:
    """``x[token of row] @ matrices[e] + biases[e]`` for every row, e its expert; matrices ``[E, contraction, N]``."""
    found = x.new_empty(rows.count, matrices.shape[2])
    for expert, low, high in rows.runs():
        picked, bias = x.index_select(0, rows.tokens[low:high]), None if biases is None else biases[expert]
        multiply(picked, matrices[expert], found[low:high], bias, few)
    return found


def matrix_gradients(dzs: Sequence[Tensor], x: Tensor, rows: TokenRows) -> list[Tensor]:
    """``dz[rows of e]^T @ x[their tokens]`` for each dz and expert e: ``[E, columns of dz, columns of x]``."""
    found = [dz.new_zeros(rows.num_experts, dz.shape[1], x.shape[1]) for dz in dzs]
    for expert, low, high in rows.runs():
        picked = x.index_select(0, rows.tokens[low:high])
        for dz, gradient in zip(dzs, found, strict=True):
            torch.mm(dz[low:high].t(), picked, out=gradient[expert])
    return found


def reduced_matrix_gradient(dy: Tensor, h: Tensor, weights: Tensor, rows: TokenRows) -> Tensor:
    """``dy[tokens of e]^T @ (weights * h)[rows of e]`` for each expert e: ``[E, columns of dy, columns of h]``."""
    found = h.new_zeros(rows.num_experts, dy.shape[1], h.shape[1])
    for expert, low, high in rows.runs():
        weighted = (h[low:high] * weights[low:high, None]).to(h.dtype)
        torch.mm(dy.index_select(0, rows.tokens[low:high]).t(), weighted, out=found[expert])
    return found


def bias_gradients(dz: Tensor, rows: TokenRows) -> Tensor:
    """Sums of the rows of each expert, ``[E, columns]``."""
    found = dz.new_zeros(rows.num_experts, dz.shape[1])
    for expert, low, high in rows.runs():
        torch.sum(dz[low:high], 0, out=found[expert])
    return found


def reduced_bias_gradient(dy: Tensor, weights: Tensor, rows: TokenRows) -> Tensor:
    """Sums of ``weights * dy[token]`` over the rows of each expert, ``[E, columns]``, in the dtype of the weights."""
    found = dy.new_zeros(rows.num_experts, dy.shape[1])
    for expert, low, high in rows.runs():
        picked = dy.index_select(0, rows.tokens[low:high]).to(weights.dtype)
        found[expert] = weights[low:high] @ picked
    return found


def row_dots(a: Tensor, b: Tensor, rows: TokenRows, dtype: torch.dtype) -> Tensor:
    """``a[row] . b[row]`` of every slot, ``[T, k]``, summed in ``dtype``."""
    dots = torch.empty(rows.count, dtype=dtype, device=a.device)
    for _, low, high in rows.runs():
        torch.sum(a[low:high].to(dtype) * b[low:high], 1, out=dots[low:high])
    return rows.to_slots(dots)
