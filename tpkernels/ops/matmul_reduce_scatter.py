"""``matmul_reduce_scatter``: multiply this rank's slice of K, sum over the ranks, keep one shard of the sum.

Forward, on rank r of W (x by its last dimension, w by its columns)::

    p_r = x_r @ w_r^T                         [M, N]   this rank's partial
    y_r = (p_0 + ... + p_{W-1})[r] + b        [M/W, N] summed in rank order in fp32, rounded once

Backward::

    dx_r = all_gather(dy) @ w_r               the dual: all_gather_matmul, local shard first
    dw_r = all_gather(dy)^T @ x_r
    db   = sum over all rows of all_gather(dy), the full gradient on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, group_size, process_group, resolve
from tpkernels.comm.same_bits import refuse, same_bits_of
from tpkernels.ops import agreed_call, same_bits
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.checks import (
    check_common,
    check_dim,
    check_local,
    check_scatter,
    check_shard_sizes,
    check_weights,
    plain_linear,
)
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import AllGatherMatmul, Gathered, MatmulReduceScatter
from tpkernels.ops.gradients import fake_of_linear, of_linear
from tpkernels.ops.main_grad import Sink
from tpkernels.ops.options import Scatter
from tpkernels.ops.registration import call, define
from tpkernels.ops.residual_norm import Norm, add_norm, wanted
from tpkernels.ops.scaled_matmul import ScaledScatter, scaled_reduction
from tpkernels.ops.shapes import flat, fresh, scatter_layout
from tpkernels.partition import Layout

__all__ = ["matmul_reduce_scatter"]


@overload
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: GroupLike,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Tensor: ...


@overload
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: GroupLike,
    *,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float | None = None,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: GroupLike,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scatter_dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply, sum over the group and keep this rank's shard; remote owners' rows leave while the rest is computed.

    Unfused equation::

        y = reduce_scatter(x @ weight^T, scatter_dim) + bias

    and with ``residual`` and ``norm_weight``, which are given together, ``(normed, sums)``::

        sums   = y + residual
        normed = rms_norm(sums, norm_weight, eps)

    =============  =============================================  ==================================================
    argument       shape                                          notes
    =============  =============================================  ==================================================
    ``x``          ``[..., M, ..., K_r]``                         fp32, bf16, fp16, fp64, or fp8 (e4m3); any strides
    ``weight``     ``[N, K_r]``                                   this rank's columns; K_r may differ between ranks
    ``bias``       ``[N]`` or None                                equal on all ranks; added once, after the sum
    ``residual``   ``[..., shard_sizes[rank], ..., N]`` or None   this rank's rows of it
    ``norm_w...``  ``[N]`` or None                                equal on all ranks; ``eps``: as that of ``F.rms_norm``
    ``scale_x``    ``[..., M, ..., 1]`` or 1                      fp32, for fp8: per row of x, or one for all
    ``scale_w...`` ``[N, 1]`` or 1                                fp32, for fp8: per row of the weight, or one for all
    ``y``          ``[..., shard_sizes[rank], ..., N]``           contiguous; dtype of x, for fp8 ``out_dtype``
    =============  =============================================  ==================================================

    Args:
        scale_x, scale_weight, out_dtype: of fp8 operands, as in :func:`tpkernels.all_gather_matmul`; each rank has
            scales of its own slice of K, which are those of all of K with ``same_bits``.  Partials travel in
            ``out_dtype``.
        scatter_dim: the dimension of the product that is cut over the ranks; the last one scatters features (N).
        shard_sizes: size of every rank's shard; default ``numpy.array_split`` (10 rows over 3 ranks: 4, 3, 3).
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    The gradients of ``bias`` and ``norm_weight`` are the full ones on every rank, so they need no further reduction;
    that of ``norm_weight`` costs an all-reduce of its size.

    Examples:
        >>> x, weight = torch.ones(4, 8), torch.ones(3, 8)
        >>> tpk.matmul_reduce_scatter(x, weight, mesh["tp"])
        tensor([[16., 16., 16.],
                [16., 16., 16.]])

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_matmul`.
    """
    check_local(group, x=[x], weight=[weight], bias=[bias])
    sizes = None if shard_sizes is None else list(shard_sizes)
    pair = wanted(group, residual, norm_weight, eps)
    if pair is not None:
        refuse(
            group, "matmul_reduce_scatter with a residual", "each rank's gradient of norm_weight is a sum of its rows"
        )
    y: Tensor
    if scale_x is not None or scale_weight is not None or out_dtype is not None:
        scaled = ScaledScatter(group_name(group), out_dtype or torch.bfloat16, scatter_dim, sizes, implementation)
        y = scaled_reduction("scaled_matmul_reduce_scatter", x, weight, bias, scale_x, scale_weight, scaled)
    elif group_size(group) == 1 and not same_bits_of(group):
        check_common("matmul_reduce_scatter", x, implementation)
        dim = check_dim("scatter_dim", scatter_dim, x.dim())
        y = plain_linear(x, weight, bias)
        check_shard_sizes(shard_sizes, 1, total=y.shape[dim])
    else:
        options = Scatter(group_name(group), scatter_dim, sizes, implementation)
        if pair is not None:
            norm = Norm.of(*pair, eps)
            normed, sums, _ = call("matmul_reduce_scatter_norm", x, weight, bias, norm, options)
            return normed, sums
        y = call("matmul_reduce_scatter", x, weight, bias, options)
    return y if pair is None else add_norm(y, *pair, eps)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Scatter, rank: int, size: int
) -> tuple[list[int], Layout]:
    """The shape of this rank's result, and the layout of the whole."""
    check_common("matmul_reduce_scatter", x, options.implementation)
    check_weights(x, x.shape[-1], [weight], [bias])
    return check_scatter(x, weight, options.scatter_dim, options.shard_sizes, rank, size)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, options: Scatter) -> Tensor:
    group = resolve(options.group_name)
    try:
        shape, layout = _check(x, weight, bias, options, group.rank, group.size)
    except ValueError as error:
        agreement.refuse(group, "matmul_reduce_scatter", str(error))
        raise
    same_bits.agree_on_blocks(group, "matmul_reduce_scatter", [x.shape[-1]])
    columns = weight.shape[0]
    if bias is not None and layout.feature:
        low, high = layout.columns(group.rank)
        bias = bias[low:high]
    arguments = MatmulReduceScatter([flat(x)], [weight.t()], layout, bias)
    signature = Signature(
        "matmul_reduce_scatter", x.dtype, x.device.type, layout, columns, options.implementation, bias=bias is not None
    )
    return fresh(agreed_call.run(group, signature, x.shape[-1], arguments, x.device), shape)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, options: Scatter) -> Tensor:
    pg = process_group(options.group_name)
    return x.new_empty(_check(x, weight, bias, options, pg.rank(), pg.size())[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *options = inputs
    ctx.save_for_backward(x, weight)
    ctx.options = Scatter(*options)
    ctx.sinks = same_bits.sinks_of(ctx.options.group_name, [weight])


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return tuple(of_linear(ctx, "matmul_reduce_scatter_backward", dy, *ctx.saved_tensors, ctx.options))


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    options: Scatter,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(options.group_name)
    product = (*x.shape[:-1], weight.shape[0])
    layout = scatter_layout(product, options.scatter_dim, options.shard_sizes, group.size)
    dy2d = flat(dy)
    needs_x, needs_w, needs_b = needs
    results: list[Tensor | None] = []
    whole: Tensor | None = None
    if needs_x:
        columns = weight.shape[0]
        arguments = AllGatherMatmul(dy2d, layout, [weight], [None], None, needs_w or needs_b)
        signature = Signature(
            "all_gather_matmul", x.dtype, x.device.type, layout, columns, options.implementation,
            "gradient of a scatter",
        )  # fmt: skip
        gathered = cast(Gathered, agreed_call.run(group, signature, weight.shape[1], arguments, x.device))
        results.append(gathered.outs[0].view(x.shape))
        whole = gathered.whole
    elif needs_w or needs_b:
        whole = start_gather(group, dy2d, layout, "auto", at_once=True)()
    if needs_w:
        assert whole is not None
        results += same_bits.weight_gradients(group, [whole], flat(x), sinks, cut="contraction")
    if needs_b:
        assert whole is not None
        results.append(whole.sum(0))
    return results


define(
    "matmul_reduce_scatter",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define("matmul_reduce_scatter_backward", kernel=_backward_kernel, fake=fake_of_linear)
