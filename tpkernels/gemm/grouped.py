"""Rows of tokens by expert: which rows a grouped GEMM multiplies with which matrix.

Each of T tokens goes to k experts, which makes T * k *slots*: slot ``t * k + j`` is the j-th expert of token t.  The
rows of a grouped GEMM are the slots sorted by expert and, for one expert, by slot.  So the rows of one expert lie
together, and so do those among them whose tokens are consecutive: a chunk of tokens is one range of rows per expert.

Owns this order, which is a function of the experts alone, and what one rank computes by itself: one GEMM for the rows
of each expert that has any.  Where an expert has few rows, as in decoding, or where there are many small experts, the
compiled kernel of :mod:`tpkernels.gemm.few_rows` may be the one that multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tpkernels.gemm import few_rows, fp8
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled, ScaledExperts

__all__ = [
    "Add",
    "Multiplies",
    "Run",
    "TokenRows",
    "bias_gradients",
    "are_few",
    "matrix_gradients",
    "multiplier",
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
        self._sort(experts.reshape(-1), num_experts)
        self.slots = self._order
        self.tokens = self.slots.div(self.top_k, rounding_mode="floor")

    def _sort(self, experts: Tensor, num_experts: int) -> None:
        """``experts``: of every slot, or of those that have rows here."""
        self.num_experts, self._flat = num_experts, experts
        self._order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=num_experts)
        ends = counts.cumsum(0)
        self._starts: list[int] = (ends - counts).tolist()
        self._before = {0: self._starts, self.num_tokens: ends.tolist()}
        self.num_used = sum(start < end for start, end in zip(self._starts, self._before[self.num_tokens], strict=True))
        """Experts that have rows."""

    @property
    def count(self) -> int:
        return len(self.slots)

    def runs(self, start: int = 0, stop: int | None = None) -> list[Run]:
        """The rows of tokens ``[start, stop)``, by expert; by default those of all tokens."""
        lows, highs = self._up_to(start), self._up_to(self.num_tokens if stop is None else stop)
        pairs = zip(lows, highs, strict=True)
        return [Run(expert, low, high) for expert, (low, high) in enumerate(pairs) if low < high]

    def _up_to(self, token: int) -> list[int]:
        """Of each expert, the first row whose token is not before this one."""
        if token not in self._before:
            slots = int(self._slots_before([token])[0])
            counts = self._flat[:slots].bincount(minlength=self.num_experts).tolist()
            self._before[token] = [start + count for start, count in zip(self._starts, counts, strict=True)]
        return self._before[token]

    def first_rows(self, cuts: Sequence[int]) -> Tensor:
        """Of each expert, the first row whose token is not before each cut: ``[cuts, E]``, int64, on the CPU.

        Cuts ascend, and the last one is the number of tokens.  All of them cost one wait for the device.
        """
        ends = self._slots_before(cuts)
        parts = torch.bucketize(torch.arange(len(self._flat), device=self._flat.device), ends, right=True)
        keys = parts * self.num_experts + self._flat
        counts = keys.bincount(minlength=len(cuts) * self.num_experts).view(-1, self.num_experts)
        return counts[: len(cuts)].cumsum(0).cpu() + torch.tensor(self._starts)

    def of_tokens(self) -> Tensor:
        """The rows of each token, in the order of its experts: ``[T, k]``; -1 behind them where it has fewer here."""
        return self.tokens.argsort(stable=True).view(self.num_tokens, self.top_k)

    def _slots_before(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, device=self._flat.device) * self.top_k

    def of_slots(self, values: Tensor) -> Tensor:
        """``[T, k]`` in the order of the rows, ``[T * k]``."""
        return values.reshape(-1).index_select(0, self.slots)

    def to_slots(self, values: Tensor) -> Tensor:
        """The reverse of :meth:`of_slots`."""
        return torch.empty_like(values).index_copy_(0, self.slots, values).view(self.num_tokens, self.top_k)


def are_few(x: Operand, matrices: ExpertMatrices, rows: TokenRows) -> bool:
    """Whether the compiled kernel for few rows was measured to be the one to take in this process; not for fp8.

    Measured for the mean number of rows of the experts that have any: a function of all rows, so that a call has the
    same bits however its tokens are cut.  Each rank decides for its own products.
    """
    if isinstance(x, Scaled) or isinstance(matrices, ScaledExperts) or not x.is_cpu or matrices.stride(1) != 1:
        return False
    mean = -(-rows.count // max(1, rows.num_used))
    return few_rows.wins_in_blocks(mean, matrices.shape[2], matrices.shape[1], x.dtype)


Multiplies = Callable[[int, Operand, int], None]
"""``multiplies(expert, rows, low)``: rows of an expert by its matrix, into the rows of a result from ``low`` on."""


def multiplier(matrices: ExpertMatrices, out: Tensor, biases: Tensor | None, few: bool) -> Multiplies:
    """``out[low:][: len(rows)] = rows @ matrices[expert] + biases[expert]``, for one expert after the other.

    ``few``: by the compiled kernel, if the transposes of the matrices lie by their rows.  The caller keeps the tensors.
    """
    if few and isinstance(matrices, Tensor):
        compiled = few_rows.of_experts(matrices.transpose(1, 2), out, biases)
        if compiled is not None:
            return cast(Multiplies, compiled)  # fp8 rows are never few

    def multiplies(expert: int, rows: Operand, low: int) -> None:
        bias = None if biases is None else biases[expert]
        multiply(rows, matrices[expert], out[low : low + rows.shape[0]], bias)

    return multiplies


def multiply(x: Operand, matrix: Operand, out: Tensor, bias: Tensor | None) -> None:
    """out = x @ matrix + bias."""
    if isinstance(x, Scaled) or isinstance(matrix, Scaled):
        assert isinstance(x, Scaled) and isinstance(matrix, Scaled)
        fp8.multiply(x, matrix, out, bias)
    elif bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)


def products(
    x: Operand,
    matrices: Sequence[ExpertMatrices],
    rows: TokenRows,
    biases: Sequence[Tensor | None] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """``x[token of row] @ matrices_i[e] + biases_i[e]`` for every row, e its expert; each ``[E, contraction, N_i]``.

    The tokens of an expert are picked once for all matrices.  ``out_dtype``: of the products of an fp8 x.
    """
    like = x.like(out_dtype) if isinstance(x, Scaled) else x
    found = [like.new_empty(rows.count, one.shape[2]) for one in matrices]
    of_each = zip(matrices, found, biases or [None] * len(matrices), strict=True)
    multipliers = [multiplier(one, out, bias, are_few(x, one, rows)) for one, out, bias in of_each]
    for expert, low, high in rows.runs():
        picked = x.index_select(0, rows.tokens[low:high])
        for multiplies in multipliers:
            multiplies(expert, picked, low)
    return found


Add = Callable[[int, Tensor, Tensor], None]
"""Adds ``left^T @ right`` to an expert's gradient: ``add(expert, left, right)``."""


