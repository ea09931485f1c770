"""What the ops do where their group gives the same bits at every degree: their local arithmetic, block by block.

Each function takes the group and does what the op does anyhow where nothing was asked for, so that ops ask nobody else.
The rules are those of :mod:`tpkernels.gemm.canonical`; sums over ranks are the backends'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.comm.groups import Group, GroupLike, group_size, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import canonical
from tpkernels.gemm.canonical import VECTOR
from tpkernels.ops import agreed_call, main_grad
from tpkernels.ops.contract import (
    GATED,
    activation_backward,
    activation_forward,
    gate_backward,
    gate_forward,
)
from tpkernels.ops.gradients import fake_of_linear
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.registration import define
from tpkernels.ops.shapes import flat

__all__ = [
    "activated",
    "agree_on_blocks",
    "bias_gradients",
    "blocks_of",
    "check_parts",
    "linear",
    "preactivation_gradients",
    "sinks_of",
    "weight_gradients",
]


def blocks_of(group: Group) -> int:
    """How many blocks of a dimension that is cut are this rank's; 0 where the bits may depend on the degree."""
    return same_bits_of(group.name) // group.size if group.same_bits else 0


def agree_on_blocks(group: Group, op: str, sizes: Sequence[int]) -> None:
    """``sizes``: of what this rank has of each dimension that is cut.  Collective the first time for an op and sizes.

    Raises:
        ValueError: on every rank, if they are not the same on all ranks, or do not divide into blocks.
    """
    blocks = blocks_of(group)
    if not blocks:
        return
    key = ("same_bits", op, *sizes)
    if key not in group.agreed:
        facts = agreed_call.exchange(group, f"blocks of {op}", {"sizes": list(sizes)})
        found = [fact["sizes"] for fact in facts]
        if any(other != found[0] for other in found):
            raise ValueError(
                f"{op} with same_bits={group.same_bits} needs parts of one size on all ranks, got by rank {found}"
            )
        for size in sizes:
            canonical.panels(size, blocks)
        group.remember(key, None)


