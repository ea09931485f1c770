"""What an op does to a cut tensor: the same op on every rank's part gives the parts of which result?

It owns one rule for each kind of ATen op.  A rule sees the op as the whole model calls it and as one rank calls it, and
says how the result is cut, or raises :class:`Unproven`.  An op without a rule proves nothing.

It assumes that parts are cut as :class:`Split` says; :mod:`tpkernels.planning.replays.replay` checks every result's
local shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tpkernels.planning.replays.gate_rules import glu
from tpkernels.planning.replays.memory_rules import as_strided
from tpkernels.planning.replays.op_call import Answer, Call, pointwise
from tpkernels.planning.replays.picking_rules import gather, indexed, put, rows
from tpkernels.planning.replays.sampling_rules import grid_sample
from tpkernels.planning.splits import Split, Unproven, through_view

__all__ = ["RULES", "Call", "pointwise"]


def _dim(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def _view(call: Call) -> Answer:
    return through_view(call.cut(), call.whole[0], call.outputs[0], call.world_size)


def _same(call: Call) -> Answer:
    return call.cut()


def _as_complex(call: Call) -> Answer:
    """The last dimension, real and imaginary part, goes."""
    if call.cut().dim == call.rank_of() - 1:
        raise Unproven("real and imaginary parts are on different ranks")
    return call.cut()


def _transpose(call: Call) -> Answer:
    ndim, split = call.rank_of(), call.cut()
    a, b = (0, ndim - 1) if len(call.whole) < 3 else (_dim(call.whole[1], ndim), _dim(call.whole[2], ndim))
    return split.at({a: b, b: a}.get(split.dim, split.dim))


def _permute(call: Call) -> Answer:
    order = [_dim(dim, call.rank_of()) for dim in call.whole[1]]
    return call.cut().at(order.index(call.cut().dim))


def _unsqueeze(call: Call) -> Answer:
    dim, split = _dim(call.whole[1], call.rank_of() + 1), call.cut()
    return split.at(split.dim + (dim <= split.dim))


def _squeeze(call: Call) -> Answer:
    split, shape = call.cut(), call.whole[0]
    given = call.value(1, "dim", None)
    wanted = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = [d for d in (_dim(d, len(shape)) for d in wanted) if shape[d] == 1]
    return split.at(split.dim - sum(dim < split.dim for dim in gone))


def _expand(call: Call) -> Answer:
    return call.cut().at(call.cut().dim + len(call.outputs[0]) - call.rank_of())


def _slice(call: Call) -> Answer:
    split, shape = call.cut(), call.whole[0]
    dim = _dim(call.value(1, "dim", 0), len(shape))
    if dim != split.dim:
        call.same((2, "start"), (3, "end"), (4, "step"))
        return split
    if call.value(4, "step", 1) != 1:
        raise Unproven("a cut dimension is sliced with a step")
    bounds = []
    for local, size in ((False, shape[dim]), (True, call.local[0][dim])):
        start, stop = call.value(2, "start", None, local=local), call.value(3, "end", None, local=local)
        bounds.append(slice(start, stop).indices(size)[:2])
    part, low, high = split.part(*bounds[0], call.world_size, call.rank)
    if bounds[1] != (low, high):
        raise Unproven(f"a slice takes {list(bounds[1])} of one rank's part, {[low, high]} would be right")
    return part


def _select(call: Call) -> Answer:
    split, dim = call.cut(), _dim(call.value(1, "dim", 0), call.rank_of())
    if dim == split.dim:
        raise Unproven("one index of a cut dimension is selected")
    call.same((2, "index"))
    return split.at(split.dim - (dim < split.dim))


def _pieces(call: Call) -> Answer:
    """split, chunk, unbind: several outputs along one dimension."""
    split, shape, count = call.cut(), call.whole[0], len(call.outputs)
    dim = _dim(call.value(2, "dim", 0), len(shape))
    if dim != split.dim:
        return [split] * count
    found: list[Split | None] = []
    start = 0
    for output in call.outputs:
        part, _, _ = split.part(start, start + output[dim], call.world_size, call.rank)
        found.append(part)
        start += output[dim]
    return found


def _unbind(call: Call) -> Answer:
    split, dim = call.cut(), _dim(call.value(1, "dim", 0), call.rank_of())
    if dim == split.dim:
        raise Unproven("a cut dimension is unbound")
    return [split.at(split.dim - (dim < split.dim))] * len(call.outputs)


def _nothing_copied(*splits: Split) -> None:
    if any(split.copied for split in splits):
        raise Unproven("parts of every rank's own and copies that all have would interleave")


def _cat(call: Call) -> Answer:
    kept = [place for place, shape in enumerate(call.whole[0]) if tuple(shape) != (0,)]  # torch leaves those out
    splits, shapes = [call.splits[0][place] for place in kept], [call.whole[0][place] for place in kept]
    if any(split is None for split in splits):
        raise Unproven("whole and cut tensors are concatenated")
    dim = _dim(call.value(1, "dim", 0), len(shapes[0]))
    if len({split.dim for split in splits}) != 1:
        raise Unproven("tensors cut in different dimensions are concatenated")
    if len({split.pieces for split in splits}) != 1:
        raise Unproven("tensors cut in different pieces are concatenated")
    if dim == splits[0].dim:
        _nothing_copied(*splits)
        return Split(dim, tuple(size for split in splits for size in split.segments), splits[0].pieces)
    if len(set(splits)) != 1:
        raise Unproven("tensors cut in different ways are concatenated")
    first: Split = splits[0]
    return first


def _stack(call: Call) -> Answer:
    splits = call.splits[0]
    if len(set(splits)) != 1 or splits[0] is None:
        raise Unproven("tensors cut in different ways are stacked")
    dim = _dim(call.value(1, "dim", 0), len(call.whole[0][0]) + 1)
    answer: Split = splits[0].at(splits[0].dim + (dim <= splits[0].dim))
    return answer


def _with_buffer(call: Call) -> Answer:
    """An element-wise op that keeps numbers for its backward: as many as there are elements, or none (CUDA)."""
    first, *kept = call.outputs
    return [call.cut(), *(call.cut() if shape == first else None for shape in kept)]


def _repeat(call: Call) -> Answer:
    repeats = call.whole[1]
    call.same((1, "repeats"))
    _nothing_copied(call.cut())
    dim = call.cut().dim + len(repeats) - call.rank_of()
    return Split(dim, call.cut().segments * repeats[dim], call.cut().pieces)


def _repeat_interleave(call: Call) -> Answer:
    split, times = call.cut(), call.whole[1]
    call.same((1, "repeats"), (2, "dim"))
    if not isinstance(times, int) or call.value(2, "dim", None) is None:
        raise Unproven("elements of a cut tensor are repeated unevenly")
    if _dim(call.value(2, "dim", 0), call.rank_of()) != split.dim:
        return split
    _nothing_copied(split)
    if not split.whole_pieces(call.world_size):
        raise Unproven(f"{list(split.segments)} do not divide over {call.world_size} ranks", count=min(split.segments))
    return Split(split.dim, tuple(size * times for size in split.segments), split.pieces)


def _along(position: int, name: str) -> Callable[[Call], Answer]:
    """Ops that work along one dimension and keep the others: softmax, cumulative sums, rows by numbers."""

    def rule(call: Call) -> Answer:
        call.same((position, name))
        if _dim(call.value(position, name, -1), call.rank_of()) == call.cut().dim:
            raise Unproven("the op works along the dimension that is cut")
        return call.cut()

    return rule


def _best(call: Call) -> Answer:
    """The largest along a dimension that is not cut, and their places in it."""
    return [_along(2, "dim")(call)] * 2  # type: ignore[list-item]


def _reduce(call: Call) -> Answer:
    """Sums, means, maxima over given dimensions."""
    split, ndim = call.cut(), call.rank_of()
    given = call.value(1, "dim", None)
    if given is None or given == [] or isinstance(given, tuple):  # the last: another tensor, as max(a, b) has
        raise Unproven("all elements are reduced, the parts of the other ranks with them")
    call.same((1, "dim"))
    dims = {_dim(dim, ndim) for dim in ([given] if isinstance(given, int) else given)}
    if split.dim in dims:
        raise Unproven("the dimension that is cut is reduced")
    kept = len(call.outputs[0]) == ndim
    moved = split if kept else split.at(split.dim - sum(dim < split.dim for dim in dims))
    return [moved] * len(call.outputs) if len(call.outputs) > 1 else moved


def _norm(call: Call) -> Answer:
    """layer_norm and rms_norm over the last dimensions, with whole weights."""
    split, normalized = call.cut(), call.whole[1]
    call.same((1, "normalized_shape"))
    if split.dim >= call.rank_of() - len(normalized):
        raise Unproven("features that are cut are normalised over all features")
    for index in range(2, len(call.whole)):
        if isinstance(call.whole[index], tuple) and len(call.whole[index]) == len(normalized):
            if call.splits[index] is not None:
                raise Unproven("the weights of a norm are cut")
            call.mix(index)
    return [split] * len(call.outputs) if len(call.outputs) > 1 else split


def _mm(call: Call) -> Answer:
    a: Split | None = call.splits[0]
    b: Split | None = call.splits[1]
    if a is not None and a.dim == 0 and b is None:
        call.mix(1)
        return a
    if b is not None and b.dim == 1 and a is None:
        call.mix(0)
        return b
    raise Unproven("a product sums over the dimension that is cut")


def _addmm(call: Call) -> Answer:
    if call.splits[0] is not None or call.splits[1] is None or call.splits[1].dim != 0 or call.splits[2] is not None:
        raise Unproven("a product sums over the dimension that is cut")
    if len(call.whole[0]) > 1:
        raise Unproven("a whole matrix is added to a product that is cut")
    call.mix(0)
    call.mix(2)
    return call.cut(1)


def _bmm(call: Call, first: int = 0) -> Answer:
    a: Split | None = call.splits[first]
    b: Split | None = call.splits[first + 1]
    if a is not None and a == b and a.dim == 0:
        return a
    if a is not None and b is None and a.dim == 1:
        call.mix(first + 1)
        return a
    if b is not None and a is None and b.dim == 2:
        call.mix(first)
        return b
    raise Unproven("a batched product mixes parts of different ranks")


def _convolution(call: Call) -> Answer:
    """Of each channel by itself: a cut of the channels of x, weight and bias."""
    x, weight = call.splits[0], call.splits[1]
    bias: Split | None = call.splits[2]
    channels, (whole, local) = call.whole[0][1], (call.value(8, "groups", 1, local=where) for where in (False, True))
    if x is None or x.dim != 1 or call.value(6, "transposed", False) or not whole == channels == call.whole[1][0]:
        raise Unproven("a convolution sums over channels that are cut")
    if weight != x.at(0) or (call.whole[2] is not None and bias != x.at(0)) or local != call.local[0][1]:
        error = Unproven("channels and their weights are cut in different ways")
        error.met = x.at(0)
        raise error
    answer: Split = x
    return answer


def _solved(call: Call) -> Answer:
    """Triangular systems of each matrix by itself."""
    a, b = call.cut(0), call.cut(1)
    if a != b or a.dim >= call.rank_of() - 2 or call.rank_of(0) != call.rank_of(1):
        raise Unproven("a system of equations is cut")
    return b


def _baddbmm(call: Call) -> Answer:
    product = _bmm(call, 1)
    assert isinstance(product, Split)
    shapes, splits = (call.whole[0], call.outputs[0]), (call.splits[0], product)
    return pointwise(shapes, splits, lambda index: call.mix(0) if index == 0 else None)


def _attention(call: Call) -> Answer:
    """Scaled dot product attention of q, k, v ``[B, H, S, D]``, cut by heads; the mask is whole or cut alike."""
    q, k, v = (call.cut(index) for index in range(3))
    _nothing_copied(q, k, v)
    same = k == v and q == replace(k, segments=q.segments)
    if not same or q.dim not in (0, 1) or (q.segments != k.segments and len(q.segments + k.segments) > 2):
        raise Unproven("queries, keys and values are cut in different ways")
    whole = q.whole_pieces(call.world_size) and k.whole_pieces(call.world_size)
    if q.segments[0] % k.segments[0] or not whole:
        count = min(q.segments[0], k.segments[0])
        raise Unproven(f"{count} heads do not divide over {call.world_size} ranks", count=count)
    masks = [i for i in range(3, len(call.whole)) if isinstance(call.whole[i], tuple)]
    for index in masks:
        _mask(call, call.whole[index], call.splits[index], q, lambda i=index: call.mix(i))  # type: ignore[misc]
    mask = call.kwargs[0].get("attn_mask")
    if isinstance(mask, tuple):
        _mask(call, mask, call.kwargs[0].get("attn_mask split"), q, lambda: call.mix(-1))
    if call.value(3, "dropout_p", 0.0) != call.value(3, "dropout_p", 0.0, local=True):
        raise Unproven("the probability of dropout depends on the rank")
    answers: list[Split | None] = []
    for output in call.outputs:
        answers.append(q if len(output) > q.dim and output[q.dim] == sum(q.segments) else None)
    return answers


def _mask(call: Call, shape: tuple[int, ...], split: Split | None, q: Split, mix: Callable[[], None]) -> None:
    place = q.dim - (call.rank_of() - len(shape))
    if split is not None:
        if split != q.at(place):
            raise Unproven("the attention mask is cut in another way than the queries")
    elif place >= 0 and shape[place] != 1:
        raise Unproven("the attention mask is whole and different for every head")
    else:
        mix()


def _copy(call: Call) -> Answer:
    """A tensor written over another one, broadcast to it; or a slope for all channels."""
    return pointwise(call.whole[:2], call.splits[:2], call.mix)


def _pad(call: Call) -> Answer:
    call.same((1, "pad"), (2, "value"))
    split, pads = call.cut(), call.whole[1]
    if split.dim >= call.rank_of() - len(pads) // 2:
        at = 2 * (call.rank_of() - 1 - split.dim)
        if any(pads[at : at + 2]):
            raise Unproven("the dimension that is cut is padded")
    return split


def _windows(call: Call) -> Answer:
    """im2col (``torch.nn.functional.unfold``): of each channel all places of a window, one channel after the other."""
    split, channels = call.cut(), call.rank_of() - 3
    call.same((1, "kernel_size"), (2, "dilation"), (3, "padding"), (4, "stride"))
    if split.dim < channels:
        return split
    if split.dim > channels:
        raise Unproven("a dimension of space is cut")
    _nothing_copied(split)
    if not split.whole_pieces(call.world_size):
        raise Unproven(f"{list(split.segments)} do not divide over {call.world_size} ranks", count=min(split.segments))
    places = call.outputs[0][channels] // call.whole[0][channels]
    return Split(channels, tuple(size * places for size in split.segments), split.pieces)


def _space(dims: int) -> Callable[[Call], Answer]:
    """Windows, borders or more points in the last dimensions, the same for all channels."""

    def rule(call: Call) -> Answer:
        split = call.cut()
        if split.dim >= call.rank_of() - dims:
            raise Unproven("a dimension of space is cut")
        return [split] * len(call.outputs) if len(call.outputs) > 1 else split

    return rule


_SPACE = {
    1: ("reflection_pad1d", "replication_pad1d", "upsample_nearest1d", "upsample_linear1d"),
    2: (
        "max_pool2d_with_indices",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "reflection_pad2d",
        "replication_pad2d",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
    ),
    3: (
        "max_pool3d_with_indices",
        "avg_pool3d",
        "_adaptive_avg_pool3d",
        "adaptive_max_pool3d",
        "reflection_pad3d",
        "replication_pad3d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
    ),
}
"""Ops on so many dimensions of space."""


_AROUND: dict[str, Callable[[Call], Answer]] = {
    "clone": _same, "_to_copy": _same, "detach": _same, "alias": _same, "lift_fresh": _same, "contiguous": _same,
    "zeros_like": _same, "ones_like": _same, "full_like": _same, "empty_like": _same, "rand_like": _same,
    "bernoulli": _same, "bernoulli_": _same, "zero_": _same, "fill_": _same,
    "view_as_complex": _as_complex, "view_as_real": _same,
    "view": _view, "_unsafe_view": _view, "reshape": _view, "_reshape_alias": _view,
    "transpose": _transpose, "t": _transpose, "permute": _permute, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "expand": _expand, "slice": _slice, "select": _select, "split": _pieces, "split_with_sizes": _pieces,
    "chunk": _pieces, "unbind": _unbind, "cat": _cat, "stack": _stack, "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "_softmax": _along(1, "dim"), "_log_softmax": _along(1, "dim"), "_safe_softmax": _along(1, "dim"),
    "softmax": _along(1, "dim"), "cumsum": _along(1, "dim"), "index_select": _along(1, "dim"), "flip": _reduce,
    "unfold": _along(1, "dimension"), "topk": _best,
    "glu": glu, "im2col": _windows,
    "sum": _reduce, "mean": _reduce, "amax": _reduce, "amin": _reduce, "var": _reduce, "std": _reduce,
    "var_mean": _reduce, "logsumexp": _reduce, "linalg_vector_norm": lambda call: _vector_norm(call),
    "native_layer_norm": _norm, "_fused_rms_norm": _norm, "rms_norm": _norm,
    "max": _reduce, "min": _reduce, "index": indexed, "gather": gather, "copy_": _copy, "embedding": rows,
    "index_put": put, "index_put_": put, "as_strided": as_strided,
    "_prelu_kernel": _copy, "mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm, "constant_pad_nd": _pad,
    **{name: _space(dims) for dims, names in _SPACE.items() for name in names},
    "convolution": _convolution, "linalg_solve_triangular": _solved,
    "grid_sampler_2d": grid_sample, "grid_sampler_3d": grid_sample,
    "native_dropout": lambda call: [call.cut(), call.cut()],
    "log_sigmoid_forward": _with_buffer,
    "_scaled_dot_product_flash_attention_for_cpu": _attention, "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention, "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
}  # fmt: skip


def _vector_norm(call: Call) -> Answer:
    call.same((1, "ord"))
    moved = Call(
        [call.whole[0], call.value(2, "dim", None)],
        [call.local[0], call.value(2, "dim", None, local=True)],
        call.kwargs,
        [call.cut()],
        call.outputs,
        call.world_size,
        call.rank,
        call.mix,
    )
    return _reduce(moved)


RULES: dict[Any, Callable[[Call], Answer]] = {
    getattr(torch.ops.aten, name): rule for name, rule in _AROUND.items() if hasattr(torch.ops.aten, name)
}
"""Rules by overload packet; ops that carry the tag ``pointwise`` need none."""
