"""Parameters that several modules share: layers that hold one are cut alike, or stay whole."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from torch import nn

from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.styles import Column, Experts, Features, Replicate, Row, Style, Vocabulary

__all__ = ["are_twins", "cut_idle", "idle_twins", "tie_kind", "tied_modules", "untie"]


def tie_kind(style: Style) -> int | None:
    """In which way a weight is cut, in one piece and by elements: layers of one kind can share one weight."""
    if isinstance(style, Row):
        return 1 if style.unit == 1 and not style.segments else None
    if isinstance(style, Features):
        return 2  # of a table: its second dimension, which no linear layer shares with it
    rows = isinstance(style, Vocabulary) or (isinstance(style, Column) and not style.segments and style.unit == 1)
    return 0 if rows else None


def tied_modules(modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Modules that share a parameter with others, each with these others."""
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {name: names for names in owners.values() if len(names) > 1 for name in names}


def are_twins(modules: Mapping[str, nn.Module], names: Collection[str]) -> bool:
    """Whether each of these modules holds the same parameters, under the same names, and nothing else does."""
    first, *others = (dict(modules[name].named_parameters(recurse=False)) for name in names)
    alike = all(one.keys() == first.keys() and all(one[key] is first[key] for key in first) for one in others)
    held = {id(parameter) for parameter in first.values()}
    owners = {name for name, module in modules.items() if held & {id(p) for p in module.parameters(recurse=False)}}
    return alike and owners == {*names}


def idle_twins(
    modules: Mapping[str, nn.Module], layers: Mapping[str, Layer], called: Container[str], linear: Container[str]
) -> dict[str, list[str]]:
    """Layers that are called and share their weight with others that are not, with these: they may be cut like it.

    These are some of the ``linear`` ones, and tables of which one alone is called.  ``called``: also those that may not
    be cut so.
    """
    found: dict[str, list[str]] = {}
    for name, owners in tied_modules(modules).items():
        idle = [owner for owner in owners if owner not in called]
        tables = all(owner in layers and layers[owner].kind == "embedding" for owner in owners)
        if name in called and idle and (name in linear or (tables and len(idle) == len(owners) - 1)):
            found[name] = idle
    return found


def cut_idle(chosen: dict[str, Chosen], idle: Mapping[str, list[str]]) -> None:
    """Cut idle layers as those that share their weight and are cut with others; who calls one gives and gets whole
    tensors."""
    whole: dict[type[Style], Style] = {
        Column: Column(gather_output=True), Row: Row(split_input=True), Features: Features(gather_output=True)
    }  # fmt: skip
    for name, twins in idle.items():
        known = chosen.get(name)
        if known is not None and known.source != "override" and type(known.style) in whole:
            for twin in twins:
                chosen.setdefault(twin, Chosen(whole[type(known.style)], "data flow", f"tied to {name}, and idle"))


def untie(
    modules: Mapping[str, nn.Module],
    layers: Mapping[str, Layer],
    chosen: dict[str, Chosen],
    direct: Container[str] | None,
) -> None:
    """Cut tied weights alike, by vocabulary or as experts are, or keep them whole; a layer may have two ties (weight,
    bias).

    Args:
        direct: modules whose parameters the model reads past them, as the data flow shows; None without one.

    Raises:
        ValueError: an override asks for something else.
    """
    while _untie_once(modules, layers, chosen, direct):
        pass


def _untie_once(
    modules: Mapping[str, nn.Module],
    layers: Mapping[str, Layer],
    chosen: dict[str, Chosen],
    direct: Container[str] | None,
) -> bool:
    """Whether a layer that was to be cut stays whole now, so that others with ties to it must, too."""
    before = {name: choice.style for name, choice in chosen.items()}
    for owners in tied_modules(modules).values():
        styles = {owner: chosen[owner].style for owner in owners if owner in chosen}
        are_layers = all(owner in layers or _is_idle(owner, modules, layers, direct) for owner in owners)
        kinds = {tie_kind(style) for style in styles.values()}
        by_second = kinds in ({1}, {2}) and len(styles) == len(owners)
        alike = are_layers and (kinds <= {0} or by_second)
        alike = alike or (_same_experts(styles) and len(styles) == len(owners) and are_twins(modules, owners))
        conv = any(owner in layers and layers[owner].kind == "conv1d" for owner in owners)
        if alike and not conv:
            continue
        for owner in owners:
            old = chosen.get(owner)
            others = ", ".join(other for other in owners if other != owner)
            if old is not None and old.source == "override" and not isinstance(old.style, Replicate):
                raise ValueError(
                    f"the override of {owner!r} conflicts with its weight being tied to that of {others}: override "
                    'all of them, a table by "vocabulary" and a head by "column_gather"'
                )
            source = "default" if old is None or old.source != "override" else "override"
            chosen[owner] = Chosen(Replicate(), source, f"tied to {others}, which stays whole")
    return before != {name: choice.style for name, choice in chosen.items()}


def _same_experts(styles: Mapping[str, Style]) -> bool:
    kinds = {*styles.values()}
    return len(kinds) == 1 and isinstance(kinds.pop(), Experts)


def _is_idle(
    name: str, modules: Mapping[str, nn.Module], layers: Mapping[str, Layer], direct: Container[str] | None
) -> bool:
    """Whether only layers read the parameters that the module holds, as far as the data flow shows."""
    if direct is None:
        return False
    held = {id(parameter) for parameter in modules[name].parameters(recurse=False)}
    readers = [n for n in layers if held & {id(p) for p in modules[n].parameters(recurse=False)}]
    return bool(readers) and not any(reader in direct for reader in readers)
