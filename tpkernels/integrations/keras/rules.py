"""Plans without a trace: each layer by its own sizes, for backends on which values are right however they are laid out.

It owns the rule of thumb of Keras's own tensor parallelism (:func:`analyze_dense_layer`) and the configuration that is
made of a plan (:func:`get_default_config`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.actions import Action, Split, action_of
from tpkernels.integrations.keras.cuts import Cut, even_cut
from tpkernels.integrations.keras.plan import KerasPlan, LayerPlan
from tpkernels.integrations.keras.planner import EXPANSION, check_built, check_count, linear_cuts, make_plan
from tpkernels.integrations.keras.shadow import equation_of, named_layers
from tpkernels.integrations.keras.tables import table_cuts, why_table_stays_whole

__all__ = ["DefaultConfig", "analyze_dense_layer", "get_default_config", "rules_plan"]


def analyze_dense_layer(layer: Any) -> str:
    """What a Dense or EinsumDense layer is by its sizes, with features flattened.

    "up_projection" makes more than 1.5 times what it takes, "down_projection" takes more than 1.5 times what it makes;
    exactly 1.5 is neither.  Everything else, other layers included, is "generic_dense".

    Examples:
        >>> dense = keras.layers.Dense(32)
        >>> dense.build((None, 8))
        >>> tpk.keras.analyze_dense_layer(dense)
        'up_projection'

    Raises:
        ValueError: it is no Keras layer.
    """
    if not isinstance(layer, backend.keras_module().layers.Layer):
        raise ValueError(f"layer must be a layer of Keras, got {type(layer).__name__}")
    equation = equation_of(layer) if layer.built else "is not built"
    if isinstance(equation, str):
        return "generic_dense"
    if equation.out_features > EXPANSION * equation.in_features:
        return "up_projection"
    return "down_projection" if equation.in_features > EXPANSION * equation.out_features else "generic_dense"


@dataclass(frozen=True)
class DefaultConfig:
    """What each rank has of which variable (by its exact path), and what becomes of a layer's outputs (by its path)."""

    state_rules: dict[str, Action] = field(default_factory=dict)
    output_rules: dict[str, dict[int, Action]] = field(default_factory=dict)


def get_default_config(model: Any, device_ids: Sequence[str]) -> DefaultConfig:
    """The plan for as many ranks as there are devices, as rules; on torch it is the one that :func:`make_plan` proves.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(8)])
        >>> config = tpk.keras.get_default_config(model, ["cpu:0", "cpu:1"])
        >>> list(config.output_rules.values())
        [{0: Sum(world_size=2)}]

    Raises:
        ValueError: no devices; otherwise as :func:`make_plan`.
    """
    if not isinstance(device_ids, list | tuple) or not device_ids:
        raise ValueError(f"device_ids must be a list of at least one device, got {device_ids!r}")
    count = len(device_ids)
    on_torch = backend.keras_module().config.backend() == "torch"
    plan = make_plan(model, count) if on_torch else rules_plan(model, count)
    states: dict[str, Action] = {path: _split(path, cut, count) for path, cut in plan.cuts.items()}
    outputs = {
        layer.path: {0: action}
        for layer in plan.layers
        if layer.style != "whole" and (action := action_of(layer.style, count)) is not None
    }
    return DefaultConfig(states, outputs)


def _split(path: str, cut: Cut, world_size: int) -> Split:
    """The action that cuts as ``cut`` does.

    Raises:
        ValueError: the variable is packed, and several of its runs are cut.
    """
    size = cut.shape[cut.dim]
    for unit in range(1, size + 1):
        if size % unit == 0 and even_cut(cut.shape, cut.dim, world_size, unit=unit) == cut:
            return Split(world_size, cut.dim, unit)
    raise ValueError(f"{path} is packed: its {len(cut.ranges[0])} runs are cut one by one, which no Split says")


def rules_plan(model: Any, n: int) -> KerasPlan:
    """Each layer by itself; on any backend.

    Raises:
        ValueError: the model is not built, ``n`` is less than 1, or nothing can be cut.
    """
    check_count("n", n)
    check_built(model)
    layers = named_layers(model)
    entries = []
    for name, layer in layers.items():
        if any(backend.plain_shape(variable) for variable in backend.weights_of(layer)):
            entries.append(_entry(name, layer, n, layers))
    if n > 1 and all(entry.style == "whole" for entry in entries):
        raise ValueError(f"nothing of {type(model).__name__} can be cut over {n} ranks: use fewer")
    variables = {variable.path: backend.plain_shape(variable) for variable in model.variables}
    return KerasPlan(type(model).__name__, n, tuple(entries), variables)


def _entry(name: str, layer: Any, n: int, layers: dict[str, Any]) -> LayerPlan:
    def entry(style: str, reason: str, cuts: dict[str, Cut] | None = None) -> LayerPlan:
        return LayerPlan(name, layer.path or layer.name, type(layer).__name__, style, reason, cuts or {})

    equation = equation_of(layer)
    if isinstance(equation, str):
        cuts = table_cuts(layer, n)
        if cuts is None:
            return entry("whole", equation)
        why = why_table_stays_whole(layer, n, layers.values())
        return entry("whole", why) if why else entry("vocabulary", "by its rows", cuts)
    kind = analyze_dense_layer(layer)
    row = kind == "down_projection"
    if kind == "generic_dense" and len(equation.contracted) != len(equation.made):
        row = len(equation.contracted) > len(equation.made)  # heads are merged, as attention does at its end
    letter = (equation.contracted if row else equation.made)[0]
    if equation.sizes[letter] < n:
        return entry("whole", f"has fewer parts ({equation.sizes[letter]}) than there are ranks")
    cuts = linear_cuts(layer, equation, n, made=not row)
    return entry("row_split" if row else "column_gather", kind.replace("_", " "), cuts)
