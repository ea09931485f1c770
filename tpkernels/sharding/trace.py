"""One run of a model on fake tensors: which ops run, on which shapes, and what flows from layer to layer.

Owns: what all runs of a :class:`~tpkernels.sharding.shadow.Shadow` share (:class:`Session`), and the
:class:`Recording` of one.

Assumes: outside of opaque modules the model's Python code does not depend on the values of tensors; a run that needs
one fails, and says so (:mod:`tpkernels.sharding.opaque`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpkernels.sharding.higher_order import as_op
from tpkernels.sharding.shadow import Shadow, tensors_in

__all__ = [
    "Event",
    "Node",
    "NotOpaque",
    "Opaque",
    "Recording",
    "Scope",
    "Session",
    "Shadow",
    "Shape",
    "Source",
    "TRANSPARENT",
    "as_given",
    "as_shapes",
    "canonical",
    "constant_of",
    "is_random",
    "tensors_in",
]

aten = torch.ops.aten
TRANSPARENT = {aten.clone, aten.detach, aten.alias, aten.contiguous}
"""Copies: whether one is needed may depend on sizes, so they are no part of what must agree between two runs."""
_VIEWS = {aten._unsafe_view, aten.reshape, aten._reshape_alias}

Origin = frozenset[str] | None
"""Where a tensor comes from: parameters alone (their names), or activations (None).

Every dtype has one: a complex number or an index that was an activation may become one again.
"""
Source = tuple[int, int, int] | int
"""Which tensor it is, in every run alike: the recording, event and output that made it, or the id of one given."""
_BLANK = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones,
          aten.new_full, aten.new_empty}  # fmt: skip
"""Ops that take the shape of a tensor and none of its numbers."""


@dataclass(frozen=True)
class Opaque:
    """The packet of an opaque module's call."""

    name: str


class NotOpaque(Exception):
    """The opaque module ``name`` does more than take and give tensors."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} needs the values of tensors, and {why}")
        self.name = name


class Shape(tuple[int, ...]):
    """The shape of a tensor among arguments."""


@dataclass
class Event:
    """One step of a run: an op with its arguments, or (``layer``) the call of a layer."""

    packet: Any
    whole: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Shape]
    layer: str | None = None
    sources: tuple[Source, ...] = ()
    """Of the tensors among the arguments."""
    constant: bytes | None = None
    """The numbers of a tensor that Python made (``torch.tensor(...)``)."""


@dataclass
class Node:
    """A step in the graph of differentiable tensors."""

    inputs: list[int]
    layer: str | None = None
    random: bool = False
    is_input: bool = False
    opaque: bool = False
    """What an opaque module gives, which is whole."""


@dataclass
class Scope:
    """One call of a module: its arguments, and the range of its events."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    start: int
    stop: int = -1


def canonical(func: Any) -> Any:
    packet = func.overloadpacket
    return aten.view if packet in _VIEWS else packet


def as_shapes(value: Any) -> Any:
    """Arguments with tensors as :class:`Shape` and sequences as lists."""
    if isinstance(value, Tensor):
        return Shape(value.shape)
    if isinstance(value, list | tuple):
        return [as_shapes(item) for item in value]
    return value


