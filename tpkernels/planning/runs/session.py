"""What all runs of a :class:`~tpkernels.planning.runs.shadow.Shadow` share: steps, origins, and opaque modules.

It owns :class:`Session`, the mode that sees each op, and the kinds of steps that a run consists of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tpkernels.nn.cut_experts import arguments_of, called_with, caller_of
from tpkernels.nn.host_generators import HostStates
from tpkernels.planning.modules.experts import CalledOtherwise
from tpkernels.planning.modules.numbers import width_in
from tpkernels.planning.runs.conditions import Path, Rest
from tpkernels.planning.runs.events import (
    TRANSPARENT,
    Event,
    NotOpaque,
    Shape,
    Source,
    as_given,
    as_shapes,
    canonical,
    constant_of,
)
from tpkernels.planning.runs.gradient_code import Detached, Requiring
from tpkernels.planning.runs.higher_order_ops import as_op
from tpkernels.planning.runs.known_values import KnownValues, is_condition
from tpkernels.planning.runs.module_state import Held, State
from tpkernels.planning.runs.rests import is_own_buffer, left_in_buffers, passing_places
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.shared_conditions import Alike, Decided, Turns, turn_of
from tpkernels.planning.runs.tensors import can_require_grad, storage_of, tensors_in, written_by
from tpkernels.planning.runs.told import Told
from tpkernels.planning.runs.weight_reads import scaled_layer

__all__ = ["BLANK", "Node", "Scope", "Session"]

aten = torch.ops.aten

Origin = frozenset[str] | None
"""Where a tensor comes from: parameters alone (their names), or activations (None).

Complex numbers have one as well, which may become real again.  Whole numbers and conditions have none: no gradient
passes them, and what is made of them is a constant to the gradients.
"""
BLANK = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones,
         aten.new_full, aten.new_empty}  # fmt: skip
"""Ops that take the shape of a tensor and none of its numbers."""


@dataclass
class Node:
    """A step in the graph of differentiable tensors."""

    inputs: list[int]
    layer: str | None = None
    random: bool = False
    is_input: bool = False
    opaque: bool = False
    """What an opaque module gives, which is whole."""
    convolution: str | None = None
    """Over all channels, whose result this is."""
    severed: bool = False
    """No gradient passes: its results are whole numbers or conditions, or have the shape of its inputs alone."""


@dataclass
class Scope:
    """One call of a module: its arguments, and the range of its events."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: int
    stop: int = -1
    trained: bool = False
    """Whether somebody wants the gradient of a tensor among its arguments."""
    host: HostStates | None = None
    """The states of Python's and NumPy's generators, if those are not the ones that the run began with."""
    nodes: tuple[int, int] = (0, 0)
    """The range of the graph's nodes that the call made."""
    changes: int = 0
    decided: int = 0
    """How many attributes of modules the run had changed before, and conditions it had answered by its turns."""