def matrix_gradients(
    dzs: Sequence[Tensor], x: Tensor, rows: TokenRows, adds: Sequence[Add | None] | None = None
) -> list[Tensor | None]:
    """``dz[rows of e]^T @ x[their tokens]`` for each dz and expert e: ``[E, columns of dz, columns of x]``.

    None for those that are added elsewhere, by their entry of ``adds``.
    """
    adds = adds or [None] * len(dzs)
    shapes = [(rows.num_experts, dz.shape[1], x.shape[1]) for dz in dzs]
    found = [dz.new_zeros(shape) if add is None else None for dz, shape, add in zip(dzs, shapes, adds, strict=True)]
    for expert, low, high in rows.runs():
        picked = x.index_select(0, rows.tokens[low:high])
        for dz, gradient, add in zip(dzs, found, adds, strict=True):
            _add(gradient, add, expert, dz[low:high], picked)
    return found


def reduced_matrix_gradient(
    dy: Tensor, h: Tensor, weights: Tensor, rows: TokenRows, add: Add | None = None
) -> Tensor | None:
    """``dy[tokens of e]^T @ (weights * h)[rows of e]`` for each expert e: ``[E, columns of dy, columns of h]``.

    None if it is added elsewhere.
    """
    found = h.new_zeros(rows.num_experts, dy.shape[1], h.shape[1]) if add is None else None
    for expert, low, high in rows.runs():
        weighted = (h[low:high] * weights[low:high, None]).to(h.dtype)
        _add(found, add, expert, dy.index_select(0, rows.tokens[low:high]), weighted)
    return found


def _add(gradient: Tensor | None, add: Add | None, expert: int, left: Tensor, right: Tensor) -> None:
    if add is not None:
        add(expert, left, right)
    else:
        assert gradient is not None
        torch.mm(left.t(), right, out=gradient[expert])


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
