"""Differentiable collectives without a GEMM, and the two that only the backward pass communicates in.

====================  ==============================  =========================================================
function              forward, on rank r              backward
====================  ==============================  =========================================================
``all_gather``        y = concat(x_0, ..., x_{W-1})   dx_r = (sum over ranks of dy)[r], or dy[r] if replicated
``reduce_scatter``    y_r = (x_0 + ... )[r]           dx = concat(dy_0, ...)
``all_reduce``        y = x_0 + ... + x_{W-1}         dx = dy (every rank continues with the same y)
``copy_to_group``     y = x                           dx = sum over ranks of dy
``shard``             y_r = x[r]                      dx = concat(dy_0, ...)
====================  ==============================  =========================================================

Sums run over ranks in rank order in fp32 (fp64 for fp64) and round once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, GroupLike, group_name, group_size, process_group, resolve
from tpkernels.ops import agreed_call
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.checks import DTYPES, check_dim, check_local, check_shard_sizes
from tpkernels.ops.contract import AllGather, AllReduce, ReduceScatter
from tpkernels.ops.plain_calls import is_plain
from tpkernels.ops.registration import call, define
from tpkernels.ops.shapes import (
    flat,
    fresh,
    gather_layout,
    gathered_shape,
    rows_layout,
    scatter_layout,
    shard_shape,
)
from tpkernels.partition import Layout, array_split_sizes, offsets

__all__ = ["all_gather", "all_reduce", "copy_to_group", "reduce_scatter", "shard", "start_gather"]


def all_gather(
    x: Tensor,
    group: GroupLike,
    *,
    dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    replicated_grad: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """y = concat over ranks of ``x`` along ``dim``.

    Args:
        shard_sizes: size of every rank's shard along ``dim``; needed, on every rank, when they are not all equal.
        replicated_grad: every rank continues with the same y and computes the same gradient for it, so that the
            backward pass takes this rank's slice.  By default ranks use y differently, and their gradients are summed.
        implementation: "auto", or the name of one (see :func:`tpkernels.explain`), which also runs the backward pass.

    Examples:
        >>> tpk.all_gather(torch.ones(2, 3), mesh["tp"]).shape
        torch.Size([4, 3])

    Raises:
        ValueError, GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.
    """
    check_local(group, x=[x])
    if group_size(group) == 1:
        return _same(x)
    sizes = None if shard_sizes is None else list(shard_sizes)
    y: Tensor = call("all_gather", x, group_name(group), dim, sizes, replicated_grad, implementation)
    return y


def reduce_scatter(
    x: Tensor,
    group: GroupLike,
    *,
    dim: int = 0,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Tensor:
    """y_r = shard r along ``dim`` of the sum over ranks of ``x``; the default cut is ``numpy.array_split``'s.

    Examples:
        >>> tpk.reduce_scatter(torch.ones(4, 3), mesh["tp"])
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    check_local(group, x=[x])
    if group_size(group) == 1:
        return _same(x)
    sizes = None if shard_sizes is None else list(shard_sizes)
    y: Tensor = call("reduce_scatter", x, group_name(group), dim, sizes, implementation)
    return y


def all_reduce(x: Tensor, group: GroupLike, *, implementation: str = "auto") -> Tensor:
    """y = sum over ranks of ``x``, equal bit for bit everywhere; the gradient of y must be equal everywhere, too.

    Examples:
        >>> tpk.all_reduce(torch.ones(3), mesh["tp"])
        tensor([2., 2., 2.])
    """
    if is_plain(x):
        state = resolve(group)
        return _same(x) if state.size == 1 else _run_all_reduce(state, x, implementation)
    check_local(group, x=[x])
    if group_size(group) == 1:
        return _same(x)
    y: Tensor = call("all_reduce", x, group_name(group), implementation)
    return y


def copy_to_group(x: Tensor, group: GroupLike) -> Tensor:
    """y = x for a replicated ``x`` that the ranks go on to use differently; the gradient is summed over the group.

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> tpk.copy_to_group(x, mesh["tp"]).sum().backward()
        >>> x.grad
        tensor([2., 2., 2.])
    """
    check_local(None, x=[x])
    if group_size(group) == 1:
        return _same(x)
    y: Tensor = call("copy_to_group", x, group_name(group))
    return y


