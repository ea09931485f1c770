"""GEMMs on a mesh of two axes: activations cut over X by features, weights cut over both X and Y.

Y is an axis of data parallelism: its ranks hold other rows, and share the weights' storage.  Forward, on rank (y, x)::

    gather_both_matmul       out = gather_X(x, features) @ gather_Y(w) + b         both gathers along the contraction
    gather_matmul_scatter    out = reduce_scatter_X(u @ gather_Y(w), features) + b    w gathered along the product

Backward, of either: the input's gradient is the other one; that of the weight is a GEMM and a reduce-scatter over Y,
which adds up what the rows of all y contribute.  b's is the sum over this rank's rows.

How each transfer meets a GEMM.  The weight is cut into slices that are gathered one after another over Y, the next one
while the GEMM of the last one runs; x is gathered over X within the first slice's GEMM, the product is scattered over X
slice by slice within each one's GEMM, and dw is scattered over Y within its own.  Only the first slice of a weight has
no GEMM before it.

Matrices of one rank, M rows, contraction K, product N::

    gather_both_matmul       x [M, K_x]    w [N, K_y] or [K_y, N]    out [M, N]
    gather_matmul_scatter    u [M, K]      w [N_y, K] or [K, N_y]    out [M, N_x]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, process_group, resolve
from tpkernels.comm.same_bits import refuse
from tpkernels.errors import CommunicationError
from tpkernels.ops import agreed_call
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.checks import check_common, check_weights
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.contract import AllGatherMatmul, Gathered, MatmulReduceScatter
from tpkernels.ops.gradients import of_linear
from tpkernels.ops.main_grad import Sink, sink_of
from tpkernels.ops.registration import define
from tpkernels.ops.shapes import flat, fresh
from tpkernels.partition import Layout, chunk_ranges, offsets

__all__ = ["Cut"]


class Cut(NamedTuple):
    """What a call of either op says beside its tensors."""

    x_group: str
    y_group: str
    w_dim: int
    """The dimension of the weight that is cut over Y: the contraction, or the product."""
    x_sizes: list[int]
    """Features of each rank of X: of x, or of the product."""
    y_sizes: list[int]
    """Sizes of the weight's ``w_dim`` on each rank of Y."""
    num_slices: int
    implementation: str

    def layout(self, rows: int) -> Layout:
        """Features over X of a matrix of so many rows."""
        return Layout(rows, tuple(self.x_sizes), 1, feature=True)


def _gather_weight(group: Group, part: Tensor, dim: int, sizes: Sequence[int]) -> Callable[[], Tensor]:
    """Post the gather of a slice of the weight over Y; returns the wait, which gives ``[contraction, columns]``."""
    if group.size == 1:
        return lambda: part
    part = part.contiguous()
    return start_gather(group, part, Layout.of(part.shape, dim, sizes), "auto", "a slice of a weight on a mesh")


def gather_both(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, keep: bool) -> tuple[Tensor, Tensor]:
    """gather_X(x) @ gather_Y(weight) + bias of 2-D x, and with ``keep`` the gathered x."""
    x_group, y_group, free = resolve(cut.x_group), resolve(cut.y_group), 1 - cut.w_dim
    columns = weight.shape[free]
    ranges = [part for part in chunk_ranges(columns, cut.num_slices) if part[0] < part[1]] or [(0, 0)]

    def post(number: int) -> Callable[[], Tensor]:
        low, high = ranges[number]
        return _gather_weight(y_group, weight.narrow(free, low, high - low), cut.w_dim, cut.y_sizes)

    out, whole, following = None, x, post(0)
    for number, (low, high) in enumerate(ranges):
        current = following
        if number + 1 < len(ranges):
            following = post(number + 1)
        matrix = current() if cut.w_dim == 0 else current().t()
        part_bias = None if bias is None else bias[low:high]
        if number == 0:
            keep_whole = keep or len(ranges) > 1
            first, whole = _gather_matmul(x_group, x, matrix, part_bias, cut, keep_whole)
            if len(ranges) == 1:
                return first, whole
            out = x.new_empty(x.shape[0], columns)
            out[:, low:high] = first
        else:
            assert out is not None
            _multiply(whole, matrix, part_bias, out[:, low:high])
    assert out is not None
    return out, whole


def _gather_matmul(
    group: Group, x: Tensor, matrix: Tensor, bias: Tensor | None, cut: Cut, keep: bool
) -> tuple[Tensor, Tensor]:
    if group.size == 1:
        return _multiply(x, matrix, bias), x
    layout = cut.layout(x.shape[0])
    arguments = AllGatherMatmul(x, layout, [matrix], [bias], None, keep)
    signature = _signature("all_gather_matmul", x, layout, sum(cut.x_sizes), cut.implementation)
    gathered = cast(Gathered, agreed_call.run(group, signature, matrix.shape[1], arguments, x.device))
    return gathered.outs[0], cast(Tensor, gathered.whole) if keep else x


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, matrix, out=out)
    return torch.addmm(bias, x, matrix, out=out)


