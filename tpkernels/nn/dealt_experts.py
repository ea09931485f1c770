"""Experts dealt out over the ranks: how tokens reach them, on a mesh of one axis or of two.

One axis: each rank has some whole experts.  Two axes, ``(ep, tp)``: the experts are dealt out over the first one, and
the features of each are cut over the second.  Then rank (e, t) has of the experts of e the features of t, and its
results are parts of sums over t.

Owns the way of the tokens.  They are this rank's own (``sequence_parallel``): those of a row of ``tp`` are gathered
before they go to their experts, and the sums over ``tp`` scattered in the end.  Or all ranks have the same ones: each
rank of ``ep`` then sends its share of them, and all get all results.

With ``same_bits`` code between the two products runs expert by expert, on as many rows at every number of ranks.  Two
axes are refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.same_bits import refuse, same_bits_of
from tpkernels.nn.parameters import tp_axis, tp_mesh
from tpkernels.ops import (
    Routing,
    all_gather,
    all_reduce,
    copy_to_group,
    dispatch_grouped_matmul,
    grouped_matmul_combine,
    reduce_scatter,
    shard,
)
from tpkernels.partition import array_split_sizes, chunk_sizes

__all__ = ["EP_AXIS", "DealtWeights", "expert_mesh", "run_dealt"]

EP_AXIS = "ep"


class DealtWeights(NamedTuple):
    """What this rank has of the experts."""

    firsts: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    down: Tensor
    down_bias: Tensor | None


def expert_mesh(group: Any, device: Any) -> DeviceMesh:
    """The mesh of one or two axes that experts are dealt out on.

    A group or a mesh of one axis; of a larger mesh its axis "ep", with "tp" behind it if there is one.

    Raises:
        ValueError: a mesh of several axes none of which is "ep", or with "tp" in front of it.
    """
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        return tp_mesh(group, device)
    names = group.mesh_dim_names or ()
    if EP_AXIS not in names:
        raise ValueError(f'group is a mesh with axes {names or group.ndim}; pass one axis, or name one "{EP_AXIS}"')
    tp = tp_axis(group)
    if tp is None:
        return tp_mesh(group[EP_AXIS], device)
    if names.index(tp) < names.index(EP_AXIS):
        raise ValueError(f'group is a mesh with axes {names}; "{EP_AXIS}" must come before {tp!r}')
    found = group[(EP_AXIS, tp)]
    if found.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {found}")
    return found


def run_dealt(
    mesh: DeviceMesh,
    x: Tensor,
    routing: Routing,
    weights: DealtWeights,
    num_experts: int,
    *,
    activation: str | None,
    own_tokens: bool,
    shard_sizes: Sequence[int] | None = None,
    implementation: str = "auto",
    gate: Callable[[list[Tensor]], Tensor] | None = None,
) -> Tensor:
    """The experts' results for tokens ``[n, H]``: this rank's ``own_tokens``, or those that all ranks have.

    ``gate``: what makes the rows of ``down`` from those of the first matrices, where no ``activation`` does.
    """
    ep, tp = mesh.get_group(0), mesh.get_group(1) if mesh.ndim > 1 else None
    for group in () if tp is None else (ep, tp):
        refuse(group, "a mesh of two axes for experts", "one cuts the experts, the other one the features of each")
    tp_size = 1 if tp is None else tp.size()
    of_ranks = list(shard_sizes) if shard_sizes is not None else None
    if of_ranks is not None and len(of_ranks) != mesh.size():
        raise ValueError(f"shard_sizes must have one entry per rank ({mesh.size()}), got {of_ranks}")
    rows = None if of_ranks is None else [of_ranks[i : i + tp_size] for i in range(0, len(of_ranks), tp_size)]
    own_row = None if rows is None else rows[ep.rank()]
    if own_tokens:
        x, routing = _gathered(x, routing, tp, own_row)
        sizes = None if rows is None else [sum(row) for row in rows]
    else:
        sizes = list(array_split_sizes(x.shape[0], ep.size()))
        x, routing = _share(x, routing, ep, tp)
    dealt = chunk_sizes(num_experts, ep.size())
    options: dict[str, Any] = {"expert_sizes": dealt, "shard_sizes": sizes, "implementation": implementation}
    first = weights.firsts if len(weights.firsts) > 1 else weights.firsts[0]
    h, whole = dispatch_grouped_matmul(x, first, routing, ep, bias=weights.biases, activation=activation, **options)
    if gate is not None:
        products = [h] if isinstance(h, Tensor) else list(h)
        if same_bits_of(ep):
            h = _by_expert(gate, products, _rows_of_experts(whole.experts, dealt, ep.rank()))
        else:
            h = gate(products)
    y = grouped_matmul_combine(
        cast(Tensor, h), weights.down, whole, ep, bias=_added_once(weights.down_bias, tp), **options
    )
    if own_tokens:
        return y if tp is None else reduce_scatter(y, tp, shard_sizes=own_row)
    y = y if tp is None else all_reduce(y, tp)
    return all_gather(y, ep, shard_sizes=sizes, replicated_grad=True)


def _rows_of_experts(experts: Tensor, dealt: Sequence[int], rank: int) -> list[int]:
    """How many rows each of this rank's experts has."""
    counts = experts.reshape(-1).bincount(minlength=sum(dealt))
    found: list[int] = counts.split(list(dealt))[rank].tolist()
    return found


def _by_expert(gate: Callable[[list[Tensor]], Tensor], products: list[Tensor], rows: Sequence[int]) -> Tensor:
    """The model's own code for the rows of one expert after the other, in each of its calls as many at every degree."""
    parts = zip(*(product.split(list(rows)) for product in products), strict=True)
    found = [gate(list(part)) for part, count in zip(parts, rows, strict=True) if count]
    return torch.cat(found) if found else gate(products)


def _gathered(x: Tensor, routing: Routing, tp: Any, sizes: Sequence[int] | None) -> tuple[Tensor, Routing]:
    """The tokens of a row of ``tp``, each rank of which has some of them and parts of their experts."""
    if tp is None:
        return x, routing
    bits = routing.experts.contiguous().view(x.dtype)  # numbers of the one dtype whose costs the ranks agree on
    experts = all_gather(bits, tp, shard_sizes=sizes).view(routing.experts.dtype)
    weights = all_gather(routing.weights, tp, shard_sizes=sizes)
    return all_gather(x, tp, shard_sizes=sizes), Routing(experts, weights)


def _share(x: Tensor, routing: Routing, ep: Any, tp: Any) -> tuple[Tensor, Routing]:
    """This rank's share over ``ep`` of tokens that all ranks have; their gradients are parts of sums over ``tp``."""
    experts, weights = routing
    if tp is not None:
        x, weights = copy_to_group(x, tp), copy_to_group(weights, tp)
    start = sum(array_split_sizes(x.shape[0], ep.size())[: ep.rank()])
    mine = array_split_sizes(x.shape[0], ep.size())[ep.rank()]
    return shard(x, ep), Routing(experts[start : start + mine], shard(weights, ep))


def _added_once(bias: Tensor | None, tp: Any) -> Tensor | None:
    """A bias of what is summed over ``tp``: one rank adds it, and all have its gradient."""
    if bias is None or tp is None:
        return bias
    return copy_to_group(bias, tp) * float(tp.rank() == 0)