def shard(x: Tensor, group: GroupLike, *, dim: int = 0, shard_sizes: Sequence[int] | None = None) -> Tensor:
    """y_r = this rank's slice of a replicated ``x``; the gradient is gathered.

    Examples:
        >>> tpk.shard(torch.ones(5, 3), mesh["tp"], shard_sizes=(4, 1)).shape[0] == (4, 1)[rank]
        True
    """
    check_local(None, x=[x])
    if group_size(group) == 1:
        return _same(x)
    sizes = None if shard_sizes is None else list(shard_sizes)
    y: Tensor = call("shard", x, group_name(group), dim, sizes)
    return y


def _same(x: Tensor) -> Tensor:
    """What one rank gives for ``x``: a copy, because with more ranks a result can be written to without changing x."""
    return x.clone(memory_format=torch.contiguous_format)


def _check(op: str, x: Tensor, dim: int, implementation: str = "auto") -> int:
    if op in dispatch.OPS:
        dispatch.check_name(op, implementation)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least 1 dimension")
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: x must be one of {[str(d) for d in DTYPES]}, got {x.dtype}")
    return check_dim("dim", dim, x.dim())


def _sizes(
    op: str,
    x: Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    name: str,
    *,
    gather: bool,
    implementation: str = "auto",
) -> tuple[int, list[int]]:
    """Checked dim and sizes of all ranks' shards."""
    dim = _check(op, x, dim, implementation)
    pg = process_group(name)
    size = pg.size()
    if gather:
        check_shard_sizes(sizes, size, own=(pg.rank(), x.shape[dim]))
        return dim, list(sizes) if sizes is not None else [x.shape[dim]] * size
    check_shard_sizes(sizes, size, total=x.shape[dim])
    return dim, list(sizes if sizes is not None else array_split_sizes(x.shape[dim], size))


def _as_rows(x: Tensor) -> Tensor:
    """A vector is a column of rows; everything else has its features last."""
    return x.unsqueeze(-1) if x.dim() == 1 else x


def _all_gather(
    x: Tensor,
    group_name: str,
    dim: int,
    shard_sizes: list[int] | None,
    replicated_grad: bool,
    implementation: str = "auto",
) -> Tensor:
    group = resolve(group_name)
    try:
        dim, sizes = _sizes("all_gather", x, dim, shard_sizes, group_name, gather=True, implementation=implementation)
    except ValueError as error:
        agreement.refuse(group, "all_gather", str(error))
        raise
    rows = _as_rows(x)
    layout = gather_layout(rows, dim, sizes, group.size)
    whole = start_gather(group, flat(rows), layout, implementation, at_once=True)()
    return fresh(whole, gathered_shape(x, dim, layout))


def _all_gather_fake(
    x: Tensor, name: str, dim: int, sizes: list[int] | None, replicated_grad: bool, implementation: str = "auto"
) -> Tensor:
    dim, sizes = _sizes("all_gather", x, dim, sizes, name, gather=True, implementation=implementation)
    return x.new_empty(shard_shape(x, dim, sum(sizes)))


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, name, dim, sizes, replicated_grad, implementation = inputs
    sizes = sizes if sizes is not None else [x.shape[dim]] * process_group(name).size()
    ctx.settings = (name, dim % x.dim(), sizes, replicated_grad, implementation)


def _all_gather_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    name, dim, sizes, replicated_grad, implementation = ctx.settings
    if replicated_grad:
        dx = torch.ops.tpkernels.shard(dy, name, dim, sizes)
    else:
        dx = torch.ops.tpkernels.reduce_scatter(dy, name, dim, sizes, implementation)
    return (dx,)


def start_gather(
    group: Group,
    x2d: Tensor,
    layout: Layout,
    implementation: str,
    detail: str = "",
    *,
    at_once: bool = False,
    dtype: torch.dtype | None = None,
) -> Callable[[], Tensor]:
    """Post an all-gather; returns the function that waits for it.  See :class:`~tpkernels.ops.contract.AllGather`.

    ``detail``: what else the ranks must have in common.  ``at_once``: the function is called next.  ``dtype``: another
    one of as many bytes, whose costs the ranks know.
    """
    dtype = dtype or x2d.dtype
    signature = Signature("all_gather", dtype, x2d.device.type, layout, x2d.shape[1], implementation, detail)
    if layout.feature:
        signature = signature._replace(columns=sum(layout.sizes))
    arguments = AllGather(x2d, layout)
    finish = agreed_call.start(group, signature, 0, arguments, x2d.device, at_once=at_once)
    return cast(Callable[[], Tensor], finish)