class Session(Told, TorchDispatchMode):
    """The base of recordings and replays: layers and opaque modules are single steps, and tensors have an origin."""

    supports_higher_order_operators = True

    def __init__(self, shadow: Shadow, attributes: Mapping[tuple[str, str], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadow, self.attributes = shadow, dict(attributes)
        self.slices: dict[str, Tensor] = {}
        """What this run has in the place of parameters and buffers."""
        self.begins: State = {}
        """Attributes of modules that an earlier call has changed,"""
        self.changes: list[tuple[tuple[str, str], Held | None]] = []
        """and those that this run changes, in order."""
        self.origins: dict[int, Origin] = {}
        self.made: dict[int, Source] = {}
        self.requiring, self.detached = Requiring(shadow), Detached(self)
        self.kept: list[Any] = []
        """Every tensor seen, so that ids stay theirs."""
        self.guess = shadow.guess
        self.values = KnownValues(shadow.fake, shadow.given, shadow.constants)
        self.quiet: str | None = None
        """The opaque module that is running."""
        self.quiet_calls: list[tuple[str, bool]] = []
        """Modules inside of it that are being called, and whether with one tensor and nothing else."""
        self.asked, self.asked_truth = 0, False
        """How many values opaque modules asked for, and whether a condition was among them;"""
        self.asked_openly = False
        """and whether others asked for some, on which sizes depend."""
        self.inside: list[str] = []
        """Modules that are being called, the innermost last."""
        self.function: Any = None
        """Of torch, that the model's code is calling."""
        self.alike = Alike()
        self.turns: Turns | None = None
        self.decided_before = 0
        """Answers to conditions that all ranks answer alike (None: modules ask), and how many came before."""
        self.decisions: list[Decided] = []
        self.dice = shadow.dice
        """How this run draws random numbers from Python and NumPy,"""
        self.host_begins: HostStates | None = None
        """the states of their generators that it begins with (None: those of the dice),"""
        self.host_began: HostStates | None = None
        """those that it has begun with,"""
        self.drew: frozenset[str] = frozenset()
        """and from which it has drawn;"""
        self.drew_once = False
        """whether that was one number, where the dice are known,"""
        self.host_after: HostStates | None = None
        """and the states behind the last one."""
        self.paths: tuple[Path, ...] = ((),)
        """That calls of branching modules take, in turns,"""
        self.rests: list[Rest] = []
        """what these calls ran from a condition on,"""
        self.rest: Rest | None = None
        """and the one that is running."""
        self.branches_in: str | None = None
        """The module that is asking for a condition, and is not known to."""
        self.failed_in: str | None = None
        self.refused: list[Tensor] = []
        """What ``einsum`` was given where it raised last."""
        self.met_real_cache = False
        self._born: dict[int, str] = {}
        """Storages that opaque modules made, but for their results."""

    @property
    def asks_openly(self) -> bool:
        """Whether the innermost module may ask for values, though what it runs is followed."""
        return (self.inside[-1] if self.inside else "") in self.shadow.open

    @property
    def numbers(self) -> dict[tuple[str, str], int]:
        """The attributes that stand in a module, or in its config."""
        return {key: value for key, value in self.attributes.items() if width_in(key[1]) is None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            func, args, kwargs = as_op(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.kept.extend(tensors)
        if self.quiet is None and is_condition(func, args) and not self.values.answers(func, args, kwargs):
            if self.turns is not None and all(tensor in self.alike for tensor in tensors):
                return self._decide(self.turns, tensors, self.values.truth(func, args, kwargs))
            self._condition_asked(tensors)
        if self.quiet is not None:
            out = self._quiet_op(func, args, kwargs, tensors)
        else:
            if (name := scaled_layer(self.shadow, func, args)) is not None:
                self.shadow.scaled.add(name)
                return func(*args, **kwargs)
            for tensor in tensors:
                if self._born and (maker := self._born.get(storage_of(tensor))) is not None:
                    raise NotOpaque(maker, "passes tensors on by other means than its results")
            out = self.op(func, args, kwargs, tensors)
            self.branches_in = None
        self.kept.append(out)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if self.quiet is None:
            self.alike.passed(func, args, kwargs, tensors, outputs)
        self.requiring.passed(func, tensors, outputs)
        self.detached.passed(func, tensors, outputs)
        return out

    # ------------------------------------------------------------------ opaque modules

    def opaque_called(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that needs values under the guess, and give fresh tensors for what it returns."""
        if self.rest is not None:
            raise NotOpaque(self.rest.module, f"{name} asks for more than conditions")
        if self.quiet is not None:
            return forward(*args, **kwargs)
        self.before_opaque(name, args, kwargs)
        self.quiet, self.quiet_calls = name, []
        try:
            out = forward(*args, **kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self.quiet = None
        out = tree_map_only(Tensor, self._fresh, out)
        outputs = tensors_in(out)
        if any(storage_of(tensor) in self._born for tensor in outputs):
            raise NotOpaque(name, "returns tensors inside of an object that cannot be rebuilt")
        self.after_opaque(name, args, kwargs, outputs)
        return out

    def _fresh(self, tensor: Tensor) -> Tensor:
        out = self.new_output(tensor, tuple(tensor.shape), tensor.dtype)
        self.set_origin(out, None)
        if tensor in self.requiring:
            self.requiring.made([out])
        return out

    def _quiet_op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        assert self.quiet is not None
        self.read_quietly(func, args, tensors)
        if func._schema.is_mutable:
            for tensor in written_by(func, args, kwargs):
                own = self.rest is None and self._is_own(tensor)
                if storage_of(tensor) not in self._born and not own:
                    raise NotOpaque(self.quiet, f"writes to what it is given ({func})")
        out = func(*args, **kwargs)
        given = {storage_of(tensor) for tensor in tensors} - set(self._born)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and storage_of(leaf) not in given:
                self._born[storage_of(leaf)] = self.quiet
        if self.rest is not None:
            self._note_rest(self.rest, func, args, kwargs, out)
        return out

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether it is a buffer of the module that runs."""
        assert self.quiet is not None
        return any(storage_of(buffer) == storage_of(tensor) for buffer in self.shadow.modules[self.quiet].buffers())

    # ------------------------------------------------------------------ conditions

    def _decide(self, turns: Turns, tensors: list[Tensor], truth: bool | None) -> bool:
        """The answer of this run to a condition that all ranks answer alike."""
        number = self.decided_before + len(self.decisions)
        self.before_decision(number, tensors)
        turn = turn_of(turns, number)
        self.decisions.append(Decided(tuple(map(self.source, tensors)), turn, truth))
        return turn if truth is None else turn != truth

    def _condition_asked(self, tensors: list[Tensor]) -> None:
        """From here on, what the innermost module runs is one step, if it is known to branch."""
        name = self.inside[-1] if self.inside else ""
        if name not in self.shadow.branching:
            self.branches_in = name
            return
        self.quiet, self.quiet_calls = name, []
        path = self.paths[len(self.rests) % len(self.paths)]
        shapes, sources = [Shape(tensor.shape) for tensor in tensors], tuple(map(self.source, tensors))
        refused, buffers = self.shadow.known.refused.get(name, frozenset()), self.shadow.modules[name]._buffers
        self.rest = Rest(name, path, shapes, sources, refused, buffers=dict(buffers))
        self.rests.append(self.rest)
        self.before_rest(self.rest, tensors)

    def branching_called(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that may ask for a condition; if it does, give fresh tensors for what it returns."""
        if self.quiet is not None:
            return forward(*args, **kwargs)
        out = forward(*args, **kwargs)
        if self.rest is None:
            return out
        rest = self.rest
        leaves, spec = tree_flatten(out)
        passing = passing_places(self, rest, leaves)
        given = as_given(tree_unflatten([place if place in passing else x for place, x in enumerate(leaves)], spec))
        self.rest_gives(rest, [*tensors_in([x for n, x in enumerate(leaves) if n not in passing]), *rest.kept.values()])
        self.quiet = self.rest = None
        fresh = [self._fresh(x) if n not in passing and isinstance(x, Tensor) else x for n, x in enumerate(leaves)]
        outputs = tensors_in([x for n, x in enumerate(fresh) if n not in passing])
        if any(storage_of(tensor) in self._born for tensor in outputs):
            raise NotOpaque(name, "returns tensors inside of an object that cannot be rebuilt")
        self.after_rest(rest, given, [*outputs, *left_in_buffers(self, rest)])
        return tree_unflatten(fresh, spec)

    def is_born(self, tensor: Tensor) -> bool:
        """Whether it is of what an opaque module, or a rest, has made for itself."""
        return storage_of(tensor) in self._born

    def _note_rest(self, rest: Rest, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors, outputs = ([x for x in tree_leaves(of) if isinstance(x, Tensor)] for of in ((args, kwargs), out))
        rest.made.update(map(id, outputs))
        packet = canonical(func)
        if packet in TRANSPARENT:
            self.made[id(out)] = self.source(tensors[0])
            return
        whole, named = as_shapes(args), {key: as_shapes(value) for key, value in kwargs.items()}
        shapes, sources = [Shape(output.shape) for output in outputs], self.sources_of(packet, tensors)
        constant = constant_of(func, tensors)
        rest.steps.append(Event(packet, whole, named, shapes, sources=sources, constant=constant))
        self.made |= {id(output): (0, -len(rest.steps), place) for place, output in enumerate(outputs)}

    # ------------------------------------------------------------------ modules within such a step

    def experts_called(self, name: str, args: Any, kwargs: Any) -> Tensor:
        """One step for the experts of a mixture: a tensor like the tokens, or a row for each row."""
        if self.rest is not None:
            raise NotOpaque(self.rest.module, f"calls the experts {name} after a condition")
        known, module = self.shadow.experts[name], self.shadow.modules[name]
        called = self.shadow.modules[caller_of(name, known.layout)]
        takes = list(inspect.signature(type(called).forward).parameters)[1:]
        given = arguments_of(takes, args, kwargs)
        call = called_with(known.layout, given, known.num_experts)
        if call is None or call[0].shape[1] != known.d_model:
            raise CalledOtherwise(name)
        given = [one for one in given if isinstance(one, Tensor)]
        quiet = self.quiet is not None
        (self.mixture_read_quietly if quiet else self.before_mixture)(name, given)
        shape = (call[1], known.d_ff) if known.layout.call == "sorted" else tuple(given[0].shape)
        out = self.new_output(given[0], shape, given[0].dtype)
        if quiet:
            assert self.quiet is not None
            self._born[storage_of(out)] = self.quiet
        else:
            self.after_mixture(name, given, out, call[1])
        if any(tensor in self.requiring for tensor in (*given, *module.parameters())):
            self.requiring.made([out])
        return out

    def layer_called_quietly(self, name: str, x: Tensor) -> Tensor:
        """A layer inside of an opaque module."""
        assert self.quiet is not None
        if self.rest is not None:
            raise NotOpaque(self.rest.module, f"calls {name} after a condition")
        layer = self.shadow.layers[name]
        if layer.kind != "embedding" and x.shape[-1] != layer.in_features:
            raise ValueError(f"{name} takes {layer.in_features} features, got {tuple(x.shape)}")
        shape = (*x.shape, layer.out_features) if layer.kind == "embedding" else (*x.shape[:-1], layer.out_features)
        out = self.new_output(x, shape, self.layer_dtype(name, x))
        self._born[storage_of(out)] = self.quiet
        return out

    # ------------------------------------------------------------------ steps and origins

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        raise NotImplementedError

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        raise NotImplementedError

    def changed(self, attribute: tuple[str, str], held: Held | None) -> None:
        """The model's code has changed an attribute of a module."""
        if self.rest is not None:
            if not is_own_buffer(self, self.rest, attribute, held):
                raise NotOpaque(self.rest.module, f"changes {'.'.join(attribute)} after a condition")
            assert held is not None
            self.rest.kept[attribute[1]] = held.value
        self.changes.append((attribute, held))

    def state_after(self, changes: int | None = None) -> State:
        """What modules have after so many changes; after all of them by default."""
        return self.begins | dict(self.changes[:changes])

    @property
    def kept_states(self) -> list[tuple[str, str]]:
        """Attributes in which modules keep what this run has made of activations, as a recurrence does its state."""
        return [
            key for key, held in self.changes
            if held is not None and isinstance(held.value, Tensor) and self.has_origin(held.value)
        ]  # fmt: skip

    def entered_quietly(self, name: str, args: Any, kwargs: Any) -> None:
        self.quiet_calls.append((name, len(args) == 1 and isinstance(args[0], Tensor) and not kwargs))

    def leaving(self, name: str, output: Any) -> Any:
        """A module returns; what it returns instead, or None."""
        if self.quiet is not None:
            self.left_quietly(name)
            return None
        while self.inside and self.inside.pop() != name:
            pass
        return self.left(name, output)

    def left_quietly(self, name: str) -> None:
        while self.quiet_calls and self.quiet_calls.pop()[0] != name:
            pass

    def has_origin(self, tensor: Tensor) -> bool:
        return id(tensor) in self.shadow.names or tensor.requires_grad or storage_of(tensor) in self.origins

    def origin(self, tensor: Tensor) -> Origin:
        """The origin of a tensor that has one."""
        if id(tensor) in self.shadow.names:
            return frozenset([self.shadow.names[id(tensor)]])
        return self.origins.get(storage_of(tensor))  # None also for parameters that the model does not register

    def set_origin(self, tensor: Tensor, origin: Origin) -> None:
        self.origins[storage_of(tensor)] = origin

    def source(self, tensor: Tensor) -> Source:
        return self.made.get(id(tensor), id(tensor))

    def sources_of(self, packet: Any, tensors: list[Tensor]) -> tuple[Source, ...]:
        return () if packet is aten.lift_fresh else tuple(map(self.source, tensors))

    def pass_origins(self, func: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Give outputs the origins of the inputs."""
        if func.overloadpacket in BLANK:
            return
        found = [self.origin(tensor) for tensor in tensors if self.has_origin(tensor)]
        if not found:
            return
        origin: Origin = frozenset()
        for other in found:
            origin = None if origin is None or other is None else origin | other
        for output in filter(can_require_grad, outputs):
            self.set_origin(output, origin)

    def new_output(self, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a layer returns; made behind this session's back."""
        with torch.utils._python_dispatch._disable_current_modes(), self.shadow.fake:
            out = torch.empty(shape, dtype=dtype, device=x.device)
        self.kept += [x, out]
        self.origins[storage_of(out)] = None
        return out

    def layer_dtype(self, name: str, x: Tensor) -> torch.dtype:
        weight = self.shadow.modules[name].weight
        assert isinstance(weight, Tensor)
        return weight.dtype if self.shadow.layers[name].kind == "embedding" else x.dtype
