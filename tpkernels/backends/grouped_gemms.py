"""Pieces that backends share for grouped GEMMs: the rows of a chunk of tokens, expert by expert, on one rank.

Each expert's rows take one GEMM: the library's, or the compiled kernel's where :func:`~tpkernels.gemm.grouped.are_few`
says so.  torch's own ``F.grouped_mm`` calls the same GEMMs on a CPU, with the same bits, and takes as long: 21.0 ms
against 21.7 for 8 experts of 512 rows (gate of Mixtral-8x7B / 4, 1792 x 1024), 22.3 against 25.5 for 256 of 64 rows
(DeepSeek-V3 / 8, 128 x 896), where the compiled kernel takes 18.4; in the backward pass 42 against 45, and for the
weights 58 against 40 (torch 2.13, one core of an Intel Xeon with AMX, bf16, 2026-11-27).  And it writes to a new
tensor, from which rows of a chunk would have to be copied to their place.

Of many small experts it is not the GEMMs alone that take time.  So an expert's tokens are picked once for all matrices,
the compiled kernel goes from expert to expert by addresses (:func:`tpkernels.gemm.few_rows.of_experts`), and rows are
summed by token for all experts at once (:mod:`tpkernels.gemm.token_sums`): 31 ms against 39 for gate and up of
DeepSeek-V3 / 8, and 21 against 40 for down and the sums (least processor time of 14 turns, else as above).  One GEMM of
gate and up would take 30 ms where both take 33, or 43 against 51 by the library's; but their parameters would have to
share memory through every optimizer, wrapper and checkpoint, so it is not done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tpkernels.backends.row_gemms import Epilogue, accumulation_dtype, gemm
from tpkernels.gemm import token_sums
from tpkernels.gemm.fp8 import ExpertMatrices
from tpkernels.gemm.grouped import Run, TokenRows, are_few, multiplier
from tpkernels.gemm.token_sums import TokenSums
from tpkernels.ops.contract import AllGatherGroupedMatmul, AllGatherMatmul, GroupedMatmulAllReduce

__all__ = ["GroupedEpilogue", "partial_tokens"]

# Rows of experts that lie together are activated together while a second-level cache has them: one call of torch for
# a few experts, and little room for what goes into an activation and is not kept.
ACTIVATED_BYTES = 512 * 1024
# Products of all rows wait for their sums by token.  32 MiB and more glibc takes from the system each time, and page
# faults cost as much as the sums (15 ms for 40 MB, 2026-11-27); so there are several turns of fewer columns, which are
# at least those of a GEMM that is worth its call.
WAITING_BYTES, LEAST_COLUMNS = 31 * 1024 * 1024, 512


class GroupedEpilogue(Epilogue):
    """The outputs of one grouped all-gather GEMM, filled chunk of tokens by chunk of tokens."""

    def __init__(self, call: AllGatherGroupedMatmul, rows: TokenRows) -> None:
        first = AllGatherMatmul(
            call.x, call.layout, [torch.empty(matrix.shape[1:], device="meta") for matrix in call.matrices],
            [None] * len(call.matrices), call.activation, keep_preactivation=call.keep_preactivation,
            out_dtype=call.out_dtype, packed=call.packed,
        )  # fmt: skip
        super().__init__(first, rows.count)
        self._rows, self._matrices, self._expert_biases = rows, call.matrices, call.biases
        self._few = not call.packed and are_few(call.x, call.matrices[0], rows)

    def fill_tokens(self, x: Tensor, start: int) -> None:
        """Compute the rows of the tokens that begin at ``start`` from their gathered inputs ``x``."""
        row_bytes = sum(out.nbytes for out in self.outs) // max(1, self._rows.count)
        for runs in _lying_together(self._rows.runs(start, start + x.shape[0]), ACTIVATED_BYTES // max(1, row_bytes)):
            first, last = runs[0].low, runs[-1].high
            befores = self.befores(first, last)
            of_each = zip(self._matrices, befores, self._expert_biases, strict=True)
            multipliers = [multiplier(matrices, out, bias, self._few) for matrices, out, bias in of_each]
            for expert, low, high in runs:
                picked = self.call.operand(x.index_select(0, self._rows.tokens[low:high] - start))
                for multiplies in multipliers:
                    multiplies(expert, picked, low - first)
            self.activate(befores, first, last)


def _lying_together(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """Runs of which each begins where the one before ends, of at most so many rows; longer ones by themselves."""
    part: list[Run] = []
    for run in runs:
        if part and (run.low != part[-1].high or run.high - part[0].low > most):
            yield part
            part = []
        part.append(run)
    if part:
        yield part


def partial_tokens(call: GroupedMatmulAllReduce, start: int, stop: int, out: Tensor) -> None:
    """out = this rank's partial sums of tokens ``[start, stop)``: see :class:`GroupedMatmulAllReduce`.

    Which arithmetic it is, and for how many columns at a time, is the same for all tokens of the call.
    """
    if call.addend is not None or not token_sums.serves(out):
        _add_expert_by_expert(call, start, stop, out)
        return
    if out.numel() == 0:
        return
    runs, whole = call.rows.runs(start, stop), stop - start == call.rows.num_tokens
    tokens = call.rows.tokens if whole else _of_runs(call.rows.tokens, runs) - start
    weights = call.weights if whole or call.weights is None else _of_runs(call.weights, runs)
    sums = TokenSums(tokens, weights, stop - start, out.dtype)
    turns = _turns(call)
    waiting = out.new_empty(len(tokens) * (turns[0][1] - turns[0][0]))
    for low, high in turns:
        matrices = [one[:, :, low:high] if isinstance(one, Tensor) else one for one in call.matrices]
        products = waiting[: len(tokens) * (high - low)].view(len(tokens), high - low)
        biases = None if call.expert_biases is None else call.expert_biases[:, low:high]
        _multiply_runs(call, matrices, biases, runs, products)
        out[:, low:high] = sums(products)


def _of_runs(values: Tensor, runs: Sequence[Run]) -> Tensor:
    return torch.cat([values[:0], *(values[low:high] for _, low, high in runs)])


def _turns(call: GroupedMatmulAllReduce) -> list[tuple[int, int]]:
    """The columns of which products wait at a time; of fp8 all, because a GEMM has what was made of whole matrices."""
    columns = call.columns
    if not all(isinstance(one, Tensor) for one in call.matrices):
        return [(0, columns)]
    most = max(LEAST_COLUMNS, WAITING_BYTES // max(1, call.rows.count * call.like.itemsize))
    step = -(-columns // -(-columns // most) // 64) * 64
    return [(low, min(low + step, columns)) for low in range(0, columns, step)]


def _multiply_runs(
    call: GroupedMatmulAllReduce,
    matrices: Sequence[ExpertMatrices],
    biases: Tensor | None,
    runs: Sequence[Run],
    products: Tensor,
) -> None:
    """The sums over ``call.xs`` of the products of these rows, one run behind the other."""
    multiplies, place = multiplier(matrices[0], products, biases, _takes_few(call)), 0
    further = [*zip(call.xs[1:], matrices[1:], strict=True)]
    for expert, low, high in runs:
        multiplies(expert, call.xs[0][low:high], place)
        for x, others in further:
            product = products[place : place + high - low]
            gemm(x[low:high], others[expert], product, product)
        place += high - low


def _takes_few(call: GroupedMatmulAllReduce) -> bool:
    return len(call.xs) == 1 and are_few(call.xs[0], call.matrices[0], call.rows)


def _add_expert_by_expert(call: GroupedMatmulAllReduce, start: int, stop: int, out: Tensor) -> None:
    """The same of every dtype and device, with an addend or without."""
    wide = accumulation_dtype(out.dtype)
    total = out if out.dtype == wide else torch.empty(out.shape, dtype=wide, device=out.device)
    if call.addend is None:
        total.zero_()
    else:
        total.copy_(call.addend[start:stop])
    for run in call.rows.runs(start, stop):
        product = out.new_empty(run.high - run.low, out.shape[1])
        _multiply_runs(call, call.matrices, call.expert_biases, [run], product)
        rows = slice(run.low, run.high)
        weighted = product.to(wide) if call.weights is None else product * call.weights[rows, None]
        total.index_add_(0, call.rows.tokens[rows] - start, weighted)
    if total is not out:
        out.copy_(total)
