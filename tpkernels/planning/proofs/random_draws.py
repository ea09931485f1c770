"""Where dropout works on parts: between which layers ranks must draw different random numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.trace import Recording

__all__ = ["may_drop", "random_pairs"]


def random_pairs(observation: Observation, noisy: Collection[Group]) -> list[tuple[str, str]]:
    """Of groups with such draws: pairs of the first column that runs, and of the row that ends the group; or of the
    parameters in their place."""
    column = {name: group for group in noisy for name in (*group.columns, *group.multiplied)}
    row = {name: group for group in noisy for name in (*group.rows, *group.summing) if name not in group.scattered}
    opened: dict[Group, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for name in (name for _, recording in observation.firsts for name in _calls(recording)):
        if name in row and (opener := opened.pop(row[name], None)) is not None:
            pairs[opener, name] = None
        if name in column:
            opened.setdefault(column[name], name)
    return list(pairs)


def may_drop(shadow: Shadow, scope: str) -> bool:
    """Without a run in training mode: whether anything inside of ``scope`` is called dropout and is not 0."""
    for name, module in shadow.modules.items():
        if name == scope or name.startswith(f"{scope}." if scope else ""):
            values = [value for key, value in vars(module).items() if "drop" in key or key == "p"]
            if any(isinstance(value, float) and value > 0 for value in values):
                return True
    return False


def _calls(recording: Recording) -> Iterator[str]:
    """Layers, what works by channels, and parameters that code multiplies by, in the order of their calls."""
    for number, event in enumerate(recording.events):
        if number in recording.product_calls:
            yield recording.product_calls[number].name
        if number in recording.channel_calls:
            yield recording.channel_calls[number].name
        if event.layer is not None:
            yield event.layer
