"""The contract between ops and backends: what an implementation's ``run`` is given and must return.

Ops check their arguments, agree with the other ranks and flatten every tensor to two dimensions; a backend sees only
the dataclasses below.  Matrices are ``[contraction, columns]`` views (the transpose of an ``nn.Linear`` weight in the
forward pass, the weight itself in the gradient), with whatever strides they have.  In fp8 calls they are
:class:`~tpkernels.gemm.fp8.Scaled`, those of experts :class:`~tpkernels.gemm.fp8.ScaledExperts`, as are the ``xs`` of
reducing ops, and ``out_dtype`` stands where else the dtype of x does: results, biases and what is sent of partials have
it.  Where the ranks have agreed to multiply bf16 or fp16 in fp32 they are :class:`~tpkernels.gemm.widened.Widened`.

All implementations must: leave their inputs alone; return fresh tensors; accumulate over ranks in fp32 (fp64 for
fp64), in rank order, rounding once; accept shards of zero rows; and report a failed wait as
:class:`~tpkernels.comm.transport.TransportFailure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tpkernels.comm.groups import Group
from tpkernels.dispatch import Costs, Problem
from tpkernels.gemm import fp8, residual_norm
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled
from tpkernels.gemm.grouped import TokenRows
from tpkernels.gemm.widened import MatrixOperand, Widened
from tpkernels.ops.activations import (
    ACTIVATIONS,
    GATED,
    activation_backward,
    activation_forward,
    gate_backward,
    gate_forward,
)
from tpkernels.partition import Layout

__all__ = [
    "ACTIVATIONS",
    "GATED",
    "AllGather",
    "AllGatherGroupedMatmul",
    "AllGatherMatmul",
    "AllReduce",
    "Context",
    "DispatchGroupedMatmul",
    "Gathered",
    "GroupedMatmulAllReduce",
    "GroupedMatmulCombine",
    "GroupedMatmulReduceScatter",
    "MatmulAllReduce",
    "MatmulReduceScatter",
    "ReduceScatter",
    "RepeatedSum",
    "ResidualNorm",
    "accumulation_dtype",
    "activation_backward",
    "activation_forward",
    "gate_backward",
    "gate_forward",
    "nothing",
    "widened_call",
]


class Context(NamedTuple):
    """The agreed call: ``num_chunks`` pieces per shard; chunk c travels under ``tag`` + c.

    ``text`` and ``fingerprint`` say what the call is, for backends that check it in every call; ``problem`` and
    ``costs`` are those it was selected by, equal on all ranks, for choices that must be equal as well.
    """

    group: Group
    tag: int
    num_chunks: int
    text: str
    fingerprint: int
    problem: Problem
    costs: Costs
    forced_chunks: bool = False
    """Whether the user asked for ``num_chunks``; else a backend may cut otherwise, if it does so on all ranks."""
    agreed: Any = None
    """What the implementation's ``agree`` returned, see :class:`~tpkernels.dispatch.Implementation`."""


@dataclass(frozen=True)
class AllGather:
    """whole = concat over ranks of ``x`` as ``layout`` says.

    ``x`` is this rank's contiguous shard ``[rows, columns]``.  ``run`` posts the transfers and returns a function that
    waits for them and returns the whole, so that the caller can compute in between.
    """

    x: Tensor
    layout: Layout


@dataclass(frozen=True)
class AllGatherMatmul:
    """outs[i] = activation(whole @ matrices[i] + biases[i]), whole = concat over ranks of ``x``.

    An activation of :data:`GATED` makes one output of two matrices of one shape, gate and up:
    outs[0] = act(whole @ matrices[0] + biases[0]) * (whole @ matrices[1] + biases[1]).

    ``run`` returns a :class:`Gathered`.  An fp8 ``x`` has the rows of bytes that :func:`tpkernels.gemm.fp8.pack`
    makes, and so has the whole, whose ``layout`` is in bytes where it is one of features; see :meth:`operand`.
    """

    x: Tensor
    layout: Layout
    matrices: Sequence[MatrixOperand]
    biases: Sequence[Tensor | None]
    activation: str | None = None
    keep_whole: bool = False
    keep_preactivation: bool = False
    out_dtype: torch.dtype | None = None
    packed: tuple[int, ...] = ()
    """Numbers in a packed row: K, or every rank's part of it where features are gathered."""

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def operand(self, rows: Tensor) -> Operand:
        """What a GEMM takes of gathered rows."""
        return fp8.unpack(rows, self.packed) if self.packed else rows


