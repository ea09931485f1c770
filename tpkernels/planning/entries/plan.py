"""The sharding plan: what happens to each module of a model, and why, as data to print, save and check.

It owns :class:`ShardingPlan`, its JSON form and its validation against a model.  :mod:`tpkernels.planning.planner`
finds a plan, and :mod:`tpkernels.sharding.apply` carries it out.

The JSON form holds numbers and names only, and reading it runs no code.  A digest over its contents shows a file that
was changed or cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from tpkernels.nn.digests import json_digest
from tpkernels.nn.host_generators import HOSTS
from tpkernels.planning.entries.plan_values import (
    check_keys,
    check_kinds,
    cut_result,
    dimensions,
    for_each_rank,
    is_count,
    is_count_or_none,
    is_flag,
    is_text,
    sizes,
    text,
    texts,
)
from tpkernels.planning.modules.layers import kind_of
from tpkernels.planning.modules.numbers import number_of, owner_of
from tpkernels.planning.style_names import style_from_dict, style_to_dict
from tpkernels.planning.styles import Column, CopiedHeads, Replicate, Row, Sliced, Style

__all__ = ["STRATEGIES", "Entry", "ParameterCut", "ShardingPlan"]

NO_DATA_FLOW = "no data flow: "
"""How the note of a plan begins that was made without."""
FORMAT, VERSION = "tpkernels.ShardingPlan", 8
STRATEGIES = ("auto", "rules")
_NEW_IN: dict[int, dict[str, Any]] = {
    8: {
        "statistics": {},
        "maxima": [],
        "statistic_bytes": 0,
        "draws_from": [],
        "cut_results": [],
        "result_bytes": 0,
        "gathered": {},
        "gathered_bytes": 0,
        "summed_arguments": [],
        "summed_bytes": 0,
        "argument_bytes": 0,
        "kept": {},
        "products": {},
        "product_bytes": 0,
        "states": {},
        "state_bytes": 0,
    },
    7: {"strategy": "auto"},
    6: {"by_weight": {}},
    5: {"arguments": {}},
    4: {"fused": [], "unfused": [], "example": ""},
}
"""What plans of earlier versions lack, and what they have of it; they do not say by which strategy they were made."""


@dataclass(frozen=True)
class ParameterCut:
    """One parameter: its shape, the dimension that is cut (None: whole on every rank), and each rank's shape."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    local_shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    tied: bool = False
    """Counted at another module already."""

    def bytes_on(self, rank: int) -> int:
        return self.itemsize * torch.Size(self.local_shapes[rank]).numel()

    @property
    def full_bytes(self) -> int:
        return self.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Entry:
    """What happens to one module."""

    path: str
    kind: str
    style: Style
    parameters: tuple[ParameterCut, ...]
    source: str
    """"override", "plan file", "tp_plan", "data flow", "samples", "rule" or "default"."""
    reason: str
    forward: str = "-"
    backward: str = "-"
    wire_bytes: int | None = 0
    """Sent by one rank in a forward and a backward pass over the example; None where the rows are not known."""
    implementation: str = "-"
    aliases: tuple[str, ...] = ()
    """Other names of the same module."""

    @property
    def is_replicated(self) -> bool:
        return isinstance(self.style, Replicate)