def gather_and_scatter(u: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """reduce_scatter_X(u @ gather_Y(weight)) + bias of 2-D u."""
    x_group, y_group = resolve(cut.x_group), resolve(cut.y_group)
    parts = [chunk_ranges(size, cut.num_slices) for size in cut.y_sizes]
    slices = [[part[number] for part in parts] for number in range(cut.num_slices)]
    slices = [ranges for ranges in slices if any(low < high for low, high in ranges)] or slices[:1]

    def post(ranges: Sequence[tuple[int, int]]) -> Callable[[], Tensor]:
        low, high = ranges[y_group.rank]
        part = weight.narrow(cut.w_dim, low, high - low)
        return _gather_weight(y_group, part, cut.w_dim, [stop - start for start, stop in ranges])

    out = u.new_empty(u.shape[0], cut.x_sizes[x_group.rank])
    following = post(slices[0])
    for number, ranges in enumerate(slices):
        current = following
        if number + 1 < len(slices):
            following = post(slices[number + 1])
        matrix = current().t() if cut.w_dim == 0 else current()
        columns = [
            _Columns(start + low, start + high) for start, (low, high) in zip(offsets(cut.y_sizes), ranges, strict=True)
        ]
        owners = [_Columns(start, start + size) for start, size in zip(offsets(cut.x_sizes), cut.x_sizes, strict=True)]
        own = [run for run in (part.within(owners[x_group.rank]) for part in columns) if len(run)]
        part_bias = None
        if bias is not None:
            part_bias = torch.cat([bias[run.start : run.stop] for run in own]) if own else bias[:0]
        sizes = [sum(len(part.within(owner)) for part in columns) for owner in owners]
        product = _matmul_scatter(x_group, u, matrix, part_bias, sizes, cut.implementation)
        if len(slices) == 1:
            return product
        done = 0
        for run in own:
            out[:, run.start : run.stop] = product[:, done : done + len(run)]
            done += len(run)
    return out


class _Columns(NamedTuple):
    """A run of columns of the product."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def within(self, owner: _Columns) -> _Columns:
        """What of it the owner has, counted from the owner's first column."""
        low, high = max(self.start, owner.start), min(self.stop, owner.stop)
        return _Columns(low - owner.start, max(low, high) - owner.start)


def _matmul_scatter(
    group: Group, u: Tensor, matrix: Tensor, bias: Tensor | None, sizes: Sequence[int], implementation: str
) -> Tensor:
    if group.size == 1:
        return _multiply(u, matrix, bias)
    layout = Layout(u.shape[0], tuple(sizes), 1, feature=True)
    signature = _signature("matmul_reduce_scatter", u, layout, matrix.shape[1], implementation)
    arguments = MatmulReduceScatter([u], [matrix], layout, bias)
    return cast(Tensor, agreed_call.run(group, signature, u.shape[1], arguments, u.device))


def weight_gradient(rows: Tensor, columns: Tensor, cut: Cut, sink: Sink | None) -> Tensor | None:
    """rows^T @ columns, summed over Y and cut along ``w_dim``: the gradient of a weight ``[rows, columns]``."""
    group = resolve(cut.y_group)
    left = rows.t().contiguous()
    if group.size == 1:
        total = torch.mm(left, columns)
    else:
        shape = (left.shape[0], columns.shape[1])
        layout = Layout.of(shape, cut.w_dim, cut.y_sizes)
        signature = _signature("matmul_reduce_scatter", left, layout, shape[1], cut.implementation)
        arguments = MatmulReduceScatter([left], [columns], layout)
        total = cast(Tensor, agreed_call.run(group, signature, left.shape[1], arguments, left.device))
    if sink is None:
        return total
    sink.main_grad.add_(total)
    return sink.added(total.dtype)


def _signature(op: str, x: Tensor, layout: Layout, columns: int, implementation: str) -> Signature:
    return Signature(op, x.dtype, x.device.type, layout, columns, implementation, "on a mesh")


# --- the ops ----------------------------------------------------------------------------------------------------------


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, contraction: int) -> None:
    """Arguments of this rank; its peers on both axes hear of a refusal."""
    x_group, y_group = resolve(cut.x_group), resolve(cut.y_group)
    try:
        check_common("all_gather_matmul", x, cut.implementation)
        if x.shape[-1] != contraction:
            raise ValueError(f"{op}: x must have {contraction} features on this rank, got shape {tuple(x.shape)}")
        if weight.dim() != 2 or weight.shape[cut.w_dim] != cut.y_sizes[y_group.rank]:
            raise ValueError(
                f"{op}: weight must have size {cut.y_sizes[y_group.rank]} in dimension {cut.w_dim}, "
                f"got shape {tuple(weight.shape)}"
            )
        check_weights(x, weight.shape[1], [weight], [None])  # its dtype and device
        if bias is not None and bias.dtype != x.dtype:
            raise ValueError(f"{op}: bias must have the dtype of x ({x.dtype}), got {bias.dtype}")
    except ValueError as error:
        for group in (x_group, y_group):
            if group.size > 1:
                agreement.refuse(group, op, str(error))
        raise


