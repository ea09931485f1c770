"""From styles to a plan's entries: shapes on every rank, collectives, bytes, and the implementation that runs.

Tests compare the bytes of the entries with the bytes that travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.same_bits import same_bits_of
from tpkernels.errors import CommunicationError
from tpkernels.ops.explain import explain
from tpkernels.partition import copied_places
from tpkernels.planning.entries.convolution_entries import channel_cuts, convolution_traffic
from tpkernels.planning.entries.experts_entries import Traffic, cut_of_experts, experts_implementation, experts_traffic
from tpkernels.planning.entries.fused_norms import FusedNorms
from tpkernels.planning.entries.plan import Entry, ParameterCut, ShardingPlan
from tpkernels.planning.modules.layers import Layer, kind_of, layer_of
from tpkernels.planning.modules.numbers import number_of
from tpkernels.planning.replays.sequence_flow import Stream
from tpkernels.planning.runs.row_counts import Elements
from tpkernels.planning.splits import held
from tpkernels.planning.styles import (
    Channels,
    Column,
    CopiedHeads,
    Experts,
    Features,
    Heads,
    PartNorm,
    Replicate,
    Row,
    Sliced,
    Style,
    Vocabulary,
)

__all__ = ["Chosen", "Traffic", "make_entries", "traffic_of"]


@dataclass(frozen=True)
class Chosen:
    """A style for a module, and why."""

    style: Style
    source: str
    reason: str


def make_entries(
    model: nn.Module,
    world_size: int,
    chosen: Mapping[str, Chosen],
    *,
    attributes: Mapping[tuple[str, str], tuple[int, ...]],
    arguments: Mapping[tuple[str, str], tuple[int, int]],
    random: tuple[tuple[str, str], ...],
    whole_draws: tuple[str, ...],
    rows: Mapping[str, int | None] | None,
    slots: Mapping[str, int],
    elements: Mapping[str, Elements],
    untrained: frozenset[str],
    shared: tuple[tuple[str, ...], ...],
    norms: FusedNorms,
    group: DeviceMesh | None,
    stream: Stream,
    notes: tuple[str, ...],
    example: str,
) -> ShardingPlan:
    """The plan that carries out ``chosen`` and keeps everything else whole.

    ``rows``: what goes into each layer, None where that is not known; ``slots``: rows of each module of experts;
    ``elements``: what each convolution takes and gives (:func:`tpkernels.planning.runs.row_counts.elements_in`);
    ``untrained``: layers whose input needs no gradient.
    """
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    leaders = {name: names[0].rpartition(".")[2] for names in shared for name in names[1:]}
    seen: set[int] = set()
    entries: list[Entry] = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own and name not in chosen:
            continue
        picked = chosen.get(name, Chosen(Replicate(), "default", _why_whole(module)))
        cuts = []
        channels = channel_cuts(model, name, picked.style) if isinstance(picked.style, Channels) else {}
        for key, parameter in own.items():
            if isinstance(picked.style, Experts):
                cuts.append(cut_of_experts(key, parameter, picked.style, world_size))
                continue
            dim = channels[key] if channels else _cut_dim(picked.style, layer_of(module), key)
            cuts.append(_cut(key, parameter, dim, picked.style, world_size, id(parameter) in seen))
            seen.add(id(parameter))
        count = None if rows is None else rows.get(name, 0)
        leader, needs_dx = leaders.get(name), name not in untrained
        if isinstance(picked.style, Experts):
            traffic = experts_traffic(picked.style, own, count, slots.get(name, 0), world_size, needs_dx)
            with _every_rank_is_asked():
                implementation = experts_implementation(picked.style, own, count, slots.get(name, 0), group)
        elif isinstance(picked.style, Channels):
            traffic = convolution_traffic(module, channels, elements.get(name), world_size, picked.style)
            implementation = "-"
        else:
            traffic = traffic_of(picked.style, layer_of(module), own, count, world_size, leader, needs_dx)
            with _every_rank_is_asked():
                implementation = _implementation(traffic.op, picked.style, layer_of(module), own, count, group)
        entries.append(
            Entry(
                name,
                kind_of(module),
                picked.style,
                tuple(cuts),
                picked.source,
                picked.reason,
                traffic.forward,
                traffic.backward,
                traffic.wire_bytes,
                implementation,
                tuple(other for other in aliases[id(module)] if other != name),
            )
        )
    entries, idle = _follow_ties(model, entries, world_size)
    values = dict(model.named_modules())
    numbers = {f"{n}.{a}" if n else a: (int(number_of(values[n], a)), local) for (n, a), local in attributes.items()}
    return ShardingPlan(
        type(model).__name__,
        world_size,
        bool(stream.blocks),
        tuple(entries),
        numbers,
        random,
        whole_draws,
        tuple(idle),
        tuple(stream.blocks),
        tuple(stream.whole),
        tuple(stream.local),
        stream.random,
        shared,
        tuple(norms.pairs),
        norms.reasons,
        stream.gathered_bytes * (world_size - 1) // world_size,
        notes,
        example,
        {f"{name}.{argument}" if name else argument: cut for (name, argument), cut in arguments.items()},
    )


def _follow_ties(model: nn.Module, entries: list[Entry], world_size: int) -> tuple[list[Entry], list[str]]:
    """Parameters that a replicated module shares with a cut one are cut there, too; the module does not use them."""
    held = {name: dict(module.named_parameters(recurse=False)) for name, module in model.named_modules()}
    cut: dict[int, ParameterCut] = {}
    for entry in entries:
        for part in entry.parameters:
            if part.dim is not None:
                cut[id(held[entry.path][part.name])] = part
    changed, idle = [], []
    for entry in entries:
        parts = []
        for part in entry.parameters:
            other = cut.get(id(held[entry.path][part.name]))
            if part.dim is None and other is not None:
                idle.append(entry.path)
                part = ParameterCut(part.name, part.shape, other.dim, other.local_shapes, part.itemsize, tied=part.tied)
            parts.append(part)
        if tuple(parts) != entry.parameters:
            why = "holds a parameter of a layer that is cut, and does not use it itself"
            entry = Entry(**vars(entry) | {"parameters": tuple(parts), "reason": why})
        changed.append(entry)
    return changed, idle


def _why_whole(module: nn.Module) -> str:
    kind = type(module).__name__
    return "a norm" if "Norm" in kind else f"no way to cut a {kind} is known"


def _cut_dim(style: Style, layer: Layer | None, name: str) -> int | None:
    transposed = layer is not None and layer.kind == "conv1d"
    if isinstance(style, Sliced):
        return None if name in dict(style.runs) else dict(style.parameters).get(name)
    if isinstance(style, Column):
        return 1 if transposed and name == "weight" else 0
    if isinstance(style, Row):
        return (0 if transposed else 1) if name == "weight" else None
    if isinstance(style, PartNorm):
        return 3 if style.response else 0  # [1, 1, 1, features]
    if isinstance(style, Vocabulary):
        return 0
    if isinstance(style, Heads):
        return 0 if not style.inner else 1 if name == "weight" else None
    return 1 if isinstance(style, Features) else None


def _cut(
    name: str, parameter: nn.Parameter, dim: int | None, style: Style, world_size: int, tied: bool
) -> ParameterCut:
    shape = tuple(parameter.shape)
    shapes = []
    features: tuple[int, ...] = ()
    if dim is not None:
        features = held(shape[dim], world_size)
        taken = isinstance(style, Channels) and style.taken and name == "bias"  # of the channels that it gives
        if isinstance(style, Column | Row | Heads | Channels | Sliced) and not taken:
            features = style.local_features(shape[dim], world_size)
    for rank in range(world_size):
        local = list(shape)
        if dim is not None:
            local[dim] = features[rank]
        shapes.append(tuple(local))
    return ParameterCut(name, shape, dim, tuple(shapes), parameter.element_size(), tied)


def traffic_of(
    style: Style,
    layer: Layer | None,
    parameters: Mapping[str, torch.Tensor],
    rows: int | None,
    world_size: int,
    leader: str | None = None,
    needs_dx: bool = True,
) -> Traffic:
    """Collectives of a style, with the bytes that a rank sends when all ranks exchange ``rows`` rows at best.

    ``leader``: the layer with which this one shares its input, and all that is sent for it.
    """
    weights = sum(p.numel() * p.element_size() for p in parameters.values())
    if isinstance(style, Sliced):
        packed = [parameters[name] for name, _ in style.runs if name in parameters]  # the others are buffers
        weights = sum(parameter.numel() * parameter.element_size() for parameter in packed)
    if isinstance(style, Column) and style.copied:  # of those alone gradients are summed
        places = copied_places(len(style.segments), style.copied, style.behind)
        copied = sum(size for size, place in zip(style.segments, places, strict=True) if place)
        weights = weights * copied // sum(style.segments)
    if isinstance(style, PartNorm):  # one number per row (or image), or two of each rank, in fp32 at least
        item = max(4, next(iter(parameters.values())).element_size())
        numbers = 2 * world_size if style.centred else 2
        once = None if rows is None else 2 * numbers * item * rows * (world_size - 1) // world_size
        if style.centred:
            return Traffic("all-gather of means and variances", "reduce-scatter of their gradients", once, None)
        what = "norms" if style.response else "squares"
        return Traffic(f"all-reduce of sums of {what}", "all-reduce of their gradient", once, None)
    if isinstance(style, Replicate) and style.summed_gradient and layer is not None:
        item = next(iter(parameters.values())).element_size()
        sent = None if rows is None else 2 * layer.out_features * item * rows * (world_size - 1) // world_size
        return Traffic("-", "all-reduce of dy", sent, None)
    if isinstance(style, Replicate | Sliced) or (layer is None and not isinstance(style, Heads)):
        of_parts = style.sequence_parallel if isinstance(style, Replicate) else isinstance(style, Sliced) and weights
        summed = bool(of_parts and parameters)
        once = 2 * weights * (world_size - 1) // world_size if summed else 0
        return Traffic("-", "all-reduce of dw" if summed else "-", once, None)
    item = next(iter(parameters.values())).element_size()
    if layer is None:  # attention as wide as what goes in
        wide_in = wide_out = next(iter(parameters.values())).shape[-1] * item
    else:
        wide_in, wide_out = layer.in_features * item, layer.out_features * item
    forward, backward = _collectives(style)
    if leader is not None:
        forward, backward = ([move for move in moves if move[1] not in ("x", "dx")] for moves in (forward, backward))
    if not needs_dx:
        along = getattr(style, "sequence_parallel", False)  # the op sends it, whoever wants it
        backward = [move for move in backward if move[1] != "dx" or (along and move[0] == "reduce-scatter")]
    passes = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    total = 0
    for collective, what in (*forward, *backward):
        width = weights if what == "dw" else (wide_in if what in ("x", "dx") else wide_out)
        total += passes[collective] * (width if what == "dw" else width * (rows or 0))
    sent = None if rows is None else total * (world_size - 1) // world_size
    op = None
    if isinstance(style, Column | CopiedHeads):
        op = "all_gather_matmul" if style.sequence_parallel else "matmul_all_reduce"
        op = "all_gather" if isinstance(style, Column) and style.gather_input else op
    elif isinstance(style, Row):
        scattered = style.sequence_parallel or style.scatter_unit > 0
        op = "matmul_reduce_scatter" if scattered else "matmul_all_reduce"
    elif isinstance(style, Vocabulary):
        op = "all_reduce"
    return Traffic(_words(forward, leader), _words(backward, leader), sent, op)


Moves = list[tuple[str, str]]


def _collectives(style: Style) -> tuple[Moves, Moves]:
    """(collective, of what) in forward and backward."""
    forward: Moves = []
    backward: Moves = []
    if isinstance(style, Column | Row) and style.summed_gradient:
        backward.append(("all-reduce", "dy"))
    if isinstance(style, Column | CopiedHeads):
        if style.sequence_parallel:
            forward.append(("all-gather", "x"))
            backward.append(("reduce-scatter", "dx"))
            if not (isinstance(style, Column) and style.save_gathered):
                backward.append(("all-gather", "x"))
        elif isinstance(style, Column) and style.gather_input:
            forward.append(("all-gather", "x"))
            backward.append(("reduce-scatter", "dx"))
        elif not isinstance(style, Column) or style.sum_input_gradient:
            backward.append(("all-reduce", "dx"))
        if isinstance(style, CopiedHeads) or style.copied:
            backward.append(("all-reduce", "dw"))
        elif style.gather_output:
            forward.append(("all-gather", "y"))
    elif isinstance(style, Row):
        scattered = style.sequence_parallel or style.scatter_unit > 0
        forward.append(("reduce-scatter" if scattered else "all-reduce", "y"))
        if scattered:
            backward.append(("all-gather", "dy"))
        if style.split_input:
            backward.append(("all-gather", "dx"))
    elif isinstance(style, Vocabulary):
        forward.append(("all-reduce", "y"))
    elif isinstance(style, Features) and style.gather_output:
        forward.append(("all-gather", "y"))
    elif isinstance(style, Heads):
        (forward if style.inner else backward).append(("all-reduce", "y" if style.inner else "dx"))
    return forward, backward


def _words(moves: Moves, leader: str | None) -> str:
    words = [f"{collective} of {what}" for collective, what in moves]
    return ", ".join([f"sent with {leader}", *words] if leader is not None else words) or "-"


@contextmanager
def _every_rank_is_asked() -> Iterator[None]:
    """The error of ranks that did not come names the call that they have to make."""
    try:
        yield
    except CommunicationError as error:
        advice = "every rank must call tpk.make_plan with a mesh, because the ranks agree on implementations"
        raise type(error)(f"{advice}: {error}", ranks=error.ranks) from error


def _implementation(
    op: str | None,
    style: Any,
    layer: Layer | None,
    parameters: Mapping[str, torch.Tensor],
    rows: int | None,
    group: DeviceMesh | None,
) -> str:
    """What runs: asked of the group, where there is one and the rows are known."""
    if op is None or layer is None:
        return "-"
    asked: str = style.implementation
    if asked != "auto" or group is None or group.size() == 1 or not rows:
        return asked
    weight = next(iter(parameters.values()))
    # Forward of a column layer without sequence parallelism sends nothing: the op is its gradient's.
    flipped = isinstance(style, Column | CopiedHeads) and op == "matmul_all_reduce"
    n, k = (layer.in_features, layer.out_features) if flipped else (layer.out_features, layer.in_features)
    if op == "all_reduce" and same_bits_of(group):  # an embedding gathers what the ranks looked up
        rows *= group.size()
        return explain("all_gather", m=rows, n=0, k=layer.out_features, dtype=weight.dtype, group=group).chosen
    if op == "all_reduce":
        return explain("all_reduce", m=rows, n=layer.out_features, k=0, dtype=weight.dtype, group=group).chosen
    if op == "all_gather":
        return explain(op, m=rows, n=0, k=layer.in_features, dtype=weight.dtype, group=group).chosen
    return explain(op, m=rows, n=n, k=k, dtype=weight.dtype, group=group).chosen
