"""The plan for a Keras model, as data: what happens to each layer that has weights, and why.

It owns :class:`KerasPlan`, its table, its JSON form, and the check that a plan is one for a given model.
:mod:`tpkernels.integrations.keras.planner` finds a plan, :mod:`tpkernels.integrations.keras.parallel` carries it out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut
from tpkernels.integrations.keras.shadow import named_layers
from tpkernels.nn.digests import json_digest

__all__ = ["STYLES", "KerasPlan", "LayerPlan", "Numbers"]

FORMAT, VERSION = "tpkernels.KerasPlan", 1
STYLES = {
    "column": "cut by what it makes",
    "row": "cut by what it takes, summed",
    "column_gather": "cut by what it makes, gathered",
    "row_split": "takes its part of the input, summed",
    "copied": "whole; each rank uses the heads that its queries need",
    "vocabulary": "cut by rows, summed; as a head gathered",
    "whole": "whole on every rank",
}


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer.  ``name`` is that of the planner, ``path`` Keras's; ``cuts`` are by variable path."""

    name: str
    path: str
    kind: str
    style: str
    reason: str
    cuts: dict[str, Cut] = field(default_factory=dict)
    copied: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Of style "copied": the ranges of output features that each rank uses, in order, a head as often as needed."""
    sent: int | None = None
    """Bytes that a rank sends for it in a training step on the inputs of the plan; None: not known."""


@dataclass(frozen=True)
class Numbers:
    """An attribute of a layer, such as its number of heads: the whole model's value, and that of each rank."""

    name: str
    attribute: str
    whole: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class KerasPlan:
    """What :func:`tpkernels.integrations.keras.make_plan` found."""

    model: str
    world_size: int
    layers: tuple[LayerPlan, ...]
    variables: dict[str, tuple[int, ...]]
    """Shapes of all variables of the model, by path."""
    numbers: tuple[Numbers, ...] = ()
    random: tuple[str, ...] = ()
    """Layers that draw random numbers for a rank's own part."""
    summed: tuple[str, ...] = ()
    """Variables that are whole and meet parts: their gradients are summed."""
    notes: tuple[str, ...] = ()
    inputs: str = ""
    """Shapes and dtypes of the inputs for which bytes are counted."""

    @property
    def cuts(self) -> dict[str, Cut]:
        """By variable path."""
        return {path: cut for layer in self.layers for path, cut in layer.cuts.items()}

    def elements_on(self, rank: int) -> int:
        """How many numbers ``rank`` holds of the model's variables."""
        cuts = self.cuts
        return sum(
            prod(cuts[path].shape_on(rank)) if path in cuts else prod(shape) for path, shape in self.variables.items()
        )

    def __str__(self) -> str:
        rows = [("layer", "kind", "style", "per rank", "bytes/step", "why")]
        for layer in self.layers:
            per_rank = "/".join(map(str, next(iter(layer.cuts.values())).sizes)) if layer.cuts else "-"
            rows.append((layer.name or self.model, layer.kind, layer.style, per_rank, _bytes(layer), layer.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
        ]
        total = sum(map(prod, self.variables.values()))
        held = ", ".join(f"{self.elements_on(rank):,}" for rank in range(self.world_size))
        lines.append(f"{self.model} over {self.world_size} ranks: {total:,} numbers; on each rank {held}")
        lines.append(self._traffic())
        return "\n".join([*lines, *self.notes])

    def _traffic(self) -> str:
        if self.world_size == 1:
            return "one rank sends nothing"
        known = [layer.sent for layer in self.layers if layer.sent is not None]
        unknown = [layer.name for layer in self.layers if layer.sent is None]
        if not known:
            return "what the ranks send in a training step is not known: the backend chooses"
        said = f"each rank sends up to {sum(known):,} bytes in a training step on {self.inputs or 'its inputs'}"
        said += f", and what {len(unknown)} layers send, which is not known" if unknown else ""
        return f"{said}, beside what the optimizer gathers"

    def to_json(self) -> str:
        """The plan as JSON, with a digest by which a damaged file is noticed."""
        contents = self._contents()
        return json.dumps(contents | {"digest": json_digest(contents)}, indent=1)

    def _contents(self) -> dict[str, Any]:
        layers = [vars(one) | {"cuts": {p: c.to_json() for p, c in one.cuts.items()}} for one in self.layers]
        return {
            "format": FORMAT, "version": VERSION, "model": self.model, "world_size": self.world_size,
            "layers": json.loads(json.dumps(layers)), "variables": {p: list(s) for p, s in self.variables.items()},
            "numbers": json.loads(json.dumps([vars(one) for one in self.numbers])), "random": list(self.random),
            "summed": list(self.summed), "notes": list(self.notes), "inputs": self.inputs,
        }  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> KerasPlan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is no such file, of another version, or damaged.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"this is not a plan for a Keras model: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"this is not a plan for a Keras model: its format is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise ValueError(f"the plan has version {data.get('version')}, and this tpkernels reads {VERSION}")
        digest = data.pop("digest", None)
        if digest != json_digest(data):
            raise ValueError("the plan is damaged: its digest does not fit its contents")
        try:
            return cls._of(data)
        except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the plan's contents are not those of a plan: {error!r}") from None

    @classmethod
    def _of(cls, data: dict[str, Any]) -> KerasPlan:
        layers = []
        for one in data["layers"]:
            cuts = {path: Cut.from_json(cut) for path, cut in one.pop("cuts").items()}
            copied = tuple(tuple((int(start), int(stop)) for start, stop in pieces) for pieces in one.pop("copied"))
            layers.append(LayerPlan(**one, cuts=cuts, copied=copied))
        numbers = tuple(Numbers(**one | {"ranks": tuple(one["ranks"])}) for one in data["numbers"])
        return cls(
            data["model"], data["world_size"], tuple(layers), {p: tuple(s) for p, s in data["variables"].items()},
            numbers, tuple(data["random"]), tuple(data["summed"]), tuple(data["notes"]),
            data.get("inputs", ""),
        )  # fmt: skip

    def validate(self, model: Any, world_size: int) -> None:
        """Refuse a plan that is for another model or another number of ranks.

        Raises:
            ValueError: says what differs first.
        """
        if self.world_size != world_size:
            raise ValueError(f"the plan is for {self.world_size} ranks, and there are {world_size}")
        shapes = {variable.path: backend.plain_shape(variable) for variable in model.variables}
        if shapes != self.variables:
            missing = sorted(set(self.variables) - set(shapes)) or sorted(set(shapes) - set(self.variables))
            unlike = [path for path, shape in self.variables.items() if shapes.get(path, shape) != shape]
            first = missing[0] if missing else unlike[0]
            said = "is in one of the two only" if missing else f"is {self.variables[first]} there, {shapes[first]} here"
            raise ValueError(f"the plan is not for this {type(model).__name__}: variable {first!r} {said}")
        layers = named_layers(model)
        names = [*(one.name for one in self.layers), *(one.name for one in self.numbers), *self.random]
        for name in names:
            if name not in layers:
                raise ValueError(f"the plan is not for this {type(model).__name__}: there is no layer {name!r}")
        for one in self.layers:
            if (
                one.style in ("column", "copied")
                and getattr(layers[one.name], "activity_regularizer", None) is not None
            ):
                raise ValueError(
                    f"the plan is not for this {type(model).__name__}: layer {one.name!r} has an activity regularizer, "
                    "which would count this rank's part of its output alone"
                )


def _bytes(layer: LayerPlan) -> str:
    if layer.sent is None:
        return "?"
    return f"{layer.sent:,}" if layer.sent else "-"
