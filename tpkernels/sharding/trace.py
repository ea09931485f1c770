"""One run of a model on fake tensors: which ops run, on which shapes, and what flows from layer to layer.

Owns: the :class:`Shadow` of a model (a copy whose parameters and buffers are fake: no memory, no arithmetic, and
nothing that its forward does reaches the model), and the :class:`Recording` of one run.

Assumes: the model's Python code does not depend on the values of tensors; a run that needs one fails, and says so.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpkernels.sharding.layers import Layer, layer_of, unswappable

__all__ = [
    "Event",
    "Node",
    "Recording",
    "Scope",
    "Session",
    "Shadow",
    "Shape",
    "Source",
    "TRANSPARENT",
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


class Shadow:
    """A copy of ``model`` with fake tensors whose layers report to the session that runs.

    Raises:
        Exception: whatever copying the model's own objects raises.
    """

    def __init__(self, model: nn.Module) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}
        memo: dict[int, Any] = {}
        with self.fake:
            for parameter in model.parameters():
                memo[id(parameter)] = nn.Parameter(_like(parameter), requires_grad=False)
            for buffer in model.buffers():
                memo.setdefault(id(buffer), _like(buffer))
        self.model = copy.deepcopy(model, memo)
        self.modules = dict(self.model.named_modules())
        self.session: Session | None = None
        self.layers: dict[str, Layer] = {}
        self.owners: dict[int, str] = {}
        """Layers by the ids of their parameters."""
        self.attentions = {
            id(parameter): name
            for name, module in self.modules.items()
            if isinstance(module, nn.MultiheadAttention)
            for parameter in module.parameters()
        }
        """torch's attention modules by the ids of theirs."""
        self.originals = {id(parameter): name for name, parameter in model.named_parameters()}
        """The model's own parameters, which only code reads that keeps them outside of their modules."""
        self.holders = {id(module): name for name, module in model.named_modules()}
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, module in self.modules.items():
            layer = layer_of(module)
            if layer is not None and unswappable(module) is None:
                self.layers[name] = layer
                self.owners |= {id(parameter): name for parameter in module.parameters(recurse=False)}
                module.forward = self._reporting(name)
            else:
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                module.register_forward_hook(self._leaving(name))

    @contextmanager
    def running(self, session: Session) -> Iterator[None]:
        """Fake mode, the session on top of it, no gradients, and its attributes in place of the model's."""
        before = {key: getattr(self.modules[key[0]], key[1]) for key in session.attributes}
        self.session = session
        # A guess that does not fit makes an op fail, which torch would print with a traceback.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled, log.disabled = log.disabled, True
        # torch's encoder layers read all their weights at once in evaluation, which parallel ones never do.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for (name, attribute), value in session.attributes.items():
                setattr(self.modules[name], attribute, value)
            with _reporting_custom_functions(session), torch.no_grad(), self.fake, session:
                hook = register_module_forward_pre_hook(self._note_original)
                try:
                    yield
                finally:
                    hook.remove()
        finally:
            self.session = None
            log.disabled = was_disabled
            torch.backends.mha.set_fastpath_enabled(fast)
            for (name, attribute), value in before.items():
                setattr(self.modules[name], attribute, value)

    def fake_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Fake tensors shaped like those given, which are not read; those on the meta device are made to fit."""
        parameters = list(self.model.parameters())

        def fake(tensor: Tensor) -> Tensor:
            if not tensor.is_meta or not parameters:
                return _like(tensor)
            dtype = parameters[0].dtype if tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype, device=parameters[0].device)

        with self.fake:
            made: tuple[Any, Any] = tree_map_only(Tensor, fake, (args, kwargs))
            return made

    def _note_original(self, module: nn.Module, args: Any) -> None:
        """A module of the model itself runs, which is swapped in place: that it reads its parameters is no capture."""
        if self.session is not None and id(module) in self.holders:
            self.session.original_called(self.holders[id(module)])

    def _reporting(self, name: str) -> Any:
        def forward(input: Tensor) -> Tensor:
            assert self.session is not None
            return self.session.layer_called(name, input)

        return forward

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.session is not None:
                self.session.entered(name, args, kwargs)

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.session is not None:
                self.session.left(name, output)

        return hook


@contextmanager
def _reporting_custom_functions(session: Session) -> Iterator[None]:
    """Within: a ``torch.autograd.Function`` of the model's tells ``session``, and its results are activations."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        out = original.__func__(cls, *args, **kwargs)
        if not cls.__module__.startswith("torch.utils.checkpoint"):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            session.custom_function_called(cls.__name__, tensors)
            if any(session.has_origin(tensor) for tensor in tensors):
                for output in tensors_in(out):
                    session.set_origin(output, None)
        return out

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _like(tensor: Tensor) -> Tensor:
    """An empty tensor of the same kind; of one on the meta device, as if it were on the CPU."""
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class Session(TorchDispatchMode):
    """What recordings and replays share: layers are opaque, tensors have an origin."""

    def __init__(self, shadow: Shadow, attributes: Mapping[tuple[str, str], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadow, self.attributes = shadow, dict(attributes)
        self.origins: dict[int, Origin] = {}
        self.made: dict[int, Source] = {}
        self.kept: list[Any] = []
        """Every tensor seen, so that ids stay theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.kept.extend(tensors)
        out = self.op(func, args, kwargs, tensors)
        self.kept.append(out)
        return out

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
        self.outputs = [self._node_of[id(t)] for t in tensors_in(out) if id(t) in self._node_of]

    def run_scope(self, scope: Scope, recording: Recording) -> Scope:
        """Run one module on the arguments that another recording saw; the scope of that call here."""
        self.origins, self.made = dict(recording.origins), dict(recording.made)
        with self.shadow.running(self):
            self.kept.append(self.shadow.modules[scope.name](*scope.args, **scope.kwargs))
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

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
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


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nested result, objects with attributes included."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found += [item for item in vars(leaf).values() if isinstance(item, Tensor)]
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