@dataclass
class Gathered:
    """Results of :class:`AllGatherMatmul`; ``whole`` and ``preactivations`` only where they were asked for.

    There is a preactivation per matrix: ``whole @ matrices[i] + biases[i]``.
    """

    outs: list[Tensor]
    preactivations: list[Tensor] = field(default_factory=list)
    whole: Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over ranks and experts are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing() -> None:
    """The ``meanwhile`` of a call that has none."""


class ResidualNorm:
    """What may follow a sum over the ranks: add the residual, then normalise each row.

    ``out`` of the call becomes ``sums = out + residual`` in its place, and ``normed`` is filled beside it: by
    :meth:`fill`, once for every row, in any order and in blocks of the backend's choice, as soon as the block's sums
    are there.  Equations and rounding: :mod:`tpkernels.gemm.residual_norm`.
    """

    def __init__(self, residual: Tensor, weight: Tensor, eps: float) -> None:
        """``residual`` is contiguous, as many rows and columns as this rank's ``out``; ``weight`` one row."""
        self.residual, self.weight, self.eps = residual, weight, eps
        self.normed = torch.empty_like(residual)
        self.scales = residual.new_empty(residual.shape[0], dtype=residual_norm.of_scales(residual.dtype))

    def fill(self, rows: Tensor, start: int) -> None:
        """``rows``: sums over the ranks, from row ``start`` of ``out`` on; they become the sums with the residual."""
        stop = start + rows.shape[0]
        residual_norm.forward(
            rows, self.residual[start:stop], self.weight, self.eps, self.normed[start:stop], self.scales[start:stop]
        )


@dataclass(frozen=True)
class MatmulReduceScatter:
    """out = (sum over ranks of partial)[shard of this rank] + bias, partial = sum_i xs[i] @ matrices[i] + addend.

    ``xs`` are contiguous ``[whole rows, contraction_i]``.  ``meanwhile`` is called once, when every transfer that
    depends on this rank's arithmetic has been posted: work for the time until the peers' partials arrive.
    """

    xs: Sequence[Operand]
    matrices: Sequence[MatrixOperand]
    layout: Layout
    bias: Tensor | None = None
    addend: Tensor | None = None
    meanwhile: Callable[[], None] = nothing
    out_dtype: torch.dtype | None = None
    tail: ResidualNorm | None = None
    """What follows the sum, in its place; never where features are scattered."""

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and on the device of the result."""
        x = self.xs[0]
        return x.like(self.out_dtype) if isinstance(x, Scaled) else x

    @property
    def columns(self) -> int:
        return self.matrices[0].shape[1]


class MatmulAllReduce(NamedTuple):
    """out = sum over ranks of (sum_i xs[i] @ matrices[i]) + bias, equal bit for bit on all ranks."""

    xs: Sequence[Operand]
    matrices: Sequence[MatrixOperand]
    bias: Tensor | None = None
    meanwhile: Callable[[], None] = nothing
    out_dtype: torch.dtype | None = None
    tail: ResidualNorm | None = None
    """What follows the sum, in its place."""

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and on the device of the result."""
        x = self.xs[0]
        return x.like(self.out_dtype) if isinstance(x, Scaled) else x


def widened_call(call: AllGatherMatmul | MatmulReduceScatter | MatmulAllReduce) -> Any:
    """The same call, whose matrices are to be multiplied in fp32."""
    matrices = [Widened(matrix) for matrix in call.matrices if isinstance(matrix, Tensor)]
    return call._replace(matrices=matrices) if isinstance(call, MatmulAllReduce) else replace(call, matrices=matrices)


class RepeatedSum(Protocol):
    """What ``repeat`` returns for :class:`MatmulAllReduce`: the call from the partial product on, in place.

    The product is contiguous, on the CPU, with the rows, columns and dtype of the call that this repeats; the bias is
    one row of that or, by address 0, none.  Ranks may differ in whether they ``run`` a call or repeat it.
    """

    multiply: Callable[[int, int, int, int, int, int], bool] | None
    """Where the product is made by the same step: ``start`` from the addresses of x and of the weight, the stride of
    its rows, the contraction, and the addresses of the result and the bias.  x is contiguous, and so are the rows of
    the weight, ``[columns, contraction]``."""

    def start(self, product: int, bias: int, /) -> bool:
        """True: the sum over the ranks + bias has replaced the product at this address.  False: ``finish`` it."""
        ...

    def finish(self, product: int, bias: int, /) -> None:
        """Wait for the late peers; for as long as any wait may take."""
        ...

    def named(self, error: BaseException) -> BaseException:
        """The failure that an error of the two means."""
        ...


