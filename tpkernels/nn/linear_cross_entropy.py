"""The output head and its loss in one op: a rank holds its shard of the logits for one chunk of tokens at a time.

::

    x_c = tokens of chunk c (with sequence parallelism of every rank's part, gathered)     all_gather_matmul
    l_c = x_c @ w_r^T + b_r,  its sums as in tpkernels.nn.cross_entropy
    dx_c = sum over ranks of dl_c @ w_r (or this rank's part of it)                        matmul_all_reduce or
    dw_r += dl_c^T @ x_c, db_r += sum over rows of dl_c                                    matmul_reduce_scatter

The backward pass computes the chunk's logits again instead of keeping them, which costs one GEMM more than the head and
its loss apart.  In return a call keeps, beside x, its gradient and the head's (in fp32 while it is summed up, or the
weight's ``main_grad``), two buffers of ``chunk_tokens`` rows of the logits' shard at a time.  The gradient of the
weight is computed while the partial sums of dx travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group, group_name, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.cross_entropy import (
    Settings,
    TokenSums,
    accumulation_dtype,
    auto_chunk,
    check_options,
    check_target,
    combine,
    local_sums,
    logits_gradient,
    reduce,
    vocab_parallel_cross_entropy,
)
from tpkernels.nn.parameters import local
from tpkernels.ops import agreed_call, all_gather_matmul, copy_matmul
from tpkernels.ops.agreed_call import Signature
from tpkernels.ops.checks import check_common, check_dim, check_shard_sizes, check_weights
from tpkernels.ops.contract import AllGatherMatmul, Gathered, MatmulAllReduce, MatmulReduceScatter
from tpkernels.ops.gradients import of_linear
from tpkernels.ops.main_grad import Sink, accumulate, sink_of
from tpkernels.ops.registration import call, define
from tpkernels.ops.shapes import fresh, rows_layout
from tpkernels.partition import Layout, offsets

__all__ = ["vocab_parallel_linear_cross_entropy"]


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    head: ColumnParallelLinear,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    shard_sizes: Sequence[int] | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """``vocab_parallel_cross_entropy(head(x), target)`` without the logits.

    ==========  ======================================  ==========================================================
    argument    shape                                   notes
    ==========  ======================================  ==========================================================
    ``x``       as for ``head``: ``[..., in]``, or with sequence parallelism of the head ``[..., S_r, ..., in]``
    ``target``  ``[...]``, ``[..., S, ...]``            int64 or int32, the whole sequence, equal on all ranks
    result      ``[]`` or the shape of ``target``       fp32 (fp64 for fp64), equal on all ranks
    ==========  ======================================  ==========================================================

    Args:
        head: its weight may be an embedding's (``embedding.tie(head)``); without activation and ``gather_output``.
        shard_sizes: every rank's length of the sequence, needed where they are not all equal.
        chunk_tokens: tokens, of all ranks together, that are worked on at a time; default: a chunk of 64 MiB.

    The others are as in :func:`vocab_parallel_cross_entropy`, and so are the errors.  With ``same_bits`` the shard of
    the logits is kept, as if the head and its loss were called apart.

    Examples:
        >>> head = tpk.nn.ColumnParallelLinear(8, 100, mesh["tp"], bias=False)
        >>> tpk.nn.vocab_parallel_linear_cross_entropy(torch.ones(3, 8), head, torch.tensor([1, 2, 99])).shape
        torch.Size([])
    """
    settings = Settings(ignore_index, label_smoothing, z_loss)
    mesh = head.mesh
    rank, world_size = mesh.get_local_rank(), mesh.size()
    try:
        check_options(settings, reduction, chunk_tokens)
        check_common("matmul_all_reduce", x, head.implementation)
        if head.activation is not None or head.gather_output:
            raise ValueError(f"the head must give plain logits, cut over the ranks, got {head}")
        shape = list(x.shape)
        sequence_sizes, dim = None, 0
        if head.sequence_parallel:
            dim = check_dim("sequence_dim", head.sequence_dim, x.dim())
            check_shard_sizes(shard_sizes, world_size, own=(rank, x.shape[dim]))
            sequence_sizes = [x.shape[dim]] * world_size if shard_sizes is None else list(shard_sizes)
            shape[dim] = sum(sequence_sizes)
        elif shard_sizes is not None:
            raise ValueError(f"shard_sizes ({list(shard_sizes)}) cuts a sequence: the head has sequence_parallel=False")
        check_target(target, shape[:-1], "x" if sequence_sizes is None else "the gathered x")
    except ValueError as error:
        if world_size > 1:
            agreement.refuse(resolve(mesh), "vocab_parallel_linear_cross_entropy", str(error))
        raise
    weight, bias, name = cast(Tensor, local(head.weight)), local(head.bias), group_name(mesh)
    sizes = list(head.shard_sizes)
    if same_bits_of(mesh):
        ((weight, bias),) = head.parts()
        options: dict[str, Any] = {"bias": bias, "implementation": head.implementation}
        if sequence_sizes is None:
            logits = copy_matmul(x, weight, mesh, **options)
        else:
            logits = all_gather_matmul(x, weight, mesh, gather_dim=dim, shard_sizes=sequence_sizes, **options)
        logits = head.of_places(logits)
        return vocab_parallel_cross_entropy(
            logits, target, mesh, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            reduction=reduction, shard_sizes=sizes, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    plan = _Plan(name, sizes, dim, sequence_sizes, *settings, chunk_tokens or auto_chunk(sizes), head.implementation)
    losses = call("linear_cross_entropy", x, weight, bias, target, plan)[0]
    return reduce(losses, target, reduction, ignore_index)


class _Plan(NamedTuple):
    """What a call of the op says beside its tensors."""

    group_name: str
    vocabulary_sizes: list[int]
    sequence_dim: int
    sequence_sizes: list[int] | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk_tokens: int
    implementation: str

    @property
    def settings(self) -> Settings:
        return Settings(self.ignore_index, self.label_smoothing, self.z_loss)


class _Tokens:
    """Rows of x in the order of the cut dimension, and the chunks in which they are computed.

    A chunk takes the same range of rows of every rank's part; ``places`` are where they stand among all tokens.
    """

    def __init__(self, x: Tensor, target: Tensor, plan: _Plan) -> None:
        self.plan, self.group = plan, resolve(plan.group_name)
        self.gathers = plan.sequence_sizes is not None and self.group.size > 1
        self.moved = x.movedim(plan.sequence_dim, 0)
        self.rows = self.moved.reshape(-1, x.shape[-1]).contiguous()
        self.labels = target.movedim(plan.sequence_dim, 0).reshape(-1)
        if self.gathers and plan.sequence_sizes is not None:
            inner = self.moved.shape[1:-1].numel()
            self.sizes, self.own = [size * inner for size in plan.sequence_sizes], self.group.rank
        else:
            self.sizes, self.own = [self.rows.shape[0]], 0

    def chunks(self) -> Iterator[list[slice]]:
        """Rows of each rank's part."""
        step = max(1, self.plan.chunk_tokens // len(self.sizes))
        for low in range(0, max(self.sizes), step):
            yield [slice(min(low, size), min(low + step, size)) for size in self.sizes]

    def places(self, ranges: Sequence[slice]) -> list[slice]:
        return [
            slice(start + part.start, start + part.stop)
            for start, part in zip(offsets(self.sizes), ranges, strict=True)
        ]

    def whole(self, values: Tensor, target: Tensor) -> Tensor:
        """One value per token, in the order and shape of the target."""
        dim = self.plan.sequence_dim
        return values.view(target.movedim(dim, 0).shape).movedim(0, dim).contiguous()

    def logits(self, ranges: Sequence[slice], weight: Tensor, bias: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
        """This rank's logits of a chunk, and with ``keep`` the chunk's rows of x."""
        mine = self.rows[ranges[self.own]]
        if not self.gathers:
            return F.linear(mine, weight, bias), mine
        layout = _layout(ranges)
        arguments = AllGatherMatmul(mine, layout, [weight.t()], [bias], None, keep)
        signature = self._signature("all_gather_matmul", layout, mine.shape[1])
        gathered = cast(Gathered, agreed_call.run(self.group, signature, weight.shape[0], arguments, mine.device))
        return gathered.outs[0], cast(Tensor, gathered.whole) if keep else mine

    def input_gradient(self, ranges: Sequence[slice], dl: Tensor, weight: Tensor, meanwhile: Any) -> Tensor:
        """The gradient of this rank's rows of a chunk, summed over the ranks."""
        if self.group.size == 1:
            meanwhile()
            return dl @ weight
        if self.gathers:
            layout, op = _layout(ranges), "matmul_reduce_scatter"
            arguments: Any = MatmulReduceScatter([dl], [weight], layout, None, None, meanwhile)
        else:
            layout, op = rows_layout(dl.shape[0], self.group.size), "matmul_all_reduce"
            arguments = MatmulAllReduce([dl], [weight], None, meanwhile)
        signature = self._signature(op, layout, weight.shape[1])
        return cast(Tensor, agreed_call.run(self.group, signature, weight.shape[0], arguments, dl.device))

    def _signature(self, op: str, layout: Layout, columns: int) -> Signature:
        dtype, device = self.rows.dtype, self.rows.device.type
        return Signature(op, dtype, device, layout, columns, self.plan.implementation, "cross entropy of a head")


def _layout(ranges: Sequence[slice]) -> Layout:
    return Layout(1, tuple(part.stop - part.start for part in ranges), 1)


def _kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = _Tokens(x, target, plan)
    _check(tokens.group, x, weight, bias)
    smoothing, start = plan.label_smoothing > 0, offsets(plan.vocabulary_sizes)[tokens.group.rank]
    sums = torch.empty(
        tokens.labels.shape[0], 5 if smoothing else 4, dtype=accumulation_dtype(x.dtype), device=x.device
    )
    for ranges in tokens.chunks():
        logits, places = tokens.logits(ranges, weight, bias, False)[0], tokens.places(ranges)
        part = local_sums(logits, _pick(tokens.labels, places), start, smoothing)
        for place, values in zip(places, part.split([place.stop - place.start for place in places]), strict=True):
            sums[place] = values
    what = "cross entropy of a head"
    losses, largest, log_z = combine(
        sums[None], tokens.labels, plan.group_name, plan.vocabulary_sizes, plan.settings, what
    )
    losses = tokens.whole(losses, target)
    return fresh(losses, losses.shape), fresh(largest, largest.shape), fresh(log_z, log_z.shape)


def _check(group: Group, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    try:
        check_weights(x, x.shape[-1], [weight], [bias])
    except ValueError as error:
        if group.size > 1:
            agreement.refuse(group, "linear_cross_entropy", str(error))
        raise


def _pick(values: Tensor, places: Sequence[slice]) -> Tensor:
    """The values of a chunk, in the order of its logits' rows."""
    return values[places[0]] if len(places) == 1 else torch.cat([values[place] for place in places])


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any) -> tuple[Tensor, ...]:
    losses = torch.empty_like(target, dtype=accumulation_dtype(x.dtype), memory_format=torch.contiguous_format)
    return losses, losses.new_empty(target.numel()), losses.new_empty(target.numel())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *plan = inputs
    ctx.save_for_backward(x, weight, bias, target, *output[1:])
    ctx.plan = _Plan(*plan)
    ctx.sinks = [sink_of(weight)]


def _backward(ctx: Any, grads: Tensor, *_: Any) -> tuple[Any, ...]:
    return tuple(of_linear(ctx, "linear_cross_entropy_backward", grads, *ctx.saved_tensors, ctx.plan))


def _backward_kernel(
    grads: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    largest: Tensor,
    log_z: Tensor,
    plan: _Plan,
    needs: list[bool],
    *,
    sinks: Sequence[Sink | None] = (None,),
) -> list[Tensor | None]:
    needs_x, needs_w, needs_b = needs
    tokens, dtype = _Tokens(x, target, plan), accumulation_dtype(x.dtype)
    start, total = offsets(plan.vocabulary_sizes)[tokens.group.rank], sum(plan.vocabulary_sizes)
    scale = grads.movedim(plan.sequence_dim, 0).reshape(-1).masked_fill(tokens.labels == plan.ignore_index, 0)
    dx = torch.empty_like(tokens.rows)
    sink = sinks[0]
    dw = sink.main_grad if sink is not None else torch.zeros_like(weight, dtype=dtype) if needs_w else None
    db = torch.zeros(weight.shape[0], dtype=dtype, device=x.device)
    for ranges in tokens.chunks():
        places = tokens.places(ranges)
        sums = TokenSums(*(_pick(values, places) for values in (scale, largest, log_z)))
        logits, rows = tokens.logits(ranges, weight, bias, needs_w)
        dl32 = logits_gradient(logits, _pick(tokens.labels, places), sums.losses, sums, start, total, plan.settings)
        dl = logits.copy_(dl32)  # the logits' memory is free now
        if needs_b:
            db += dl32.sum(0)
        del dl32

        def meanwhile(dl: Tensor = dl, rows: Tensor = rows) -> None:
            if needs_w and dw is not None:
                accumulate(dw, dl, rows)

        if needs_x:
            dx[ranges[tokens.own]] = tokens.input_gradient(ranges, dl, weight, meanwhile)
        else:
            meanwhile()
    results: list[Tensor | None] = []
    if needs_x:
        results.append(dx.view(tokens.moved.shape).movedim(0, plan.sequence_dim).contiguous())
    if needs_w and dw is not None:
        results.append(dw.to(weight.dtype) if sink is None else sink.added(weight.dtype))
    return [*results, db.to(weight.dtype)] if needs_b else results


def _backward_fake(grads: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    needs = rest[-1]
    results = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x, weight)]
    results.append(weight.new_empty(weight.shape[0]))
    return [result for result, need in zip(results, needs, strict=True) if need]


define(
    "linear_cross_entropy",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    autocast=True,
)
define("linear_cross_entropy_backward", kernel=_backward_kernel, fake=_backward_fake)
