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
from tpkernels.ops import calling
from tpkernels.ops.calling import Signature
from tpkernels.ops.checks import check_common, check_dim, check_local, check_shard_sizes, check_weights, plain_linear
from tpkernels.ops.contract import AllGatherMatmul, Gathered, MatmulReduceScatter
from tpkernels.ops.main_grad import Sink, sink_of, weight_gradients
from tpkernels.ops.registration import call, call_backward, define
from tpkernels.ops.residual_norm import add_norm, matmul_reduce_scatter_norm, wanted
from tpkernels.ops.scaled_matmul import scaled_matmul_reduce_scatter
from tpkernels.ops.shapes import flat, fresh, start_gather
from tpkernels.partition import Layout, array_split_sizes

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
            scales of its own slice of K.  Partials travel in ``out_dtype``.
        scatter_dim: the dimension of the product that is cut over the ranks; the last one scatters features (N).
        shard_sizes: size of every rank's shard; default ``numpy.array_split`` (10 rows over 3 ranks: 4, 3, 3).
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    The gradients of ``bias`` and ``norm_weight`` are the full ones on every rank, so they need no further reduction;
    that of ``norm_weight`` costs an all-reduce of its size.

    Raises:
        ValueError, UnsupportedProblem, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: as
        :func:`tpkernels.all_gather_matmul`.
    """
    check_local("x", x, group=group)
    check_local("weight", weight, group=group)
    check_local("bias", bias, group=group)
    if wanted(group, residual, norm_weight, eps):
        assert residual is not None and norm_weight is not None
        if scale_x is None and scale_weight is None and out_dtype is None and group_size(group) > 1:
            return matmul_reduce_scatter_norm(
                x, weight, bias, residual, norm_weight, eps, group, scatter_dim, shard_sizes, implementation
            )
        y = matmul_reduce_scatter(
            x, weight, group, bias=bias, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype,
            scatter_dim=scatter_dim, shard_sizes=shard_sizes, implementation=implementation,
        )  # fmt: skip
        return add_norm(y, residual, norm_weight, eps)
    if scale_x is not None or scale_weight is not None or out_dtype is not None:
        return scaled_matmul_reduce_scatter(
            x, weight, bias, group, scale_x=scale_x, scale_weight=scale_weight, out_dtype=out_dtype,
            scatter_dim=scatter_dim, shard_sizes=shard_sizes, implementation=implementation,
        )  # fmt: skip
    if group_size(group) == 1:
        check_common("matmul_reduce_scatter", x, implementation)
        dim = check_dim("scatter_dim", scatter_dim, x.dim())
        y = plain_linear(x, weight, bias)
        check_shard_sizes(shard_sizes, 1, total=y.shape[dim])
        return y
    return cast(
        Tensor,
        call(
            "matmul_reduce_scatter",
            x,
            weight,
            bias,
            group_name(group),
            scatter_dim,
            None if shard_sizes is None else list(shard_sizes),
            implementation,
        ),
    )


def scatter_layout(shape: Sequence[int], dim: int, sizes: Sequence[int] | None, group_size: int) -> Layout:
    """Layout of a whole of ``shape`` that is cut along ``dim``; without sizes as evenly as possible."""
    return Layout.of(shape, dim, sizes if sizes is not None else array_split_sizes(shape[dim], group_size))


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: int,
    dim: int,
    sizes: Sequence[int] | None,
    implementation: str,
) -> tuple[int, Layout]:
    check_common("matmul_reduce_scatter", x, implementation)
    dim = check_dim("scatter_dim", dim, x.dim())
    check_weights(x, x.shape[-1], [weight], [bias])
    product = [*x.shape[:-1], weight.shape[0]]
    check_shard_sizes(sizes, size, total=product[dim])
    return dim, scatter_layout(product, dim, sizes, size)


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    name: str,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    implementation: str,
) -> Tensor:
    group = resolve(name)
    try:
        dim, layout = _check(x, weight, bias, group.size, scatter_dim, shard_sizes, implementation)
    except ValueError as error:
        agreement.refuse(group, "matmul_reduce_scatter", str(error))
        raise
    columns = weight.shape[0]
    if bias is not None and layout.feature:
        low, high = layout.columns(group.rank)
        bias = bias[low:high]
    arguments = MatmulReduceScatter([flat(x)], [weight.t()], layout, bias)
    signature = Signature("matmul_reduce_scatter", x.dtype, x.device.type, layout, columns, implementation)
    y = cast(Tensor, calling.run(group, signature, x.shape[-1], arguments, x.device))
    return fresh(y, _out_shape(x, weight, dim, layout, group.rank))


def _out_shape(x: Tensor, weight: Tensor, dim: int, layout: Layout, rank: int) -> list[int]:
    shape = [*x.shape[:-1], weight.shape[0]]
    shape[dim] = layout.sizes[rank]
    return shape


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    name: str,
    scatter_dim: int,
    shard_sizes: list[int] | None,
    implementation: str,
) -> Tensor:
    pg = process_group(name)
    dim, layout = _check(x, weight, bias, pg.size(), scatter_dim, shard_sizes, implementation)
    return x.new_empty(_out_shape(x, weight, dim, layout, pg.rank()))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, name, scatter_dim, shard_sizes, implementation = inputs
    ctx.save_for_backward(x, weight)
    dim = scatter_dim % x.dim()
    total = weight.shape[0] if dim == x.dim() - 1 else x.shape[dim]
    sizes = shard_sizes if shard_sizes is not None else list(array_split_sizes(total, process_group(name).size()))
    ctx.settings = (name, dim, sizes, implementation)
    ctx.sinks = [sink_of(weight)]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    arguments = (dy, *ctx.saved_tensors, *ctx.settings, needs)
    results = list(call_backward("matmul_reduce_scatter_backward", ctx.sinks, *arguments))
    grads = [results.pop(0) if need else None for need in needs]
    return (*grads, None, None, None, None)


def _backward_kernel(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    dim: int,
    sizes: list[int],
    implementation: str,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] | None = None,
) -> list[Tensor | None]:
    group = resolve(name)
    layout = Layout.of(dy.shape, dim, sizes)
    dy2d = flat(dy)
    needs_x, needs_w, needs_b = needs
    results: list[Tensor | None] = []
    whole: Tensor | None = None
    if needs_x:
        columns = sum(sizes) if layout.feature else dy2d.shape[1]
        arguments = AllGatherMatmul(dy2d, layout, [weight], [None], None, needs_w or needs_b)
        signature = Signature(
            "all_gather_matmul", x.dtype, x.device.type, layout, columns, implementation, "gradient of a scatter"
        )
        gathered = cast(Gathered, calling.run(group, signature, weight.shape[1], arguments, x.device))
        results.append(gathered.outs[0].view(x.shape))
        whole = gathered.whole
    elif needs_w or needs_b:
        whole = start_gather(group, dy2d, layout, "auto")()
    if needs_w:
        assert whole is not None
        results += weight_gradients([whole], flat(x), sinks)
    if needs_b:
        assert whole is not None
        results.append(whole.sum(0))
    return results


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    name: str,
    dim: int,
    sizes: list[int],
    implementation: str,
    needs: list[bool],
) -> list[Tensor]:
    results = [x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(weight.shape[0])]
    return [result for result, need in zip(results, needs, strict=True) if need]


define(
    "matmul_reduce_scatter",
    "(Tensor x, Tensor weight, Tensor? bias, str group_name, int scatter_dim, SymInt[]? shard_sizes, "
    "str implementation) -> Tensor",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define(
    "matmul_reduce_scatter_backward",
    "(Tensor dy, Tensor x, Tensor weight, str group_name, int dim, SymInt[] sizes, str implementation, "
    "bool[] needs) -> Tensor[]",
    kernel=_backward_kernel,
    fake=_backward_fake,
)
