"""Which norms are computed together with the sum over the ranks before them, and why others are not.

It owns the proof, on the recordings of the whole model.  In every call of a row layer, in every mode:

- its result goes into one addition of a tensor of the same shape and into nothing else, and no other layer is called
  between the two, so that ranks sum in one order whatever looks at the result;
- the first module that the sum is given to, alone and unchanged, is one and the same norm;
- that norm has one parameter, a vector along the last dimension, and is RMS norm: on random numbers its own code gives
  what the formula gives, in value and in gradient, with an epsilon that is among the numbers its code uses.

A model that takes another path at run time still computes the right result (:mod:`tpkernels.nn.fused_norm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tpkernels.planning.modules.part_norms import KnownNorm, find_rms, numbers_in
from tpkernels.planning.runs.events import Event, Opaque, Shape
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.tensors import tensors_in
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.styles import Replicate, Row, Style

__all__ = ["FusedNorms", "find_fused_norms"]

aten = torch.ops.aten


@dataclass
class FusedNorms:
    """The pairs, and why there are no more."""

    pairs: list[tuple[str, str, float]] = field(default_factory=list)
    """Row, norm, and the epsilon of the norm."""
    refused: dict[str, str] = field(default_factory=dict)
    """Rows whose sum has no such norm behind it, and the reason."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each reason."""
        rows: dict[str, list[str]] = {}
        for row, reason in self.refused.items():
            rows.setdefault(reason, []).append(row)
        return tuple(
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
            for reason, names in rows.items()
        )


class _Unlike(Exception):
    """Why a row is not followed by a norm."""


def find_fused_norms(observation: Observation | None, styles: Mapping[str, Style], local: Sequence[str]) -> FusedNorms:
    """Pairs of rows and norms; none where nothing was recorded.

    Args:
        local: with sequence parallelism the modules that work on a part of the sequence.
    """
    found = FusedNorms()
    if observation is None or observation.shadow is None or observation.recording is None:
        return found
    norms: dict[str, KnownNorm | str] = {}
    for row, style in styles.items():
        if not isinstance(style, Row) or style.scatter_unit or style.segments:
            continue
        if row in observation.recording.rows_unknown:
            continue
        try:
            calls = [
                (norm, scalars)
                for _, recording in observation.recordings
                for norm, scalars in _followers(recording, row, observation.shadow.modules)
            ]
            names = {norm for norm, _ in calls}
            if not names:
                raise _Unlike("it is not called by the example")
            if len(names) > 1:
                raise _Unlike("its sum goes to one norm in one call and to another one in the next")
            (norm,) = names
            if style.sequence_parallel and norm not in local:
                raise _Unlike("the norm behind its sum takes the whole sequence")
            summed = isinstance(own := styles.get(norm), Replicate) and own.sequence_parallel
            if summed != style.sequence_parallel:
                raise _Unlike("the gradient of the norm behind its sum is summed for other calls of it")
            if norm not in norms:
                candidates = {number for _, scalars in calls for number in scalars}
                norms[norm] = find_rms(observation.shadow.modules[norm], sorted(candidates))
            known = norms[norm]
            if isinstance(known, str):
                raise _Unlike(f"the {type(observation.shadow.modules[norm]).__name__} behind its sum {known}")
            found.pairs.append((row, norm, known.epsilon))
        except _Unlike as reason:
            found.refused[row] = str(reason)
    return found


def _followers(recording: Recording, row: str, modules: Mapping[str, nn.Module]) -> list[tuple[str, list[float]]]:
    """The norm behind each call of ``row``, and the numbers that its code uses."""
    found = []
    events = recording.events
    for index, event in enumerate(events):
        if event.layer != row:
            continue
        result = (id(recording), index, 0)
        users = [at for at, other in enumerate(events) if result in other.sources]
        if result in recording.results:
            raise _Unlike("its result leaves the model")
        if len(users) != 1:
            raise _Unlike(f"its result goes into {len(users)} ops, not into one addition")
        (at,) = users
        if not _is_addition(events[at]):
            what = events[at].layer or _name(events[at].packet)
            raise _Unlike(f"its result goes into {what}, not into an addition of a tensor of its shape")
        between = [other for other in events[index + 1 : at] if other.layer is not None or _is_opaque(other)]
        if between:
            raise _Unlike("other layers are called before its result is added")
        sums = (id(recording), at, 0)
        if any(_writes(other) and other.sources[:1] == (sums,) for other in events):
            raise _Unlike("its sum with the residual is written to")
        found.append(_norm_of(recording, sums, at, modules))
    return found


def _is_addition(event: Event) -> bool:
    if event.packet is not aten.add or event.kwargs or len(event.whole) != 2:
        return False
    return all(isinstance(given, Shape) and given == event.outputs[0] for given in event.whole)


def _is_opaque(event: Event) -> bool:
    return isinstance(event.packet, Opaque)


def _writes(event: Event) -> bool:
    name = _name(event.packet)
    return name.endswith("_") and not name.endswith("__")


def _name(packet: object) -> str:
    return getattr(packet, "__name__", str(packet))


def _norm_of(
    recording: Recording, sums: tuple[int, int, int], at: int, modules: Mapping[str, nn.Module]
) -> tuple[str, list[float]]:
    """The first norm that is called with the sum made by event ``at`` and with nothing else."""
    taking = [scope for scope in recording.scopes if scope.stop > scope.start > at and _takes(recording, scope, sums)]
    if not taking:
        raise _Unlike("no module takes its sum with the residual alone")
    scope = min(taking, key=lambda scope: (scope.start, scope.stop))  # a block may be given its norm's input
    module = modules[scope.name]
    own = dict(module.named_parameters())
    if list(own) != ["weight"] or own["weight"].dim() != 1 or "weight" not in module._parameters:
        raise _Unlike(f"what takes its sum is a {type(module).__name__}, not a norm with one weight and no bias")
    if any(True for _ in module.buffers()) or any(True for _ in module.children()):
        raise _Unlike(f"the {type(module).__name__} behind its sum holds more than a weight")
    if own["weight"].shape[0] != recording.events[at].outputs[0][-1]:
        raise _Unlike(f"the {type(module).__name__} behind its sum is not one over all features")
    return scope.name, numbers_in(recording.events[scope.start : scope.stop])


def _takes(recording: Recording, scope: Scope, sums: tuple[int, int, int]) -> bool:
    given = tensors_in((scope.args, scope.kwargs))
    alone = len(scope.args) == 1 and not scope.kwargs and isinstance(scope.args[0], Tensor)
    return alone and len(given) == 1 and recording.source(given[0]) == sums