@dataclass(frozen=True)
class ShardingPlan:
    """All modules with parameters, in the model's order, and what else changes.

    ``print(plan)`` shows it as a table.
    """

    model: str
    """The class of the model."""
    world_size: int
    sequence_parallel: bool
    entries: tuple[Entry, ...]
    attributes: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Attributes of modules that count features or heads: the model's value, and that of each rank."""
    random: tuple[tuple[str, str], ...] = ()
    """Pairs of layers between which ranks draw different random numbers,"""
    whole_draws: tuple[str, ...] = ()
    """and modules that are called there and draw those that all ranks share."""
    idle_ties: tuple[str, ...] = ()
    """Modules that hold a tied parameter without using it themselves."""
    sequence_blocks: tuple[str, ...] = ()
    """With sequence parallelism: the modules that the sequence-sharded residual runs through."""
    whole_blocks: tuple[str, ...] = ()
    """Modules inside them that get the whole sequence."""
    local_blocks: tuple[str, ...] = ()
    """Modules inside them that work on a part of it as on all."""
    sequence_random: bool = False
    """Dropout works on the residual: ranks draw different random numbers for their parts."""
    shared: tuple[tuple[str, ...], ...] = ()
    """Layers that read the same tensor: one gather of it, or one sum of its gradient, is for all of them."""
    fused: tuple[tuple[str, str, float], ...] = ()
    """Row layers, and the norms that are computed together with their sums: row, norm, epsilon."""
    unfused: tuple[str, ...] = ()
    """Row layers without such a norm, and why."""
    residual_bytes: int | None = 0
    """With sequence parallelism: sent by one rank to make the residual whole where modules take it so."""
    notes: tuple[str, ...] = ()
    example: str = ""
    """The inputs for which bytes are counted, by name and shape."""
    arguments: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Arguments of modules (``attention.alibi``) of which each rank takes its heads' part: dimension, and all heads."""
    argument_bytes: int = 0
    """Sent by one rank to gather their gradients in a backward pass over the example."""
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Attributes in which modules keep parts for their next call (``block.state``): dimension, and whole size."""
    by_weight: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules whose code multiplies by weights of layers itself (``F.linear(x, self.qkv.weight)``), and the layers."""
    statistics: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Modules whose code takes sums, means or spreads over features that are cut: how many, and on each rank."""
    maxima: tuple[str, ...] = ()
    """Modules whose code takes the largest or smallest element of tensors that are cut."""
    statistic_bytes: int = 0
    """Sent by one rank for both in a forward and a backward pass over the example."""
    draws_from: tuple[str, ...] = ()
    """Generators besides torch's that the model draws random numbers from: "numpy", "python"; the ranks' are put in
    step."""
    cut_results: tuple[tuple[int, int, int], ...] = ()
    """Of what the model returns, what is gathered at the end: its number among the results, the dimension that is cut,
    and the size of that in the whole."""
    result_bytes: int = 0
    """Sent by one rank for these."""
    gathered: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Arguments of modules (``attention.memory.values``) that are gathered, as others take this rank's part: all
    features, and the unit that ranks have multiples of."""
    gathered_bytes: int = 0
    """Sent by one rank for these in a forward and a backward pass over the example."""
    summed_arguments: tuple[str, ...] = ()
    """Arguments of modules (``attention.reference_points``) that are whole and meet parts there: ranks sum their
    gradients."""
    summed_bytes: int = 0
    """Sent by one rank for these in a backward pass over the example."""
    products: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules whose code multiplies by parameters that are cut (``torch.einsum("ibh,hnd->ibnd", x, self.q)``), and
    these: ranks sum the gradient of x, or the result, as with columns and rows."""
    product_bytes: int = 0
    """Sent by one rank for these in a forward and a backward pass over the example."""
    states: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Arguments that modules write to (``attention.state[2]``), of which each rank reads and writes its part, and all
    have the whole: the dimension that is cut, and all features."""
    state_bytes: int = 0
    """Sent by one rank for these in a call of the example that has them."""
    strategy: str = "auto"
    """By which :func:`make_plan` found it: "auto" or "rules"."""

    def __str__(self) -> str:
        from tpkernels.planning.entries.plan_table import table

        return table(self)

    def __getitem__(self, path: str) -> Entry:
        for entry in self.entries:
            if path == entry.path or path in entry.aliases:
                return entry
        raise KeyError(f"the plan has no module {path!r}")

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Bytes of parameters that each rank holds."""
        return tuple(
            sum(cut.bytes_on(rank) for entry in self.entries for cut in entry.parameters if not cut.tied)
            for rank in range(self.world_size)
        )

    @property
    def full_bytes(self) -> int:
        """Bytes of parameters of the whole model."""
        return sum(cut.full_bytes for entry in self.entries for cut in entry.parameters if not cut.tied)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of parameters that every rank holds whole."""
        cuts = (cut for entry in self.entries for cut in entry.parameters if not cut.tied)
        return sum(cut.full_bytes for cut in cuts if cut.dim is None)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends in a forward and a backward pass over the example, on average over the ranks."""
        beside = (self.residual_bytes or 0) + self.statistic_bytes + self.result_bytes + self.gathered_bytes
        beside += self.product_bytes + self.state_bytes + self.summed_bytes + self.argument_bytes
        return beside + sum(entry.wire_bytes or 0 for entry in self.entries)

    @property
    def fallback(self) -> str:
        """Why the layers were taken one by one, each with whole tensors in and out; empty if the data flow is known."""
        return next((note for note in self.notes if note.startswith(NO_DATA_FLOW)), "")

    @property
    def styles(self) -> dict[str, Style]:
        """Styles by module name; shared modules appear under each of their names."""
        return {name: entry.style for entry in self.entries for name in (entry.path, *entry.aliases)}

    @property
    def cut_arguments(self) -> dict[str, dict[str, tuple[int, int]]]:
        """``arguments`` by module and name."""
        return _by_module(self.arguments)

    @property
    def gathered_arguments(self) -> dict[str, dict[str, tuple[int, int]]]:
        """``gathered`` by module and name."""
        return _by_module(self.gathered)

    @property
    def written_states(self) -> dict[str, dict[str, tuple[int, int]]]:
        """``states`` by module and name."""
        return _by_module(self.states)

    @property
    def arguments_to_sum(self) -> dict[str, list[str]]:
        """``summed_arguments`` by module."""
        found: dict[str, list[str]] = {}
        for key in self.summed_arguments:
            module, _, name = key.rpartition(".")
            found.setdefault(module, []).append(name)
        return found

    def validate(self, model: nn.Module) -> None:
        """Check that this plan is for ``model``: the same modules with parameters of the same shapes.

        Raises:
            ValueError: it is for another model; the message names the first differences.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        wrong = []
        for entry in self.entries:
            for name in (entry.path, *entry.aliases):
                if name not in modules:
                    wrong.append(f"there is no module {name!r}")
                elif kind_of(modules[name]) != entry.kind:
                    wrong.append(f"{name!r} is a {type(modules[name]).__name__}, not a {entry.kind}")
                else:
                    held = {key: tuple(p.shape) for key, p in modules[name].named_parameters(recurse=False)}
                    planned = {cut.name: cut.shape for cut in entry.parameters}
                    if held != planned:
                        wrong.append(f"{name!r} has parameters {held}, the plan {planned}")
        named = {name for entry in self.entries for name in (entry.path, *entry.aliases)}
        for name, module in modules.items():
            if name not in named and any(True for _ in module.parameters(recurse=False)):
                wrong.append(f"the plan has nothing about {name!r} ({type(module).__name__})")
        others = (
            *self.cut_arguments,
            *self.gathered_arguments,
            *self.written_states,
            *(key.rpartition(".")[0] for key in self.summed_arguments),
            *(key.rpartition(".")[0] for key in self.kept),
            *self.whole_draws,
            *self.statistics,
            *self.maxima,
            *(one for name, read in self.by_weight.items() for one in (name, *read)),
        )
        wrong += [f"there is no module {name!r}" for name in others if name not in modules]
        styles = self.styles
        for name, products in self.products.items():
            style = styles.get(name)
            cut = {one for one, _ in style.parameters} if isinstance(style, Sliced) else set()
            wrong += [f"{name!r} multiplies by {one!r}, which is not cut" for one in products if one not in cut]
        for key, (whole, _) in self.attributes.items():
            name, attribute = owner_of(key, modules)
            if name in modules and number_of(modules[name], attribute) != whole:
                wrong.append(f"{key} is {number_of(modules[name], attribute)!r}, the plan expects {whole}")
        if wrong:
            more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
            what = f"this plan is for a {self.model}, which the {type(model).__name__} given is not like"
            raise ValueError(f"{what}: {'; '.join(wrong[:3])}{more}")

    def to_json(self) -> str:
        """The plan as text; :meth:`from_json` reads it."""
        body = asdict(self)
        body["entries"] = [asdict(entry) | {"style": style_to_dict(entry.style)} for entry in self.entries]
        head = {"format": FORMAT, "version": VERSION}
        return json.dumps(head | {"digest": json_digest(body), "plan": body}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: no JSON, not a plan, another version, contents that were changed or are of the wrong kind.
        """
        try:
            document = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a sharding plan must be JSON; this is not, or was cut off: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f'a sharding plan must say "format": {FORMAT!r}')
        version = document.get("version")
        if version not in (VERSION, *(new - 1 for new in _NEW_IN)):
            raise ValueError(f"this plan has version {document.get('version')!r}; version {VERSION} is needed")
        body = document.get("plan")
        if not isinstance(body, dict) or json_digest(body) != document.get("digest"):
            raise ValueError("the plan's contents do not match its digest: the file was changed or damaged")
        try:
            lacking = [added for new, added in _NEW_IN.items() if new > version]
            return _plan_from(body | {key: value for added in lacking for key, value in added.items()})
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the plan's contents are not those of a plan: {error!r}") from None


def _by_module(arguments: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for key, numbers in arguments.items():
        module, _, name = key.rpartition(".")
        found.setdefault(module, {})[name] = numbers
    return found


_LISTS = (
    "whole_draws",
    "maxima",
    "idle_ties",
    "sequence_blocks",
    "whole_blocks",
    "local_blocks",
    "unfused",
    "notes",
    "draws_from",
    "summed_arguments",
)


def _plan_from(body: dict[str, Any]) -> ShardingPlan:
    check_keys("plan", body, ShardingPlan)
    check_kinds("plan", body, world_size=is_count, sequence_parallel=is_flag, sequence_random=is_flag)
    check_kinds("plan", body, residual_bytes=is_count_or_none, strategy=_is_strategy)
    check_kinds("plan", body, statistic_bytes=is_count, result_bytes=is_count, gathered_bytes=is_count)
    check_kinds("plan", body, product_bytes=is_count, state_bytes=is_count, summed_bytes=is_count)
    check_kinds("plan", body, argument_bytes=is_count)
    entries = []
    for item in body["entries"]:
        check_keys("entry", item, Entry)
        check_kinds("entry", item, forward=is_text, backward=is_text, wire_bytes=is_count_or_none)
        cuts = []
        for cut in item["parameters"]:
            check_keys("parameter", cut, ParameterCut)
            check_kinds("parameter", cut, name=is_text, dim=is_count_or_none, itemsize=is_count, tied=is_flag)
            local_shapes = tuple(sizes(shape) for shape in cut["local_shapes"])
            if len(local_shapes) != body["world_size"]:
                raise ValueError(f"{item['path']}.{cut['name']} has {len(local_shapes)} local shapes")
            cuts.append(ParameterCut(**cut | {"shape": sizes(cut["shape"]), "local_shapes": local_shapes}))
        known: dict[str, Any] = {"style": style_from_dict(item["style"]), "parameters": tuple(cuts)}
        said = {key: text(item[key]) for key in ("path", "kind", "source", "reason", "implementation")}
        entries.append(Entry(**{**item, **known, **said, "aliases": texts(item["aliases"])}))
    attributes = for_each_rank("attribute", body["attributes"], body["world_size"])
    statistics = for_each_rank("features of", body["statistics"], body["world_size"])
    for key, (whole, ranks) in statistics.items():
        if sum(ranks) != whole or 0 in ranks:
            raise ValueError(f"the features of {key} are {whole}, and those of its ranks {list(ranks)}")
    arguments, kept, states = (dimensions(body, key) for key in ("arguments", "kept", "states"))
    gathered = {}
    for key, cut in body["gathered"].items():
        if len(cut) != 2 or not all(map(is_count, cut)) or not 0 < cut[1] <= cut[0] or cut[0] % cut[1]:
            raise ValueError(f"gathered argument {key} must have features and a unit that divides them, got {cut!r}")
        gathered[text(key)] = tuple(cut)
    lists = {key: texts(body[key]) for key in _LISTS}
    random = tuple((text(opener), text(closer)) for opener, closer in body["random"])
    shared = tuple(texts(names) for names in body["shared"])
    fused = tuple((text(row), text(norm), float(epsilon)) for row, norm, epsilon in body["fused"])
    styles = {entry.path: entry.style for entry in entries}
    _check_shared(shared, styles)
    for row, norm, _ in fused:
        if not isinstance(styles.get(row), Row) or not isinstance(styles.get(norm), Replicate):
            raise ValueError(f"{row!r} and {norm!r} cannot be fused: they must be a row layer and a norm that is whole")
    if unknown := {*body["draws_from"]} - {*HOSTS}:
        raise ValueError(f"a plan draws from {list(HOSTS)}, not from {sorted(unknown)}")
    if body["world_size"] < 1:
        raise ValueError(f"world_size must be at least 1, got {body['world_size']!r}")
    found = {"entries": tuple(entries), "attributes": attributes, "random": random, "shared": shared, "fused": fused}
    by_weight, products = (
        {text(name): texts(some) for name, some in body[key].items()} for key in ("by_weight", "products")
    )
    found |= {"arguments": arguments, "model": text(body["model"]), "example": text(body["example"])}
    found |= {
        "by_weight": by_weight,
        "products": products,
        "statistics": statistics,
        "gathered": gathered,
        "kept": kept,
        "states": states,
    }
    found["cut_results"] = tuple(cut_result(cut, body["world_size"]) for cut in body["cut_results"])
    return ShardingPlan(**body | lists | found)


def _check_shared(shared: tuple[tuple[str, ...], ...], styles: Mapping[str, Style]) -> None:
    for names in shared:
        modes = {getattr(styles.get(name), "sequence_parallel", None) for name in names}
        columns = all(isinstance(styles.get(name), Column | CopiedHeads) for name in names)
        if len(names) < 2 or len(set(names)) < len(names) or not columns or len(modes) > 1:
            raise ValueError(f"{list(names)} cannot share an input: they must be column layers of one mode")


def _is_strategy(value: Any) -> bool:
    return isinstance(value, str) and value in STRATEGIES
