"""The state of an optimizer under the names and in the shapes of the model that was parallelized.

Torch's ``get_optimizer_state_dict`` names what the parallel model holds: a packed projection has slots under
``c_attn.part0.weight``.  The two functions of this module use the names that ``model.state_dict()`` gives, in the form
that torch's functions use for the unsharded model, so that one checkpoint serves both.

:mod:`tpkernels.state.optimizer_state` knows what a slot is, and which parameter it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpkernels.nn.digests import digest_of, json_digest
from tpkernels.nn.gathering import gathered
from tpkernels.state.collective_errors import Ranks, check_same
from tpkernels.state.optimizer_state import Slot, groups_of, options_for, plain, slots_of
from tpkernels.state.originals import Original, check_real, local_of, meshes_of, originals_of
from tpkernels.state.plain_state import cut_alike
from tpkernels.state.staging import as_real

__all__ = ["check_optimizer_state_dict", "load_optimizer_state_dict", "optimizer_state_dict"]

State = dict[str, Any]


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer, *, full: bool = False) -> State:
    """What torch's ``get_optimizer_state_dict`` gave for the unsharded model: the same names and shapes.

    ``{"state": {name: {slot: value}}, "param_groups": [{"params": [names], options}]}``.  As in ``model.state_dict()``
    a slot (``exp_avg``) that one DTensor can say is that DTensor, and shares the optimizer's memory; any other is a
    whole plain tensor, equal on all ranks.  With ``full`` all are whole plain tensors.  All ranks call it.  Slots of a
    fresh optimizer are made as torch makes them, by a step of learning rate 0, which counts as one.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> optimizer = torch.optim.AdamW(mlp.parameters())
        >>> mlp(torch.ones(4, 8)).sum().backward(); optimizer.step()
        >>> state = tpk.optimizer_state_dict(mlp, optimizer, full=True)
        >>> state["state"]["0.weight"]["exp_avg"].shape
        torch.Size([32, 8])

    Raises:
        ValueError: the model is not parallelized, parameters that are not the model's, slots of a packed parameter
            that are not shaped like it (Adafactor's factors); on every rank.
    """

    def prepare() -> tuple[_Held, dict[str, Any]]:
        held = _Held(model, optimizer)
        return held, {"same": held.facts()}

    held, said = Ranks.of(model).together("optimizer_state_dict", prepare)
    check_same("optimizer_state_dict", said, "optimizers")
    assert held is not None
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in held.values.items()}
    with torch.no_grad():
        for slot in held.slots:
            mine = slot.tensor.parts[0].tensor
            whole = full or not slot.tensor.is_held_whole
            state[slot.of.name][slot.name] = slot.tensor.whole() if whole else mine.detach()
    return {"state": state, "param_groups": held.groups}


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what :func:`optimizer_state_dict`, or torch's function for the unsharded model, gave.

    Args:
        model: parallelized.
        optimizer: over its parameters, in the same groups; fresh or used.  Its options become those of ``state_dict``,
            except those that say how it computes (``foreach``, ``fused``).
        state_dict: whole plain tensors, equal on all ranks, or DTensors on a mesh of the model's.  It is not changed.

    All ranks call it.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> optimizer = torch.optim.AdamW(mlp.parameters())
        >>> mlp(torch.ones(4, 8)).sum().backward(); optimizer.step()
        >>> state = tpk.optimizer_state_dict(mlp, optimizer)
        >>> tpk.load_optimizer_state_dict(mlp, optimizer, state)

    Raises:
        ValueError: names, slots, shapes or groups that are not this optimizer's, or tensors, values or options that
            differ between ranks; on every rank, with the optimizer as it was (a fresh one has its slots by then).
    """
    held = _agreed(model, optimizer, lambda: state_dict)
    with torch.no_grad():
        optimizer.load_state_dict(_to_load(held, optimizer, state_dict))


def check_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, read: Callable[[], Mapping[str, Any]]) -> None:
    """Find out whether :func:`load_optimizer_state_dict` would load what ``read`` gives; an error of ``read`` counts.

    Raises:
        ValueError: as there; on every rank, with the optimizer as it was (a fresh one has its slots by then).
    """
    _agreed(model, optimizer, read)


def _agreed(model: nn.Module, optimizer: Optimizer, read: Callable[[], Mapping[str, Any]]) -> _Held:
    ranks, what = Ranks.of(model), "load_optimizer_state_dict"

    def prepare() -> tuple[_Held, dict[str, Any]]:
        held = _Held(model, optimizer)
        return held, {"same": json_digest([held.facts(), _checked(held, model, read())])}

    held, said = ranks.together(what, prepare)
    check_same(what, said, "optimizers or state dicts")
    assert held is not None
    return held


