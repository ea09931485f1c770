"""The state of a ``torch.optim`` optimizer in terms of the original parameters, for any number of ranks to load.

It owns what belongs to which original, and the way back.  A slot (``exp_avg``) with the shape of its parameter is cut
and packed as the parameter is, so the parts of a packed parameter's slot make up one tensor.  A slot of another shape
(Adafactor's factors) stays one tensor per part, and fits only where the parameter is packed alike and has no dimension
for heads.  A slot of one element (``step``), and whatever is not a tensor, is a value.

It refuses optimizers over other parameters than the model's, and slots that are neither tensors nor plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpkernels.nn.gathering import gathered
from tpkernels.state.originals import Original, Part, unique

__all__ = ["Slot", "described", "groups_of", "new_slots", "options_for", "revived", "slots_of"]

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what."""

Values = dict[str, dict[str, Any]]
"""Plain values by original name and slot."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the optimizer: an original of its own (name, shape, dtype, parts)."""

    name: str
    """Of the slot, ``exp_avg``."""
    of: Original
    """The parameter."""
    parameters: tuple[Tensor, ...]
    """Of the parallel model, one for each part of ``tensor``."""
    tensor: Original


def groups_of(optimizer: Optimizer, originals: Mapping[str, Original]) -> list[dict[str, Any]]:
    """The parameter groups: options, and the originals in them under ``"params"``.

    Raises:
        ValueError: parameters that are not the model's, a packed one only in part, options that are no plain values.
    """
    owners = {id(part.tensor): original for original in unique(originals) for part in original.parts}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        names: dict[str, int] = {}
        for parameter in group["params"]:
            owner = owners.get(id(parameter))
            if owner is None:
                raise ValueError(
                    f"group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's: make the optimizer from model.parameters(), after tpk.parallelize"
                )
            names[owner.name] = names.get(owner.name, 0) + 1
        for name, count in names.items():
            if count != len(originals[name].parts):
                raise ValueError(f"group {index} of the optimizer has {count} of the parts that make up {name!r}")
        options = {key: plain(f"option {key!r}", value) for key, value in group.items() if key != "params"}
        options.pop("param_names", None)
        groups.append({**options, "params": list(names)})
    return groups


def plain(what: str, value: Any) -> Any:
    """A value that JSON can say; tensors of one element become ``{"tensor": number, "dtype": name}``.

    Raises:
        ValueError: anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [plain(what, item) for item in value]
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"tensor": gathered(value).item(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise ValueError(f"{what} of the optimizer is a {type(value).__name__}: only tensors and plain values can be saved")


def options_for(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group after loading: the saved ones, but those that say how it computes stay."""
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in saved.items():
        if key in options and key not in HOW:
            options[key] = tuple(value) if isinstance(options[key], tuple) else revived(value)
    return options


def revived(value: Any) -> Any:
    """The inverse of :func:`plain`."""
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value


def slots_of(optimizer: Optimizer, originals: Mapping[str, Original]) -> tuple[list[Slot], Values]:
    """The optimizer's tensors, and its values.

    Raises:
        ValueError: parts of a packed parameter have different slots, or a slot that cannot be saved.
    """
    slots: list[Slot] = []
    values: Values = {}
    for original in unique(originals):
        states = [dict(optimizer.state.get(part.tensor, {})) for part in original.parts]
        if not any(states):
            continue
        if len({tuple(state) for state in states}) > 1:
            raise ValueError(f"the parts of {original.name} have different slots: {[list(state) for state in states]}")
        values[original.name] = {}
        for name in states[0]:
            held = [state[name] for state in states]
            if all(isinstance(value, Tensor) and value.dim() > 0 for value in held):
                slots += _slots(name, original, held)
                continue
            found = [plain(f"{name} of {original.name}", value) for value in held]
            if any(one != found[0] for one in found):
                raise ValueError(f"the parts of {original.name} differ in {name}: {found}")
            values[original.name][name] = found[0]
    return slots, values


def _slots(name: str, original: Original, held: Sequence[Tensor]) -> list[Slot]:
    parameters = tuple(part.tensor for part in original.parts)
    key = f"optimizer.{original.name}.{name}"
    if all(tensor.shape == parameter.shape for tensor, parameter in zip(held, parameters, strict=True)):
        parts = tuple(replace(part, tensor=tensor) for tensor, part in zip(held, original.parts, strict=True))
        whole = Original(key, original.shape, held[0].dtype, original.dim, parts)
        return [Slot(name, original, parameters, whole)]
    if any(part.units is not None for part in original.parts):
        raise ValueError(
            f"{name} of {original.name} is not shaped like its parameter, which this model keeps by heads that do not "
            "divide over its ranks: no other number of ranks could load it, so it is neither saved nor loaded"
        )
    names = [key] if len(held) == 1 else [f"{key}.part{index}" for index in range(len(held))]
    return [
        Slot(name, original, (parameter,), Original(one, tuple(tensor.shape), tensor.dtype, 0, (Part(tensor, 0),)))
        for one, parameter, tensor in zip(names, parameters, held, strict=True)
    ]


def described(slot: Slot) -> dict[str, Any]:
    """What the manifest says of a slot besides its shape: whose it is."""
    return {"slot": slot.name, "of": slot.of.name}


def new_slots(tensors: Mapping[str, Mapping[str, Any]], originals: Mapping[str, Original]) -> list[Slot]:
    """Empty slots for what a manifest says, cut as this model's parameters are.

    Raises:
        ValueError: slots of parts that this model has not.
    """
    grouped: dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]] = {}
    for key, entry in tensors.items():
        if "slot" in entry:
            grouped.setdefault((entry["of"], entry["slot"]), []).append((key, tuple(entry["shape"])))
    slots = []
    for (of, name), saved in grouped.items():
        original, dtype = originals[of], getattr(torch, tensors[saved[0][0]]["dtype"])
        parameters = [part.tensor for part in original.parts]
        if len(saved) == 1 and saved[0][1] == original.shape:
            held = [torch.empty_like(parameter.detach(), dtype=dtype, device="meta") for parameter in parameters]
        elif len(saved) == len(parameters):
            # As torch's optimizers make slots of other shapes: what DTensor does with it is what they will expect.
            held = [
                parameter.detach().new_empty(shape, dtype=dtype, device="meta")
                for parameter, (_, shape) in zip(parameters, saved, strict=True)
            ]
        else:
            raise ValueError(
                f"the snapshot has {name} of {of} in {len(saved)} parts, of shapes {[shape for _, shape in saved]}; "
                f"this model has the parameter in {len(parameters)}: slots that are not shaped like their parameter "
                "fit only a model that is packed alike; use the number of ranks of the snapshot, or load without the "
                "optimizer"
            )
        slots += _slots(name, original, held)
    return slots