def _reduce_scatter(
    x: Tensor, group_name: str, dim: int, shard_sizes: list[int] | None, implementation: str = "auto"
) -> Tensor:
    group = resolve(group_name)
    try:
        dim, sizes = _sizes(
            "reduce_scatter", x, dim, shard_sizes, group_name, gather=False, implementation=implementation
        )
    except ValueError as error:
        agreement.refuse(group, "reduce_scatter", str(error))
        raise
    rows = _as_rows(x)
    layout = scatter_layout(rows.shape, dim, sizes, group.size)
    signature = Signature("reduce_scatter", x.dtype, x.device.type, layout, rows.shape[-1], implementation)
    y = agreed_call.run(group, signature, 0, ReduceScatter(flat(rows), layout), x.device)
    return fresh(y, shard_shape(x, dim, sizes[group.rank]))


def _scatter_fake(op: str) -> Any:
    def fake(x: Tensor, name: str, dim: int, sizes: list[int] | None, implementation: str = "auto") -> Tensor:
        pg = process_group(name)
        dim, sizes = _sizes(op, x, dim, sizes, name, gather=False, implementation=implementation)
        return x.new_empty(shard_shape(x, dim, sizes[pg.rank()]))

    return fake


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, name, dim, sizes, *implementation = inputs
    size = process_group(name).size()
    sizes = list(sizes if sizes is not None else array_split_sizes(x.shape[dim], size))
    ctx.settings = (name, dim % x.dim(), sizes, False, *implementation)


def _gather_gradient(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return (torch.ops.tpkernels.all_gather(dy, *ctx.settings),)


def _all_reduce(x: Tensor, group_name: str, implementation: str = "auto") -> Tensor:
    return _run_all_reduce(resolve(group_name), x, implementation)


def _run_all_reduce(group: Group, x: Tensor, implementation: str) -> Tensor:
    rows = flat(_as_rows(x)) if x.dim() else x  # refused below

    def check() -> Signature:
        _check("all_reduce", x, 0, implementation)
        layout = rows_layout(rows.shape[0], group.size)
        return Signature("all_reduce", x.dtype, x.device.type, layout, rows.shape[1], implementation)

    facts = agreed_call.facts_of("all_reduce", implementation, x)
    checked = agreed_call.checked_call(group, facts, "all_reduce", check)
    return fresh(agreed_call.run_checked(group, checked, 0, AllReduce(rows), x.device), x.shape)


def _contiguous_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _name_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.name = inputs[1]


def _copy(x: Tensor, group_name: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _shard(x: Tensor, group_name: str, dim: int, shard_sizes: list[int] | None) -> Tensor:
    pg = process_group(group_name)
    dim, sizes = _sizes("shard", x, dim, shard_sizes, group_name, gather=False)
    start = offsets(sizes)[pg.rank()]
    return x.narrow(dim, start, sizes[pg.rank()]).clone(memory_format=torch.contiguous_format)


define(
    "all_gather",
    kernel=_all_gather,
    fake=_all_gather_fake,
    backward=_all_gather_backward,
    setup_context=_all_gather_setup,
)
define(
    "reduce_scatter",
    kernel=_reduce_scatter,
    fake=_scatter_fake("reduce_scatter"),
    backward=_gather_gradient,
    setup_context=_scatter_setup,
)
define(
    "all_reduce",
    kernel=_all_reduce,
    fake=_contiguous_like,
    backward=lambda ctx, dy: (dy,),
    setup_context=_name_setup,
)
define(
    "copy_to_group",
    kernel=_copy,
    fake=_contiguous_like,
    backward=lambda ctx, dy: (torch.ops.tpkernels.all_reduce(dy, ctx.name),),
    setup_context=_name_setup,
)
define(
    "shard",
    kernel=_shard,
    fake=_scatter_fake("shard"),
    backward=_gather_gradient,
    setup_context=_scatter_setup,
)
