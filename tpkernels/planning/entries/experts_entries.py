"""Entries of a plan for modules of experts: every rank's shapes, what is sent, and the implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.ops.explain import explain
from tpkernels.partition import chunk_sizes
from tpkernels.planning.entries.plan import ParameterCut
from tpkernels.planning.styles import Experts

__all__ = ["Traffic", "cut_of_experts", "experts_implementation", "experts_traffic"]

_OP, _DEALT_OP = "grouped_matmul_all_reduce", "grouped_matmul_combine"
_DEALT = "to the experts and back, all-gather"


@dataclass(frozen=True)
class Traffic:
    """What one module sends: names of the collectives, and bytes of one rank in forward and backward."""

    forward: str
    backward: str
    wire_bytes: int | None
    op: str | None
    """The op whose implementation is chosen."""


def cut_of_experts(name: str, parameter: nn.Parameter, style: Experts, world_size: int) -> ParameterCut:
    """How a parameter of the experts is cut: gate and up alike."""
    if style.dealt:
        whole = tuple(parameter.shape)
        dealt = tuple((size, *whole[1:]) for size in chunk_sizes(whole[0], world_size))
        return ParameterCut(name, whole, 0, dealt, parameter.element_size())
    layout, shape = style.layout, tuple(parameter.shape)
    bias = name.endswith("_bias")
    dim: int | None = 1 if bias else layout.features
    width = 2 if layout.gate in ("halves", "pairs") else 1
    if name.removesuffix("_bias") == layout.last:
        dim, width = None if bias else 3 - layout.features, 1
    shapes = [shape] * world_size
    if dim is not None:
        sizes = chunk_sizes(shape[dim] // width, world_size)
        shapes = [(*shape[:dim], width * size, *shape[dim + 1 :]) for size in sizes]
    return ParameterCut(name, shape, dim, tuple(shapes), parameter.element_size())


def experts_traffic(
    style: Experts, parameters: Mapping[str, Tensor], tokens: int | None, slots: int, world_size: int, needs_dx: bool
) -> Traffic:
    """All-reduces of the tokens that come out, of the gradient of those that go in, and of that of the routing.

    Where experts are dealt out, tokens travel to them and back, and then to everybody: how many follows from the
    routing.
    """
    if style.dealt:
        return Traffic(_DEALT, f"{_DEALT}, of dy, dx and dr", None, _DEALT_OP)
    if style.call == "sorted":
        weight = parameters[style.first]
        takes, gives = (weight.shape[dim] for dim in (3 - style.layout.features, style.layout.features))
        row = (gives + 2 * needs_dx * takes) * weight.element_size()
        sent = None if tokens is None else tokens * row * (world_size - 1) // world_size
        return Traffic("all-gather of y", "all-reduce of dx" if needs_dx else "-", sent, None)
    routed = style.call in ("routed", "all") and not style.behind  # behind a module the weights meet whole rows
    backward = (["dx"] if needs_dx else []) + (["dr"] if routed else [])
    down = parameters[style.last]
    words = f"all-reduce of {', '.join(backward)}" if backward else "-"
    sent = None
    if tokens is not None:
        hidden = down.shape[2 if style.transposed else 1] * down.element_size()
        sent = ((slots if style.behind else tokens) + needs_dx * tokens) * hidden
        sent += slots * max(4, down.element_size()) if routed else 0  # summed in fp32, or fp64
        sent = 2 * sent * (world_size - 1) // world_size
    return Traffic("all-reduce of y", words, sent, _OP)


def experts_implementation(
    style: Experts, parameters: Mapping[str, Tensor], tokens: int | None, slots: int, group: DeviceMesh | None
) -> str:
    """What runs: asked of the group, where there is one and the tokens are known."""
    if style.call == "sorted":
        return "-"
    if style.implementation != "auto" or group is None or group.size() == 1 or not tokens:
        return style.implementation
    shape = parameters[style.last].shape
    experts, n, k = (shape[0] // style.rows, shape[1], style.rows) if style.rows else shape
    n, k = (k, n) if style.transposed else (n, k)
    dtype = parameters[style.last].dtype
    op = _DEALT_OP if style.dealt else _OP
    tokens = slots if style.behind else tokens
    return explain(op, m=tokens, n=n, k=k, dtype=dtype, group=group, experts=experts, top_k=slots // tokens).chosen
