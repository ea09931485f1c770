"""Layers of proven groups whose weight the model's own code would no longer find in one piece: they are not cut so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.modules.source_reads import maybe_read
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import has_places

__all__ = ["shown_in_another_shape"]


def shown_in_another_shape(
    observation: Observation, proven: Mapping[Group, Proof], model: nn.Module, layers: Mapping[str, Layer]
) -> dict[str, str]:
    """Layers that would keep their weight by heads, and whose weight the model's code asks for its shape, or may ask
    where no run came along; a packed layer has an answer."""
    assert observation.shadow is not None
    read = maybe_read(model) | dict.fromkeys(observation.shadow.asked, "the model")
    recordings = [recording for _, recording in observation.recordings]
    return _kept_in_parts(recordings, proven, observation.shadow.scaled) | {
        name: f"has a weight that the code of {read[name]} may ask for its shape"
        for proof, name in ((proof, name) for group, proof in proven.items() for name in (*group.columns, *group.rows))
        if name in read and (proof.pieces or proof.copies or any(map(has_places, _runs(layers[name], name, proof))))
    }


def _kept_in_parts(
    recordings: Iterable[Recording], proven: Mapping[Group, Proof], scaled: Iterable[str]
) -> dict[str, str]:
    """Layers that are read by weight, or ``scaled``, and would have no single one."""
    read = {name for recording in recordings for names in recording.by_weight.values() for name in names}
    read |= set(scaled)
    return {
        name: "has a weight that the model's code multiplies by itself, and would be kept in several parts"
        for proof in proven.values()
        for name, sizes in proof.segments.items()
        if name in read and (len(sizes) > 1 or name in proof.copies)
    }


def _runs(layer: Layer, name: str, proof: Proof) -> tuple[int, ...]:
    return proof.segments.get(name, (layer.in_features,))