def as_given(value: Any) -> Any:
    """What an opaque module is called with, so that two calls can be compared: shapes and dtypes, numbers, kinds."""
    if isinstance(value, Tensor):
        return (*value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return (type(value).__qualname__, *map(as_given, value))
    if isinstance(value, Mapping):
        return tuple((key, as_given(item)) for key, item in value.items())
    if isinstance(value, bool | int | float | str | None | torch.dtype | torch.device):
        return value
    return type(value).__qualname__


class Session(TorchDispatchMode):
    """What recordings and replays share: layers are single steps, and so are opaque modules; tensors have an origin."""

    supports_higher_order_operators = True

    def __init__(self, shadow: Shadow, attributes: Mapping[tuple[str, str], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadow, self.attributes = shadow, dict(attributes)
        self.origins: dict[int, Origin] = {}
        self.made: dict[int, Source] = {}
        self.kept: list[Any] = []
        """Every tensor seen, so that ids stay theirs."""
        self.guess = shadow.guess
        self.quiet: str | None = None
        """The opaque module that is running."""
        self.asked, self.asked_truth = 0, False
        """How many values opaque modules asked for, and whether a condition was among them."""
        self.failed_in: str | None = None
        self.met_real_cache = False
        self._born: dict[int, str] = {}
        """Storages that opaque modules made, but for their results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            func, args, kwargs = as_op(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.kept.extend(tensors)
        if self.quiet is not None:
            out = self._quiet_op(func, args, kwargs, tensors)
        else:
            for tensor in tensors:
                if self._born and (name := self._born.get(_storage(tensor))) is not None:
                    raise NotOpaque(name, "hands tensors on by another way than its results")
            out = self.op(func, args, kwargs, tensors)
        self.kept.append(out)
        return out

    # ------------------------------------------------------------------ opaque modules

    def opaque_called(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that needs values under the guess, and give fresh tensors for what it returns."""
        if self.quiet is not None:
            return forward(*args, **kwargs)
        self.before_opaque(name, args, kwargs)
        self.quiet = name
        try:
            out = forward(*args, **kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self.quiet = None
        out = tree_map_only(Tensor, self._fresh, out)
        outputs = tensors_in(out)
        if any(_storage(tensor) in self._born for tensor in outputs):
            raise NotOpaque(name, "returns tensors inside of an object that cannot be rebuilt")
        self.after_opaque(name, args, kwargs, outputs)
        return out

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        pass

    def after_opaque(self, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        pass

    def _fresh(self, tensor: Tensor) -> Tensor:
        out = self.new_output(tensor, tuple(tensor.shape), tensor.dtype)
        self.set_origin(out, None)
        return out

    def _quiet_op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        assert self.quiet is not None
        self.read_quietly(func, args, tensors)
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                if _storage(tensor) not in self._born and not self._is_own(tensor):
                    raise NotOpaque(self.quiet, f"writes to what it is given ({func})")
        out = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in tensors} - set(self._born)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given:
                self._born[_storage(leaf)] = self.quiet
        return out

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether it is a buffer of the module that runs."""
        assert self.quiet is not None
        return any(_storage(buffer) == _storage(tensor) for buffer in self.shadow.modules[self.quiet].buffers())

    def read_quietly(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """An op inside of an opaque module."""

    def layer_called_quietly(self, name: str, x: Tensor) -> Tensor:
        """A layer inside of an opaque module."""
        assert self.quiet is not None
        layer = self.shadow.layers[name]
        if layer.kind != "embedding" and x.shape[-1] != layer.in_features:
            raise ValueError(f"{name} takes {layer.in_features} features, got {tuple(x.shape)}")
        shape = (*x.shape, layer.out_features) if layer.kind == "embedding" else (*x.shape[:-1], layer.out_features)
        out = self.new_output(x, shape, self.layer_dtype(name, x))
        self._born[_storage(out)] = self.quiet
        return out

    # ------------------------------------------------------------------ steps and origins

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        raise NotImplementedError

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        raise NotImplementedError

    def custom_function_called(self, name: str, tensors: list[Tensor]) -> None:
        """A ``torch.autograd.Function`` runs: its gradient is code that this run does not see."""

    def original_called(self, name: str) -> None:
        """A module of the model itself runs, not its copy."""

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        pass

    def left(self, name: str, output: Any = None) -> None:
        pass

    def has_origin(self, tensor: Tensor) -> bool:
        return id(tensor) in self.shadow.names or tensor.requires_grad or _storage(tensor) in self.origins

    def origin(self, tensor: Tensor) -> Origin:
        """Of a tensor that has one."""
        if id(tensor) in self.shadow.names:
            return frozenset([self.shadow.names[id(tensor)]])
        return self.origins.get(_storage(tensor))  # None also for parameters that the model does not register

    def set_origin(self, tensor: Tensor, origin: Origin) -> None:
        self.origins[_storage(tensor)] = origin

    def source(self, tensor: Tensor) -> Source:
        return self.made.get(id(tensor), id(tensor))

    def sources_of(self, packet: Any, tensors: list[Tensor]) -> tuple[Source, ...]:
        return () if packet is aten.lift_fresh else tuple(map(self.source, tensors))

    def pass_origins(self, func: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Outputs come from where the inputs do."""
        if func.overloadpacket in _BLANK:
            return
        found = [self.origin(tensor) for tensor in tensors if self.has_origin(tensor)]
        if not found:
            return
        origin: Origin = frozenset()
        for other in found:
            origin = None if origin is None or other is None else origin | other
        for output in outputs:
            self.set_origin(output, origin)

    def new_output(self, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a layer returns; made behind this session's back."""
        with torch.utils._python_dispatch._disable_current_modes(), self.shadow.fake:
            out = torch.empty(shape, dtype=dtype, device=x.device)
        self.kept += [x, out]
        self.origins[_storage(out)] = None
        return out

    def layer_dtype(self, name: str, x: Tensor) -> torch.dtype:
        weight = self.shadow.modules[name].weight
        assert isinstance(weight, Tensor)
        return weight.dtype if self.shadow.layers[name].kind == "embedding" else x.dtype


class Recording(Session):
    """The events, scopes and graph of one run.

    Args:
        widths: output features of layers that are not what the model's are (key-value heads once per rank).
    """

    def __init__(
        self, shadow: Shadow, attributes: Mapping[tuple[str, str], int] = {}, widths: Mapping[str, int] = {}
    ) -> None:
        super().__init__(shadow, attributes)
        self.widths = dict(widths)
        self.events: list[Event] = []
        self.scopes: list[Scope] = []
        self.nodes: list[Node] = []
        self.direct: set[str] = set()
        """Layers, and torch's attention modules, whose parameters the model uses without calling them."""
        self._originals_read: set[str] = set()
        self._originals_called: set[str] = set()
        self.outputs: list[int] = []
        self.layer_rows: dict[str, int] = {}
        """Rows of each layer's input, over all calls."""
        self.layer_inputs: dict[str, list[int]] = {}
        self.layer_reads: dict[str, list[tuple[int, int]]] = {}
        """Of each call of a layer: which tensor it read, and the node that had last written it."""
        self.callers: dict[str, str] = {}
        """Of opaque modules: the module that called each, "" for the model."""
        self.last_opaque = ""
        self.called_quietly: set[str] = set()
        self.rows_unknown: set[str] = set()
        """Layers inside of opaque modules, whose rows depend on values."""
        self._to_opaque: list[int] = []
        self._node_of: dict[int, int] = {}
        self._noise: set[int] = set()
        self._open: list[Scope] = []

    def run(self, args: Any, kwargs: Any) -> None:
        """Run the model on fake inputs."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and _can_require_grad(leaf):
                self.nodes.append(Node([], is_input=True))
                self._node_of[id(leaf)] = len(self.nodes) - 1
                self.set_origin(leaf, None)
            self.kept.append(leaf)
        with self.shadow.running(self):
            out = self.shadow.model(*args, **kwargs)
        self.kept.append(out)
        self.outputs = [self._node_of[id(t)] for t in tensors_in(out) if id(t) in self._node_of] + self._to_opaque

    def run_scope(self, scope: Scope, recording: Recording) -> Scope:
        """Run one module on the arguments that another recording saw; the scope of that call here."""
        self.origins, self.made = dict(recording.origins), dict(recording.made)
        with self.shadow.running(self):
            args, kwargs = self.shadow.copied((scope.args, scope.kwargs))
            self.kept.append(self.shadow.modules[scope.name](*args, **kwargs))
        return next(found for found in reversed(self.scopes) if found.name == scope.name)

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self._note_readers(tensors)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._link(tensors, outputs, is_random(func, args))
        self.pass_origins(func, tensors, outputs)
        packet = canonical(func)
        if packet in TRANSPARENT:
            self.made[id(out)] = self.source(tensors[0])
            return out
        whole, named = as_shapes(args), {key: as_shapes(value) for key, value in kwargs.items()}
        shapes, sources = [Shape(t.shape) for t in outputs], self.sources_of(packet, tensors)
        self._add(Event(packet, whole, named, shapes, sources=sources, constant=constant_of(func, tensors)), outputs)
        return out

    def _note_readers(self, tensors: list[Tensor]) -> None:
        """Who reads parameters past the modules that own them."""
        shadow = self.shadow
        self.direct |= {shadow.owners[id(tensor)] for tensor in tensors if id(tensor) in shadow.owners}
        attentions = {shadow.attentions[id(tensor)] for tensor in tensors if id(tensor) in shadow.attentions}
        self.direct |= attentions - {scope.name for scope in self._open}
        self._originals_read |= {shadow.originals[id(tensor)] for tensor in tensors if id(tensor) in shadow.originals}

    def _add(self, event: Event, outputs: list[Tensor]) -> None:
        self.events.append(event)
        self.made |= {id(output): (id(self), len(self.events) - 1, place) for place, output in enumerate(outputs)}

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        layer, features = self.shadow.layers[name], self.widths.get(name)
        width = layer.out_features if features is None else features
        shape = (*x.shape, width) if layer.kind == "embedding" else (*x.shape[:-1], width)
        if layer.kind != "embedding" and x.shape[-1] != layer.in_features:
            raise ValueError(f"{name} takes {layer.in_features} features, got {tuple(x.shape)}")
        out = self.new_output(x, shape, self.layer_dtype(name, x))
        inputs = [self._node_of[id(x)]] if id(x) in self._node_of else []
        self.nodes.append(Node(inputs, layer=name))
        self._node_of[id(out)] = len(self.nodes) - 1
        self.layer_inputs.setdefault(name, []).extend(inputs)
        self.layer_reads.setdefault(name, []).append((id(x), self._node_of.get(id(x), -1)))
        rows = x.numel() if layer.kind == "embedding" else x.numel() // max(1, x.shape[-1])
        self.layer_rows[name] = self.layer_rows.get(name, 0) + rows
        event = Event(None, [Shape(x.shape)], {}, [Shape(shape)], layer=name, sources=(self.source(x),))
        self._add(event, [out])
        return out

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        self.callers[name], self.last_opaque = (self._open[-2].name if len(self._open) > 1 else ""), name

    def after_opaque(self, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._to_opaque += [self._node_of[id(tensor)] for tensor in tensors if id(tensor) in self._node_of]
        self.nodes.append(Node([], opaque=True))
        self._node_of |= {id(output): len(self.nodes) - 1 for output in outputs}
        shapes, dtypes = [Shape(output.shape) for output in outputs], [output.dtype for output in outputs]
        sources = tuple(map(self.source, tensors))
        self._add(Event(Opaque(name), [as_given((args, kwargs))], {"dtypes": dtypes}, shapes, sources=sources), outputs)

    def read_quietly(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        self._note_readers(tensors)

    def layer_called_quietly(self, name: str, x: Tensor) -> Tensor:
        self.called_quietly.add(name)
        return super().layer_called_quietly(name, x)

    @property
    def innermost(self) -> str:
        """The module that is being called; "" for the model."""
        return self._open[-1].name if self._open else ""

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        args, kwargs = self.shadow.copied((args, kwargs))
        self._open.append(Scope(name, args, kwargs, len(self.events)))
        self.kept.append((args, kwargs))

    def left(self, name: str, output: Any = None) -> None:
        while self._open:
            scope = self._open.pop()
            if scope.name == name:
                scope.stop = len(self.events)
                self.scopes.append(scope)
                return

    def original_called(self, name: str) -> None:
        self._originals_called.add(name)

    @property
    def captured(self) -> list[str]:
        """Parameters of the model itself that code used which keeps them outside of their modules."""
        return sorted(name for name in self._originals_read if name.rpartition(".")[0] not in self._originals_called)

    def is_input(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one that the model was called with."""
        node = self._node_of.get(id(tensor))
        return node is not None and self.nodes[node].is_input

    def _link(self, tensors: list[Tensor], outputs: list[Tensor], random: bool) -> None:
        """Add the op to the graph; noise is what random ops made and no activation went into."""
        noisy = any(_storage(tensor) in self._noise for tensor in tensors)
        inputs = [self._node_of[id(tensor)] for tensor in tensors if id(tensor) in self._node_of]
        if inputs:
            self.nodes.append(Node(inputs, random=random or noisy))
            for output in outputs:
                self._node_of[id(output)] = len(self.nodes) - 1
        if noisy or random:
            self._noise |= {_storage(output) for output in outputs if id(output) not in self._node_of}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an op writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
            written.append(kwargs[argument.name])
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def constant_of(func: Any, tensors: list[Tensor]) -> bytes | None:
    """The numbers of a real tensor that becomes part of the run; None for every other op."""
    if func.overloadpacket is not aten.lift_fresh or isinstance(tensors[0], FakeTensor):
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        return tensors[0].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _can_require_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_random(func: Any, args: Any) -> bool:
    """Attention kernels count as random in torch even where they drop nothing."""
    attention = "scaled_dot_product" in func._schema.name
    drops = not attention or (len(args) > 3 and isinstance(args[3], float) and args[3] > 0)
    return torch.Tag.nondeterministic_seeded in func.tags and drops


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