@dataclass(frozen=True)
class AllGatherGroupedMatmul:
    """outs[i][row] = activation(whole[token of row] @ matrices[i][expert of row] + biases[i][expert of row]).

    ``matrices`` are ``[E, contraction, columns]`` and ``biases`` ``[E, columns]``; ``run`` returns a :class:`Gathered`.
    ``x`` is this rank's contiguous ``[tokens, contraction]``, and the layout is one of rows with one segment per rank.
    An fp8 x, and the whole, are packed as in :class:`AllGatherMatmul`.
    """

    x: Tensor
    layout: Layout
    rows: Callable[[], TokenRows]
    """Waits for the tokens' experts, which travel beside x; to be called once x is on its way, as often as you like."""
    matrices: Sequence[ExpertMatrices]
    biases: Sequence[Tensor | None]
    activation: str | None = None
    keep_whole: bool = False
    keep_preactivation: bool = False
    out_dtype: torch.dtype | None = None
    packed: tuple[int, ...] = ()
    """K, where rows are packed."""


@dataclass(frozen=True)
class GroupedMatmulAllReduce:
    """out = sum over ranks of partial + bias, equal bit for bit on all ranks, where

    partial[t] = addend[t] + sum over the rows of t of weights[row] * (sum_i xs[i][row] @ matrices[i][expert of row])

    ``xs`` are contiguous ``[rows, contraction_i]`` and ``matrices`` ``[E, contraction_i, columns]``.  The products have
    the dtype of xs.  They are weighted and summed by expert, then by token, in the accumulation dtype, and rounded
    once; what is sent of partials has the dtype of xs.  ``meanwhile`` as in :class:`MatmulReduceScatter`.
    """

    xs: Sequence[Operand]
    matrices: Sequence[ExpertMatrices]
    rows: TokenRows
    weights: Tensor | None
    """``[rows]`` in the accumulation dtype; None: all are 1."""
    bias: Tensor | None = None
    """As many rows as ``out`` has, in the accumulation dtype."""
    addend: Tensor | None = None
    meanwhile: Callable[[], None] = nothing
    expert_biases: Tensor | None = None
    """``[E, columns]``: part of the (only) product of an expert's rows."""
    out_dtype: torch.dtype | None = None

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and on the device of the result."""
        x = self.xs[0]
        return x.like(self.out_dtype) if isinstance(x, Scaled) else x

    @property
    def tail(self) -> None:
        """Nothing follows the sum."""

    @property
    def columns(self) -> int:
        return self.matrices[0].shape[2]


@dataclass(frozen=True)
class GroupedMatmulReduceScatter(GroupedMatmulAllReduce):
    """out = (sum over ranks of partial)[shard of this rank] + bias, which has the rows of this shard.

    The layout is one of rows with one segment per rank.
    """

    layout: Layout = field(kw_only=True)


@dataclass(frozen=True)
class DispatchGroupedMatmul(AllGatherGroupedMatmul):
    """Each token goes to the ranks that have one of its experts, and is multiplied with their matrices there.

    ``x`` are this rank's tokens, ``layout`` has the tokens of every rank, and ``matrices`` and ``biases`` are those of
    this rank's experts.  The whole that ``run`` returns where it was asked for are the received tokens.
    """

    rows: Callable[[], DealtRows]
    """Waits for the routing of all tokens; to be called as often as you like."""


@dataclass(frozen=True)
class GroupedMatmulCombine(GroupedMatmulAllReduce):
    """out[t] = sum over the ranks that have an expert of t of partial[t], for this rank's tokens t, where

    the partials are those of :class:`GroupedMatmulAllReduce` over the experts of one rank, of the tokens that it has
    received.  They go back to where the tokens came from, which is what ``rows`` says, in the dtype of xs.
    """

    rows: DealtRows
    layout: Layout = field(kw_only=True)
    """Of the tokens of every rank."""


@dataclass(frozen=True)
class ReduceScatter:
    """out = (sum over ranks of ``x``)[shard of this rank]; ``x`` is contiguous ``[whole rows, columns]``."""

    x: Tensor
    layout: Layout


class AllReduce(NamedTuple):
    """out = sum over ranks of ``x``, equal bit for bit on all ranks; ``x`` is contiguous ``[rows, columns]``."""

    x: Tensor