class _Held:
    """What a rank's optimizer has, in terms of the originals."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.originals = originals_of(model)
        check_real(self.originals)
        names = [one["params"] for one in groups_of(optimizer, self.originals)]
        if not optimizer.state:
            _make_slots(model, optimizer)
        self.slots, values = slots_of(optimizer, self.originals)
        for slot in self.slots:
            if slot.tensor.shape != slot.of.shape and len(slot.of.parts) > 1:
                raise ValueError(
                    f"{slot.name} of {slot.of.name} is not shaped like its parameter, which this model keeps in "
                    f"{len(slot.of.parts)} parts: it has no form in the unsharded model; use tpk.save_snapshot"
                )
        self.values = {name: self._unchanged(optimizer, self.originals[name], found) for name, found in values.items()}
        self.groups = [
            {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "params": some}
            for group, some in zip(optimizer.param_groups, names, strict=True)
        ]

    def _unchanged(self, optimizer: Optimizer, original: Original, names: Mapping[str, Any]) -> State:
        """The values as the optimizer has them: tensors of one element stay tensors.

        Those of several parts are copies, because a step that is loaded in place would reach one part alone.
        """
        state = optimizer.state[original.parts[0].tensor]
        found = {name: gathered(state[name]) if isinstance(state[name], Tensor) else state[name] for name in names}
        return found if len(original.parts) == 1 else {name: _own(value) for name, value in found.items()}

    def facts(self) -> str:
        tensors = [[slot.of.name, slot.name, slot.tensor.shape, str(slot.tensor.dtype)] for slot in self.slots]
        return json_digest([tensors, [group["params"] for group in self.groups]])


def _make_slots(model: nn.Module, optimizer: Optimizer) -> None:
    """Make slots as torch's function does, which leaves an optimizer alone whose parameters have gradients."""
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        get_optimizer_state_dict(model, optimizer)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _checked(held: _Held, model: nn.Module, given: Mapping[str, Any]) -> list[Any]:
    """What must be the same on all ranks; raises if ``given`` is not the state of this optimizer."""
    state, groups = given.get("state"), given.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list | tuple):
        raise ValueError('an optimizer\'s state dict has "state" and "param_groups"')
    if any(not isinstance(name, str) for name in state):
        raise ValueError(
            "this state dict numbers the parameters, as optimizer.state_dict() does: give one that names them, of "
            "tpk.optimizer_state_dict or torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    mine, theirs = [set(one["params"]) for one in held.groups], [set(one.get("params", ())) for one in groups]
    if mine != theirs:
        raise ValueError(
            f"its groups have other parameters than this optimizer's: {[len(one) for one in theirs]} there, "
            f"{[len(one) for one in mine]} here{_difference(set().union(*theirs), set().union(*mine))}"
        )
    expected = {name: set(values) for name, values in held.values.items()}
    for slot in held.slots:
        expected[slot.of.name].add(slot.name)
    if set(state) != set(expected):
        raise ValueError(f"it has the state of other parameters{_difference(set(state), set(expected))}")
    for name, slots in expected.items():
        if set(state[name]) != slots:
            raise ValueError(f"{name} has the slots {sorted(state[name])} there and {sorted(slots)} here")
    facts: list[Any] = [[plain(name, state[name][slot]) for slot in sorted(some)] for name, some in held.values.items()]
    options = [{key: value for key, value in one.items() if key not in ("params", "param_names")} for one in groups]
    facts += [{key: plain(f"option {key!r}", value) for key, value in one.items()} for one in options]
    return facts + [_facts_of(slot, state[slot.of.name][slot.name], model) for slot in held.slots]


def _facts_of(slot: Slot, value: Any, model: nn.Module) -> list[Any]:
    what = f"{slot.name} of {slot.of.name}"
    if not isinstance(value, Tensor) or tuple(value.shape) != slot.tensor.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"{what} is {shape} there and {slot.tensor.shape} here")
    if isinstance(value, DTensor):
        if value.device_mesh not in meshes_of(model):
            raise ValueError(f"{what} is a DTensor on {value.device_mesh}, and the model is not: give the whole tensor")
        return [what, str(value.dtype), str(value.placements)]
    return [what, str(value.dtype), digest_of(value.detach(), [0] * value.dim())]


def _to_load(held: _Held, optimizer: Optimizer, given: Mapping[str, Any]) -> State:
    """What ``optimizer.load_state_dict`` takes, over the parameters of this model."""
    index = {id(parameter): at for at, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, State] = {}
    for name, values in held.values.items():
        for part in held.originals[name].parts:
            value = given["state"][name]
            state[index[id(part.tensor)]] = {key: _own(value[key]) for key in values}
    for slot in held.slots:
        tensors = _parts(slot.tensor, given["state"][slot.of.name][slot.name])
        for parameter, tensor in zip(slot.parameters, tensors, strict=True):
            state[index[id(parameter)]][slot.name] = tensor
    groups, start = [], 0
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        count = len(group["params"])
        groups.append({**options_for(group, saved), "params": list(range(start, start + count))})
        start += count
    return {"state": state, "param_groups": groups}


def _parts(original: Original, value: Tensor) -> list[Tensor]:
    """What this rank holds of ``value``, in memory of its own."""
    first = original.parts[0].tensor
    if isinstance(value, DTensor) and original.is_held_whole and cut_alike(value, first):
        return [as_real(original.parts[0], local_of(value).clone())]
    whole = gathered(value)
    return [
        as_real(part, whole[original.box(part).slices].to(local_of(part.tensor).device).clone().contiguous())
        for part in original.parts
    ]


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _difference(theirs: set[str], mine: set[str]) -> str:
    lacks, has = sorted(mine - theirs), sorted(theirs - mine)
    return f"; it lacks {lacks[:3]}, and has {has[:3]} besides" if lacks or has else ""
