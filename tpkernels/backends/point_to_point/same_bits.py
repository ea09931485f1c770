"""``unfused`` and ``chunked`` where a call gives the same bits at every degree (:mod:`tpkernels.gemm.canonical`).

Both are one code: ``unfused`` has one chunk per rank, waits for all before it computes, and computes all before it
sends.  What is sent of partial sums is fp32 (fp64 for fp64): twice the bytes of bf16.
"""

from __future__ import annotations

from torch import Tensor

from tpkernels.backends.canonical_experts import ExpertArrivals, Sum, tree_of
from tpkernels.backends.canonical_rows import Arrivals, Tree, combine, partial_of
from tpkernels.backends.point_to_point.exchange import PartialExchange, ShardExchange
from tpkernels.backends.row_gemms import bias_of
from tpkernels.ops.contract import (
    AllGatherGroupedMatmul,
    AllGatherMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    GroupedMatmulReduceScatter,
    MatmulAllReduce,
    MatmulReduceScatter,
)
from tpkernels.partition import Layout, array_split_sizes

__all__ = ["all_gather_grouped_matmul", "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"]


def all_gather_matmul(context: Context, call: AllGatherMatmul) -> Gathered:
    """In chunks as ``context`` says: each chunk of the whole is multiplied when its last row has come."""
    return _gathered(context, call, Arrivals(context, call))


def all_gather_grouped_matmul(context: Context, call: AllGatherGroupedMatmul) -> Gathered:
    return _gathered(context, call, ExpertArrivals(context, call))


def _gathered(
    context: Context, call: AllGatherMatmul | AllGatherGroupedMatmul, rows: Arrivals | ExpertArrivals
) -> Gathered:
    incoming = ShardExchange(context, call.x, call.layout, rows.whole)
    rows.add(context.group.rank, 0, call.x)
    for peer, start, part in incoming.arrivals():
        rows.add(peer, start, part)
    incoming.finish()
    return rows.gathered()


def matmul_reduce_scatter(context: Context, call: MatmulReduceScatter | GroupedMatmulReduceScatter) -> Tensor:
    tree = tree_of(context, call)
    if context.num_chunks == 1:
        tree.complete()
    if context.group.size == 1:
        call.meanwhile()
        return _alone(tree, call)
    return _sum_own(context, call, tree, call.layout, call.bias)


def matmul_all_reduce(context: Context, call: MatmulAllReduce | GroupedMatmulAllReduce) -> Tensor:
    """Two ranks exchange everything; more of them sum a share of the rows each, and gather."""
    group, tree = context.group, tree_of(context, call)
    if context.num_chunks == 1:
        tree.complete()
    if group.size == 1:
        call.meanwhile()
        return _alone(tree, call)
    rows = tree.sums.shape[0]
    if group.size == 2:
        return _exchange_everything(context, call, tree)
    layout = Layout(1, array_split_sizes(rows, group.size), 1)
    first = sum(layout.sizes[: group.rank])
    own = _sum_own(context, call, tree, layout, bias_of(call.bias, first, first + layout.sizes[group.rank]))
    whole = own.new_empty(rows, own.shape[1])
    gather = ShardExchange(context._replace(tag=context.tag + context.num_chunks, num_chunks=1), own, layout, whole)
    whole[first : first + own.shape[0]] = own
    for _ in gather.arrivals():
        pass  # it is in its place
    gather.finish()
    return whole


def _alone(tree: Tree, call: Sum) -> Tensor:
    sums = tree.complete()
    out = call.like.new_empty(sums.shape)
    combine([sums], out, call.bias)
    return out


def _sum_own(context: Context, call: Sum, tree: Tree, layout: Layout, bias: Tensor | None) -> Tensor:
    """This rank's rows of the sum; ``bias``: one row, or those of this rank's shard where features are scattered."""
    rank = context.group.rank
    outgoing = PartialExchange(context, layout, tree.sums.shape[1], tree.sums)

    def fill(owner: int, start: int, stop: int, out: Tensor) -> None:
        out.copy_(partial_of(tree, layout, owner, start, stop))

    for chunk in range(context.num_chunks):
        outgoing.send(chunk, fill)
    columns = layout.sizes[rank] if layout.feature else tree.sums.shape[1]
    own = tree.sums.new_empty(layout.shard_rows(rank), columns)
    fill(rank, 0, own.shape[0], own)
    call.meanwhile()
    out = call.like.new_empty(own.shape)
    for chunk in range(context.num_chunks):
        start, stop = outgoing.rows(rank, chunk)
        combine(outgoing.parts(chunk, own), out[start:stop], bias_of(bias, start, stop))
    outgoing.finish()
    return out


def _exchange_everything(context: Context, call: Sum, tree: Tree) -> Tensor:
    rows, columns = tree.sums.shape
    layout = Layout(1, array_split_sizes(rows, context.group.size), 1)
    outgoing = PartialExchange(context, layout, columns, tree.sums, everything=True)

    def fill(_: int, start: int, stop: int, out: Tensor) -> None:
        out.copy_(tree.rows(start, stop))

    for chunk in range(context.num_chunks):
        outgoing.send(chunk, fill)
    call.meanwhile()
    whole = call.like.new_empty(rows, columns)
    for chunk in range(context.num_chunks):
        start, stop = outgoing.rows(context.group.rank, chunk)
        combine(outgoing.parts(chunk), whole[start:stop], bias_of(call.bias, start, stop))
    outgoing.finish()
    return whole
