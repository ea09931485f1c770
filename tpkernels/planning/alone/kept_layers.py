"""Layers that stay whole in any surroundings, and why."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from tpkernels.ops.checks import DTYPES
from tpkernels.planning.alone.single_layers import smallest_cut
from tpkernels.planning.alone.whole_in_out import READ
from tpkernels.planning.modules.layers import Layer, unswappable
from tpkernels.planning.modules.source_reads import maybe_read
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.splits import divisor

__all__ = ["kept_layers"]


def kept_layers(
    model: nn.Module,
    layers: Mapping[str, Layer],
    world_size: int,
    observation: Observation | None,
    tied: Container[str],
    *,
    parts: bool,
) -> dict[str, str]:
    """The reason of each.

    A layer that no example calls is cut by itself, where no code reads its weight, as far as the source says; but not
    if it might be given ``parts`` of a sequence.
    """
    recording = None if observation is None else observation.recording
    followed = observation is not None and observation.followed
    unseen = set() if recording is None else {n for n in layers if n not in recording.layer_rows and n not in tied}
    read = maybe_read(model) if unseen or not followed else {}
    kept: dict[str, str] = {}
    for name, layer in layers.items():
        module = model.get_submodule(name)
        weight: Any = module.weight
        why = unswappable(module)
        if why is not None:
            kept[name] = why
        elif weight.dtype not in DTYPES:
            kept[name] = f"has weights of {weight.dtype}"
        elif recording is not None and name in recording.direct:
            kept[name] = READ
        elif name in read and (name in unseen or not followed):
            kept[name] = f"has a weight that the code of {read[name]} may use without calling the module"
        elif name in unseen and parts:
            kept[name] = "is not called by the example"
        elif smallest_cut(layer) < divisor(world_size):
            kept[name] = f"has fewer features ({smallest_cut(layer)}) than there are ranks"
    return kept
