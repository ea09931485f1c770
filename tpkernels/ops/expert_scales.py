"""fp8 operands of the ops with experts: e4m3 tokens and weights with fp32 scales; forward only.

The equations are those of each op, with ``x * scale_x`` and ``weights * scale_weight`` in the places of x and weights.
Products are exact and summed over K in fp32, and scales are applied to the sums.  What has the dtype of x in other
calls has ``out_dtype``: the result, biases, products, and partials where they travel.  A gather or a dispatch moves one
byte per element, and each token's scale behind it in the same chunk (:mod:`tpkernels.gemm.fp8`).

Owns :class:`Scales`, which every op with experts takes: its checks, and what backends are given in the place of
tensors.

Refuses gradients, for the reasons and in the words of :mod:`tpkernels.ops.scaled_matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.comm.groups import Group, GroupLike
from tpkernels.gemm import fp8
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled, ScaledExperts
from tpkernels.ops.checks import check_out_dtype, check_scales
from tpkernels.ops.scaled_matmul import NO_GRADIENT, admit
from tpkernels.ops.shapes import flat

__all__ = ["NONE", "Scales", "behind_scales", "scales_of"]

_DIFFERENTIABLE = "x, weights, bias, the routing's weights, scale_x and scale_weight"


class Scales(NamedTuple):
    """What a call with fp8 operands has beside them; :data:`NONE` for operands of other dtypes."""

    scale_x: Tensor | None
    scale_weight: list[Tensor]
    out_dtype: torch.dtype | None

    @property
    def are_given(self) -> bool:
        """Whether the operands are fp8."""
        return self.scale_x is not None or self.out_dtype is not None

    def check(self, x: Tensor, weights: Sequence[Tensor]) -> None:
        """The scales of both, which have passed the other checks."""
        if self.are_given:
            check_out_dtype(self.out_dtype)
            if self.scale_x is None:
                raise ValueError("fp8 operands need scale_x and scale_weight, got no scale_x")
            check_scales(x, weights, self.scale_x, self.scale_weight)

    def dtype(self, x: Tensor) -> torch.dtype:
        """Of the result."""
        return x.dtype if self.out_dtype is None else self.out_dtype

    def travelling(self, x: Tensor) -> Tensor:
        """Tokens as they are sent."""
        if self.scale_x is None:
            return flat(x)
        return fp8.pack(flat(x), fp8.scale_rows(self.scale_x, x.shape[0]))

    def packed(self, x: Tensor) -> tuple[int, ...]:
        """The ``packed`` of the call that has them."""
        return () if self.scale_x is None else (x.shape[1],)

    def arrived(self, whole: Tensor, x: Tensor) -> list[Tensor]:
        """What was sent, as it is returned: tokens, and behind fp8 ones their scales, ``[tokens, 1]``."""
        if self.scale_x is None:
            return [whole]
        (part,) = fp8.split(whole, (x.shape[1],))
        return [one.clone(memory_format=torch.contiguous_format) for one in (part.numbers, part.scale)]

    def fake_arrived(self, num_tokens: int, x: Tensor) -> list[Tensor]:
        """The shapes of :meth:`arrived`."""
        tokens = x.new_empty(num_tokens, x.shape[1])
        return [tokens] if self.scale_x is None else [tokens, x.new_empty(num_tokens, 1, dtype=torch.float32)]

    def rows(self, x: Tensor) -> Operand:
        """Rows that are multiplied here."""
        rows = flat(x)
        return rows if self.scale_x is None else Scaled(rows, fp8.scale_rows(self.scale_x, rows.shape[0]))

    def compared(self, group: Group, h: Tensor, weight: Tensor) -> list[Tensor]:
        """Of a contraction that is cut: what all ranks must have alike, which is something with ``same_bits`` alone."""
        if self.scale_x is None or not group.same_bits:
            return []
        return [fp8.scale_rows(self.scale_x, h.shape[0]), ScaledExperts(weight, self.scale_weight[0]).scales]

    def matrices(self, weights: Sequence[Tensor]) -> list[ExpertMatrices]:
        """Of weights ``[E, N, K]``."""
        if self.scale_x is None:
            return [weight.transpose(1, 2) for weight in weights]
        return [ScaledExperts(weight, scale) for weight, scale in zip(weights, self.scale_weight, strict=True)]


NONE = Scales(None, [], None)


def behind_scales(arguments: Sequence[Any]) -> Sequence[Any]:
    """Of an op's last arguments, which begin with its scales, those behind them; for an op that autograd records.

    Raises:
        RuntimeError: the call has fp8 operands.
    """
    count = len(Scales._fields)
    if Scales(*arguments[:count]).are_given:
        raise RuntimeError(f"{NO_GRADIENT}: quantise inside of a torch.autograd.Function of yours")
    return arguments[count:]


def scales_of(
    group: GroupLike | None,
    scale_x: Tensor | None,
    scale_weight: Tensor | Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
    *operands: Tensor | None,
) -> Scales:
    """Of the arguments of a public function; the ``group``, if any, is told of a refusal.

    Raises:
        ValueError: a scale is missing, or one of the ``operands`` or scales would have a gradient.
    """
    if scale_x is None and scale_weight is None and out_dtype is None:
        return NONE
    scales = [scale_weight] if isinstance(scale_weight, Tensor) else list(scale_weight or ())
    given_x, given_weights = admit(group, scale_x, scales, *operands, differentiable=_DIFFERENTIABLE)
    return Scales(given_x, given_weights, out_dtype or torch.bfloat16)