@contextmanager
def _both_axes(cut: Cut) -> Iterator[None]:
    """A failure on one axis is one on the other, whose ranks would wait for this one there."""
    try:
        yield
    except CommunicationError as error:
        for group in (resolve(cut.x_group), resolve(cut.y_group)):
            if group.size > 1 and group.key is None:  # not met yet, so there is no store to leave a note in
                agreement.refuse(group, "a GEMM on a mesh", str(error))
            if group.size > 1:
                agreement.fail(group, error)
        raise


def _both_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    refuse(cut.x_group, "gather_both_matmul", "a GEMM on a mesh is cut in no blocks")
    _check("gather_both_matmul", x, weight, bias, cut, cut.x_sizes[resolve(cut.x_group).rank])
    with _both_axes(cut):
        out = gather_both(flat(x), weight, bias, cut, False)[0]
    return fresh(out, (*x.shape[:-1], out.shape[1]))


def _both_fake(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1 - cut.w_dim])


def _scatter_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    refuse(cut.x_group, "gather_matmul_scatter", "a GEMM on a mesh is cut in no blocks")
    _check("gather_matmul_scatter", x, weight, bias, cut, weight.shape[1 - cut.w_dim])
    with _both_axes(cut):
        out = gather_and_scatter(flat(x), weight, bias, cut)
    return fresh(out, (*x.shape[:-1], out.shape[1]))


def _scatter_fake(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    return x.new_empty(*x.shape[:-1], cut.x_sizes[process_group(cut.x_group).rank()])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *cut = inputs
    ctx.save_for_backward(x, weight)
    ctx.cut = Cut(*cut)
    ctx.sinks = [sink_of(weight)]


def _backward(op: str) -> Callable[..., tuple[Any, ...]]:
    return lambda ctx, dout: tuple(of_linear(ctx, op, dout, *ctx.saved_tensors, ctx.cut))


def _both_backward(
    dout: Tensor, x: Tensor, weight: Tensor, cut: Cut, needs: list[bool], *, sinks: Sequence[Sink | None] = (None,)
) -> list[Tensor | None]:
    needs_x, needs_w, needs_b = needs
    dz, x2d, x_group = flat(dout), flat(x), resolve(cut.x_group)
    pending: Callable[[], Tensor] = lambda: x2d  # noqa: E731
    results: list[Tensor | None] = []
    with _both_axes(cut):
        if needs_w and x_group.size > 1:
            pending = start_gather(x_group, x2d, cut.layout(x2d.shape[0]), "auto")
        if needs_x:
            results.append(gather_and_scatter(dz, weight, None, cut).view(x.shape))
        if needs_w:
            rows, columns = (dz, pending()) if cut.w_dim == 1 else (pending(), dz)
            results.append(weight_gradient(rows, columns, cut, sinks[0]))
    return [*results, dz.sum(0)] if needs_b else results


def _scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, cut: Cut, needs: list[bool], *, sinks: Sequence[Sink | None] = (None,)
) -> list[Tensor | None]:
    needs_x, needs_w, needs_b = needs
    dz, x2d, x_group = flat(dout), flat(x), resolve(cut.x_group)
    results: list[Tensor | None] = []
    whole = dz
    with _both_axes(cut):
        if needs_x:
            dx, whole = gather_both(dz, weight, None, cut, needs_w)
            results.append(dx.view(x.shape))
        elif needs_w and x_group.size > 1:
            whole = start_gather(x_group, dz, cut.layout(dz.shape[0]), "auto", at_once=True)()
        if needs_w:
            rows, columns = (whole, x2d) if cut.w_dim == 0 else (x2d, whole)
            results.append(weight_gradient(rows, columns, cut, sinks[0]))
    return [*results, dz.sum(0)] if needs_b else results


def _backward_fake(dout: Tensor, x: Tensor, weight: Tensor, cut: Cut, needs: list[bool]) -> list[Tensor]:
    results = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x, weight)]
    results.append(x.new_empty(dout.shape[-1]))
    return [result for result, need in zip(results, needs, strict=True) if need]


for _op, _forward, _fake, _gradient in (
    ("gather_both_matmul", _both_kernel, _both_fake, _both_backward),
    ("gather_matmul_scatter", _scatter_kernel, _scatter_fake, _scatter_backward),
):
    define(
        _op,
        kernel=_forward,
        fake=_fake,
        backward=_backward(f"{_op}_backward"),
        setup_context=_setup_context,
        autocast=True,
    )
    define(f"{_op}_backward", kernel=_gradient, fake=_backward_fake)
