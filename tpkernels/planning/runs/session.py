"""What all runs of a :class:`~tpkernels.planning.runs.shadow.Shadow` share: steps, origins, and opaque modules.

It owns :class:`Session`, the mode that sees each op, and the kinds of steps that a run consists of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpkernels.nn.cut_experts import arguments_of, called_with, caller_of
from tpkernels.planning.modules.experts import CalledOtherwise
from tpkernels.planning.modules.numbers import width_in
from tpkernels.planning.runs.gradient_code import Requiring
from tpkernels.planning.runs.higher_order_ops import as_op
from tpkernels.planning.runs.known_values import KnownValues
from tpkernels.planning.runs.module_state import Held, State
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.tensors import can_require_grad, storage_of, tensors_in, written_by
from tpkernels.planning.runs.weight_reads import scaled_layer

__all__ = [
    "Event",
    "Mixture",
    "Node",
    "NotOpaque",
    "Opaque",
    "Scope",
    "Session",
    "Shape",
    "Source",
    "TRANSPARENT",
    "as_given",
    "as_shapes",
    "canonical",
    "constant_of",
    "is_random",
]

aten = torch.ops.aten
TRANSPARENT = {aten.clone, aten.detach, aten.alias, aten.contiguous}
"""Copies: whether one is needed may depend on sizes, so they are no part of what must agree between two runs."""
_VIEWS = {aten._unsafe_view, aten.reshape, aten._reshape_alias}

Origin = frozenset[str] | None
"""Where a tensor comes from: parameters alone (their names), or activations (None).

Complex numbers have one as well, which may become real again.  Whole numbers and conditions have none: no gradient
passes them, and what is made of them is a constant to the gradients.
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


@dataclass(frozen=True)
class Mixture:
    """The packet of a call of experts, which take and give whole tensors."""

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

    def anywhere(self) -> Event:
        """The event without the identity of its recording, for comparison with another one."""
        sources = tuple((0, *source[1:]) if isinstance(source, tuple) else source for source in self.sources)
        return replace(self, sources=sources)


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
    """Its results are whole numbers or conditions, which no gradient passes."""


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
    changes: int = 0
    """How many attributes of modules the run had changed before."""


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
        self.requiring = Requiring(shadow)
        self.kept: list[Any] = []
        """Every tensor seen, so that ids stay theirs."""
        self.guess = shadow.guess
        self.values = KnownValues(shadow.fake, shadow.given, shadow.constants)
        self.quiet: str | None = None
        """The opaque module that is running."""
        self.quiet_calls: list[tuple[str, bool]] = []
        """Modules inside of it that are being called, and whether with one tensor and nothing else."""
        self.asked, self.asked_truth = 0, False
        """How many values opaque modules asked for, and whether a condition was among them."""
        self.failed_in: str | None = None
        self.met_real_cache = False
        self._born: dict[int, str] = {}
        """Storages that opaque modules made, but for their results."""

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
        self.kept.append(out)
        self.requiring.passed(func, tensors, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out

    # ------------------------------------------------------------------ opaque modules

    def opaque_called(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that needs values under the guess, and give fresh tensors for what it returns."""
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

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        pass

    def after_opaque(self, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        pass

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
                if storage_of(tensor) not in self._born and not self._is_own(tensor):
                    raise NotOpaque(self.quiet, f"writes to what it is given ({func})")
        out = func(*args, **kwargs)
        given = {storage_of(tensor) for tensor in tensors} - set(self._born)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and storage_of(leaf) not in given:
                self._born[storage_of(leaf)] = self.quiet
        return out

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether it is a buffer of the module that runs."""
        assert self.quiet is not None
        return any(storage_of(buffer) == storage_of(tensor) for buffer in self.shadow.modules[self.quiet].buffers())

    def experts_called(self, name: str, args: Any, kwargs: Any) -> Tensor:
        """One step for the experts of a mixture: a tensor like the tokens, or a row for each row."""
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

    def before_mixture(self, name: str, given: list[Tensor]) -> None:
        pass

    def after_mixture(self, name: str, given: list[Tensor], out: Tensor, slots: int) -> None:
        pass

    def mixture_read_quietly(self, name: str, given: list[Tensor]) -> None:
        """Experts inside of an opaque module."""

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
        self._born[storage_of(out)] = self.quiet
        return out

    # ------------------------------------------------------------------ steps and origins

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        raise NotImplementedError

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        raise NotImplementedError

    def changed(self, attribute: tuple[str, str], held: Held | None) -> None:
        """The model's code has changed an attribute of a module."""
        self.changes.append((attribute, held))

    def state_after(self, changes: int | None = None) -> State:
        """What modules have after so many changes; after all of them by default."""
        return self.begins | dict(self.changes[:changes])

    def read_by_weight(self, name: str) -> None:
        """A product with a layer's weight, which is a call of the layer."""

    def weight_converted(self, name: str) -> None:
        """Code asks for a layer's weight in some dtype."""

    def norm_called(self, name: str, forward: Callable[..., Any], *given: Tensor) -> Any:
        """A module that may be a norm over the last dimension, called with x alone, or with a gate as well."""
        return forward(*given)

    def channels_called(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A module that can be cut by channels (``modules/channel_modules.py``), called with x alone."""
        return forward(x)

    def channels_called_otherwise(self, name: str) -> None:
        """Such a module is called in another way, or within an opaque module."""

    def gradient_code_called(self, name: str, tensors: list[Tensor], on_elements: Callable[[], bool]) -> None:
        """The gradients of ``tensors`` pass through code that this run does not see; ``on_elements`` finds out whether
        it takes each element by itself."""

    def original_called(self, name: str) -> None:
        """A module of the model itself runs, not its copy."""

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        pass

    def given(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a module is called with instead; None for what it is given."""
        return None

    def left(self, name: str, output: Any = None) -> None:
        pass

    def entered_quietly(self, name: str, args: Any, kwargs: Any) -> None:
        self.quiet_calls.append((name, len(args) == 1 and isinstance(args[0], Tensor) and not kwargs))

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
        if func.overloadpacket in _BLANK:
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


def constant_of(func: Any, tensors: list[Tensor]) -> bytes | None:
    """The numbers of a real tensor that becomes part of the run; None for every other op."""
    if func.overloadpacket is not aten.lift_fresh or isinstance(tensors[0], FakeTensor):
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        return tensors[0].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def is_random(func: Any, args: Any) -> bool:
    """Whether the op draws random numbers; torch counts attention kernels even where they drop nothing."""
    attention = "scaled_dot_product" in func._schema.name
    drops = not attention or (len(args) > 3 and isinstance(args[3], float) and args[3] > 0)
    return torch.Tag.nondeterministic_seeded in func.tags and drops