def linear(group: Group, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a contiguous matrix and this rank's rows of a weight."""
    blocks = blocks_of(group)
    if not blocks:
        return F.linear(x, weight, bias)
    return canonical.columns_of_product(x, weight.t(), bias, blocks)


def sinks_of(group: GroupLike | str, weights: Sequence[Tensor]) -> list[Sink | None]:
    """:func:`tpkernels.ops.main_grad.sinks_of`, for the context of a call with a gradient.

    Raises:
        UnsupportedProblem: a weight has a ``main_grad``.  Now, because a gradient is made while peers wait.
    """
    sinks = main_grad.sinks_of(weights)
    wanted = any(sink and weight.requires_grad for sink, weight in zip(sinks, weights, strict=True))
    if wanted and (same_bits := same_bits_of(group)):
        raise UnsupportedProblem(
            f"a weight's main_grad does not go with same_bits={same_bits}: what is in it already would be added "
            "within the GEMM"
        )
    return sinks


def weight_gradients(
    group: Group, dzs: Sequence[Tensor], x: Tensor, sinks: Sequence[Sink | None] | None, *, cut: str = "columns"
) -> list[Tensor | None]:
    """:func:`tpkernels.ops.main_grad.weight_gradients`; ``cut``: of the product, its "columns" or "contraction"."""
    blocks = blocks_of(group)
    if not blocks:
        return main_grad.weight_gradients(dzs, x, sinks)
    gradient = canonical.weight_gradient if cut == "columns" else canonical.weight_gradient_of_row
    with timeline.span("gemm of weight gradients", "gemm"):
        return [gradient(dz, x, blocks) for dz in dzs]


def bias_gradients(group: Group, dzs: Sequence[Tensor]) -> list[Tensor]:
    """The sums over rows of gradients whose columns are cut."""
    blocks = blocks_of(group)
    return [canonical.sum_of_rows(dz, blocks) if blocks else dz.sum(0) for dz in dzs]


def activated(group: Group, activation: str | None, products: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of products whose columns are cut, with a gradient."""
    if activation is None:
        return list(products)
    if blocks_of(group):
        of = [products] if activation in GATED else [[product] for product in products]
        return [_Activated.apply(group, activation, *some) for some in of]  # type: ignore[no-untyped-call]
    return _outputs(activation, products)


def preactivation_gradients(
    group: Group, activation: str | None, dys: Sequence[Tensor], before: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of the products from those of the outputs; ``before``: the products, where there is an activation."""
    if activation is None:
        return list(dys)
    blocks = blocks_of(group)
    if not blocks:
        return _gradients(activation, dys, before)
    of = [(*dys, *before)] if activation in GATED else list(zip(dys, before, strict=True))
    return [
        gradient
        for dy, *some in of
        for gradient in _by_panels(lambda dy, *z: _gradients(activation, [dy], z), blocks, dy, *some)
    ]


class _Activated(torch.autograd.Function):
    """One output of one product or of two, block by block in both directions."""

    @staticmethod
    def forward(ctx: Any, group: Group, activation: str, *products: Tensor) -> Tensor:
        ctx.group, ctx.activation = group, activation
        ctx.save_for_backward(*products)
        return _by_panels(lambda *z: _outputs(activation, z), blocks_of(group), *products)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *preactivation_gradients(ctx.group, ctx.activation, [dy], ctx.saved_tensors)


def _outputs(activation: str, products: Sequence[Tensor]) -> list[Tensor]:
    if activation in GATED:
        return [gate_forward(activation, *products)]
    return [activation_forward(activation, product) for product in products]


def _gradients(activation: str, dys: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    if activation in GATED:
        return [*gate_backward(activation, dys[0], *before)]
    return [activation_backward(activation, dy, z) for dy, z in zip(dys, before, strict=True)]


def _by_panels(function: Callable[..., list[Tensor]], blocks: int, *operands: Tensor) -> list[Tensor]:
    """An elementwise function; where a loop takes all elements of a block alike, as :func:`check_parts` says, at once:
    parts and what is put together of them are passes over memory."""
    shape = operands[0].shape
    if operands[0].numel() // blocks % VECTOR == 0:
        return function(*[operand.contiguous() for operand in operands])
    flat = [operand.reshape(-1, shape[-1]) for operand in operands]
    return [out.view(shape) for out in canonical.by_panels(function, blocks, *flat)]


def check_parts(group: GroupLike, y: Tensor, widths: Sequence[int] = (), *, by_rows: bool = False) -> None:
    """Refuse an output cut by columns behind which elementwise code may not give the same bits at every degree.

    A vectorised loop computes the last elements of a tensor, or with ``by_rows`` of each of its rows, in another way
    than the rest (in fp32 silu, sigmoid and gelu by tanh differ in the last bit, torch 2.13 with AVX-512), so there
    must be no last elements: a block of columns is a multiple of what a loop takes at once.  ``widths``: of this rank's
    blocks, where they are not all alike.

    Raises:
        ValueError: it is not.
    """
    same_bits = same_bits_of(group)
    if not same_bits:
        return
    rows = 1 if by_rows else y.shape[:-1].numel()
    widths = widths or (y.shape[-1] // (same_bits // group_size(group)),)
    count = next((rows * width for width in widths if rows * width % VECTOR), 0)
    if count:
        what = "a block of columns" if by_rows else "the rows times a block of columns"
        raise ValueError(
            f"same_bits={same_bits}: {what} of the output {tuple(y.shape)} must be a multiple of {VECTOR} elements, "
            f"got {count}: code behind it may compute the last ones of a tensor in another way, and which those are "
            "depends on the degree"
        )


def _linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    group_name: str,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    """Of a linear whose contraction is cut, from a gradient that all ranks have; one block is a whole GEMM."""
    group, dy2d = resolve(group_name), flat(dy)
    results: list[Tensor | None] = []
    if needs[0]:
        results.append(canonical.columns_of_product(dy2d, weight, None, blocks_of(group) or 1).view(x.shape))
    if needs[1]:
        results += weight_gradients(group, [dy2d], flat(x), sinks, cut="contraction")
    if needs[2]:
        results.append(dy2d.sum(0))
    return results


define("linear_backward_by_blocks", kernel=_linear_backward, fake=fake_of_linear)
