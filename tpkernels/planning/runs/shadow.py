"""A copy of a model whose tensors are fake, and the set-up and clean-up around each of its runs.

It owns the :class:`Shadow`.  Its parameters and buffers need no memory, and its layers report to the session that runs.
Its forward can affect the model only through objects that a copy shares with it
(:mod:`tpkernels.planning.runs.trace_leaks`).  Modules that need the values of tensors are marked opaque here;
:mod:`tpkernels.planning.runs.opaque_modules` finds them.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map, tree_map_only

from tpkernels.nn.convolution import own_code
from tpkernels.nn.cut_experts import caller_of
from tpkernels.planning.modules.channel_modules import channels_in_groups, channels_of, is_batched, works_by_channel
from tpkernels.planning.modules.experts import KnownExperts
from tpkernels.planning.modules.layers import Layer, layer_of, own_base, own_call, unswappable
from tpkernels.planning.modules.numbers import root_of, set_number
from tpkernels.planning.modules.own_code import rebased
from tpkernels.planning.modules.part_norms import KnownNorm, may_be_norm
from tpkernels.planning.modules.reporting import REPORTING
from tpkernels.planning.runs.conditions import KnownPaths
from tpkernels.planning.runs.fake_answers import GUESSES, Answers, fake_as_real
from tpkernels.planning.runs.fake_copies import like, uncopyable
from tpkernels.planning.runs.function_calls import functions_seen
from tpkernels.planning.runs.gradient_code import code_of_gradients
from tpkernels.planning.runs.host_draws import COME, drawing
from tpkernels.planning.runs.known_values import constants_of, values_of
from tpkernels.planning.runs.module_state import Noting, put
from tpkernels.planning.runs.trace_leaks import Caches
from tpkernels.planning.runs.weight_reads import weights_of_layers, with_own_product

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session

__all__ = ["MODES", "Mode", "Shadow"]


class Mode(NamedTuple):
    """What a model's code may ask about the run it is in: ``self.training``, and ``torch.is_grad_enabled()``."""

    training: bool
    gradients: bool

    def __str__(self) -> str:
        name = "training" if self.training else "evaluation"
        return name if self.gradients else f"{name} without gradients"


MODES = (Mode(True, True), Mode(False, True), Mode(True, False), Mode(False, False))

_CONSTANTS = (Tensor, nn.Module, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Shadow:
    """A copy of ``model`` with fake tensors whose layers report to the session that runs; raises what copying does."""

    experts: Mapping[str, KnownExperts] = MappingProxyType({})
    """Modules of experts, each of whose calls is one step."""
    norms: Mapping[str, KnownNorm] = MappingProxyType({})
    """Of RMS norms and layer norms that are called with one tensor."""
    kept: Container[str] = frozenset()
    """Modules that work on each channel by itself, and stay whole."""
    convolutions: Mapping[str, Layer] = MappingProxyType({})
    """Those over all channels."""
    grouped: Mapping[str, Layer] = MappingProxyType({})
    """Convolutions in groups, which may be ends of pairs as well."""
    by_channel: Collection[str] = frozenset()
    """What works on each channel by itself."""
    around: Set[str] = frozenset()
    """Convolutions within code of their own, which runs around what reports the call;"""
    convolving: str | None = None
    """what is being called of these and of all that works by channels."""
    branching: Collection[str] = frozenset()
    """Modules that branch on a condition of tensors,"""
    open: Set[str] = frozenset()
    """and those that ask for values on which sizes depend, and are followed ("" is the model itself)."""
    dice = COME
    """How runs draw random numbers from Python and NumPy,"""
    drawn_from: Set[str] = frozenset()
    """and from which of these any run has drawn some."""
    decides = True
    """Whether conditions that all ranks answer alike are answered in every way; else modules branch on them, too."""

    def __init__(self, model: nn.Module, caches: Caches, experts: Mapping[str, KnownExperts] = experts) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.caches = caches
        self.experts = experts
        called = {caller_of(name, known.layout): name for name, known in experts.items()}
        self.with_routers: dict[str, tuple[str, ...]] = {
            name: (name, caller.rpartition(".")[0]) for caller, name in called.items()
        }
        """Experts with the modules that have them and their routers."""
        memo: dict[int, Any] = {}
        with self.fake:
            for parameter in model.parameters():
                memo[id(parameter)] = nn.Parameter(like(parameter), requires_grad=False)
            for buffer in model.buffers():
                memo.setdefault(id(buffer), like(buffer))
        for module in model.modules():
            memo |= uncopyable(module, memo)
        self.model = copy.deepcopy(model, memo)
        self.gradients = True
        """Whether runs are with gradients enabled; no tensor has one."""
        self.modules = dict(self.model.named_modules())
        self.session: Session | None = None
        self.known = KnownPaths()
        self.opaque: set[str] = set()
        """Modules that need the values of tensors."""
        self._followed: dict[str, Any] = {}
        """What these run when they are followed."""
        self.guess = GUESSES[0]
        self.given: list[tuple[Tensor, Tensor]] = []
        """Inputs of runs, and their numbers."""
        self.layers: dict[str, Layer] = {}
        self.convolutions = {
            name: Layer("convolution", *channels)
            for name, module in self.modules.items() if (channels := channels_of(module)) is not None
        }  # fmt: skip
        self.grouped = {
            name: Layer("convolution", *channels)
            for name, module in self.modules.items() if (channels := channels_in_groups(module)) is not None
        }  # fmt: skip
        self.by_channel = {name for name, module in self.modules.items() if works_by_channel(module)}
        self.owners: dict[int, str] = {}
        """Layers by the ids of their parameters."""
        self.asked: set[str] = set()
        """Layers whose parameters the model's code has asked for their shape, or used, in any run."""
        self.scaled: set[str] = set()
        """Layers whose weight code multiplies in place by a number, in any run."""
        self.attentions = {
            id(parameter): name
            for name, module in self.modules.items()
            if isinstance(module, nn.MultiheadAttention | _ConvNd) or name in self.by_channel
            for parameter in (*module.parameters(), *module.buffers())
        }
        """torch's attention modules, convolutions and norms of channels by the ids of theirs."""
        self.originals = {id(parameter): name for name, parameter in model.named_parameters()}
        """The model's own parameters, which only code reads that keeps them outside of their modules."""
        self.holders = {id(module): name for name, module in model.named_modules()}
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.buffers = {id(buffer): name for name, buffer in self.model.named_buffers()}
        self.constants = [(self.model.get_buffer(name), value) for name, value in constants_of(model).items()]
        """Buffers with numbers of the configuration."""
        self._sliced: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for name, module in self.modules.items():
            layer = layer_of(module)
            if layer is not None and unswappable(module) is None:
                self.layers[name] = layer
                self.owners |= {id(parameter): name for parameter in module.parameters(recurse=False)}
                base = own_base(module)
                if (own := own_call(module)) is not None:  # the product in its code is the layer
                    module.forward = with_own_product(module, own.padding, self._reporting(name))
                elif base is None:
                    module.forward = self._reporting(name)
                else:  # its own code runs, and what that calls is the layer
                    module.reports = self._reporting(name)
                    module.__class__ = rebased(type(module), base, REPORTING[base])
            else:
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                module.register_forward_hook(self._leaving(name))
                if name in self.convolutions or name in self.by_channel:
                    self._report_channels(name, module)
                elif may_be_norm(module):
                    module.forward = self._norming(name, module.forward)
                if name in experts:
                    self.owners |= {id(parameter): name for parameter in module.parameters(recurse=False)}
                if name in called:
                    module.forward = self._mixing(called[name])
        self.weights = weights_of_layers(self)
        """Layers by the ids of their weights, where a product with the weight is a call of the layer."""

    @property
    def asking(self) -> tuple[frozenset[str], ...]:
        """Modules that need the values of tensors: opaque ones, those that branch on conditions, and open ones."""
        return frozenset(self.opaque), frozenset(self.branching), frozenset(self.open)

    @property
    def sizes(self) -> Mapping[str, Layer]:
        """Of whatever may be cut in a group."""
        return {**self.layers, **self.convolutions, **self.grouped}

    def set_mode(self, mode: Mode) -> None:
        """Set the mode of the runs that follow."""
        self.model.train(mode.training)
        self.gradients = mode.gradients

    def own_tensors(self, read: Container[str] = ()) -> dict[str, Tensor]:
        """Parameters and buffers of single modules, of which a rank could have a part: no layers, but for those that
        are only ``read``."""
        found: dict[int, list[str]] = {}
        parameters = self.model.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *self.model.named_buffers(remove_duplicate=False)):
            found.setdefault(id(tensor), []).append(name)
        alone = [names[0] for names in found.values() if len(names) == 1]
        owners = {name: name.rpartition(".")[0] for name in alone}
        free = [name for name, owner in owners.items() if owner not in self.layers or owner in read]
        return {name: self.own(name) for name in free}

    def own(self, name: str) -> Tensor:
        """The parameter or buffer ``name`` of the copy."""
        owner, _, key = name.rpartition(".")
        parameter = self.modules[owner]._parameters.get(key)
        return self.model.get_buffer(name) if parameter is None else parameter

    def sliced(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """What stands for parameter or buffer ``name`` on a rank that has ``shape`` of it."""
        if (name, shape) not in self._sliced:
            whole = self.own(name)
            with self.fake:
                part = whole.new_empty(shape)
                self._sliced[name, shape] = part
                if isinstance(whole, nn.Parameter):
                    self._sliced[name, shape] = nn.Parameter(part, requires_grad=False)
                    self.names[id(self._sliced[name, shape])] = name
        return self._sliced[name, shape]

    def make_opaque(self, name: str) -> None:
        """Make the module one step from now on: what happens inside is neither recorded nor followed."""
        self.opaque.add(name)
        module = self.modules[name]
        self._followed.setdefault(name, module.forward)
        module.forward = self._quietly(name, module.forward)
        self.branching = {*self.branching} - {name}

    def make_branching(self, name: str) -> None:
        """Make what the module runs from its first condition on one step from now on."""
        self.branching = {*self.branching, name}
        module = self.modules[name]
        self._followed.setdefault(name, module.forward)
        module.forward = self._branching(name, module.forward)

    def ask_as(self, opaque: Set[str], branching: Set[str], open: Set[str]) -> None:
        """Let only these be opaque, branching and open: what a run asked for that failed tells nothing of others."""
        self.open = open
        changed = (self.opaque ^ opaque) | ({*self.branching} ^ branching)
        for name in changed:
            self.modules[name].forward = self._followed.pop(name)
        self.opaque, self.branching = set(opaque), {*branching} - changed
        for name in changed & branching:
            self.make_branching(name)

    @contextmanager
    def running(self, session: Session) -> Iterator[None]:
        """Fake mode, the session on top of it, and its attributes in place of the model's.

        Modules begin with what the session says that they do, and are as before at the end.

        Gradients are enabled as the mode says, to the model's code alone: no parameter requires one.
        """
        begun, noting = put(self.modules, session.begins), Noting(session)
        roots = {(name, root_of(attribute)) for name, attribute in session.numbers}
        before = {(name, root): getattr(self.modules[name], root) for name, root in roots}
        whole = {name: self.own(name) for name in session.slices}
        self.session = session
        # A guess that does not fit makes an op fail, which torch would print with a traceback.
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled, log.disabled = log.disabled, True
        # torch's encoder layers read all their weights at once in evaluation, which parallel ones never do.
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for (name, attribute), value in session.numbers.items():
                set_number(self.modules[name], attribute, value)
            self._hold(session.slices)
            with (
                code_of_gradients(session),
                torch.compiler.set_stance("force_eager"),  # a compiled function shows no ops
                torch.set_grad_enabled(self.gradients),
                self.fake,
                fake_as_real(),
                Answers(session, self.guess),
                functions_seen(session),
                drawing(session),
                noting,
                session,
            ):
                hook = register_module_forward_pre_hook(self._note_original)
                try:
                    yield
                finally:
                    hook.remove()
        finally:
            self.session = None
            log.disabled = was_disabled
            torch.backends.mha.set_fastpath_enabled(fast)
            put(self.modules, noting.before)
            for (name, attribute), value in before.items():
                setattr(self.modules[name], attribute, value)
            self._hold(whole)
            put(self.modules, begun)
            session.met_real_cache = self.caches.empty()

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition(".")
            module = self.modules[owner]
            held: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
            held[key] = tensor

    def fake_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Fake tensors shaped like those given, of which integers keep their values; those on meta are made to fit.

        Where all of the model is on one device, they are there as well: who plans before the batch is moved is right.
        """
        parameters = list(self.model.parameters())
        devices = {parameter.device for parameter in parameters}
        place = devices.pop() if len(devices) == 1 else None

        def fake(tensor: Tensor) -> Tensor:
            if not tensor.is_meta or not parameters:
                made = like(tensor)
                made = made if place is None else made.to(place)
                if (values := values_of(tensor)) is not None:
                    self.given.append((made, values))
                return made
            dtype = parameters[0].dtype if tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype, device=parameters[0].device)

        with self.fake:
            made: tuple[Any, Any] = tree_map_only(Tensor, fake, (args, kwargs))
            return made

    def copied(self, value: Any) -> Any:
        """Arguments of a module, for a run of their own: objects that a run changes (caches) are copied, with the same
        tensors; what refuses to be copied is the object itself."""
        memo: dict[int, Any] = {id(module): module for module in self.modules.values()}

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, _CONSTANTS):
                return leaf
            copy._deepcopy_dispatch[FakeTensor] = lambda tensor, memo: tensor  # type: ignore[attr-defined]
            try:
                return copy.deepcopy(leaf, memo)
            except (TypeError, RuntimeError, ValueError, AttributeError, copy.Error):
                return leaf
            finally:
                del copy._deepcopy_dispatch[FakeTensor]  # type: ignore[attr-defined]

        return tree_map(copied, value)

    def _note_original(self, module: nn.Module, args: Any) -> None:
        """A module of the model itself runs, which is swapped in place: that it reads its parameters is no capture."""
        if self.session is not None and id(module) in self.holders:
            self.session.original_called(self.holders[id(module)])

    def _reporting(self, name: str) -> Any:
        def forward(input: Tensor) -> Tensor:
            assert self.session is not None
            quiet = self.session.quiet is not None
            out = (self.session.layer_called_quietly if quiet else self.session.layer_called)(name, input)
            if any(tensor in self.session.requiring for tensor in (input, *self.modules[name].parameters())):
                self.session.requiring.made([out])
            return out

        return forward

    def _mixing(self, name: str) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            assert self.session is not None
            return self.session.experts_called(name, args, kwargs)

        return forward

    def _norming(self, name: str, forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def norm(*args: Any, **kwargs: Any) -> Any:
            gated = len(args) == 2 and all(isinstance(one, Tensor) for one in args)
            alone = len(args) == 1 and isinstance(args[0], Tensor)
            other = bool(kwargs) or not (alone or gated) or name in self.branching  # what stands for one does not ask
            if self.session is None or self.session.quiet is not None or other:
                return forward(*args, **kwargs)
            return self.session.norm_called(name, forward, *args)

        return norm

    def _report_channels(self, name: str, module: Any) -> None:
        base: Any = own_code(module) if isinstance(module, _ConvNd) else None
        if base is None:
            module.forward = self._by_channels(name, module, module.forward)
            return
        self.around |= {name}
        module.reports = self._by_channels(name, module, functools.partial(base.forward, module))
        module.__class__ = rebased(type(module), base, REPORTING[base])

    def _by_channels(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs and is_batched(module, args[0])
            if self.session is None:
                return forward(*args, **kwargs)
            outer, self.convolving = self.convolving, name
            try:
                if alone and self.session.quiet is None and name not in self.branching:
                    return self.session.channels_called(name, forward, args[0])
                self.session.channels_called_otherwise(name)
                return forward(*args, **kwargs)
            finally:
                self.convolving = outer

        return called

    def _quietly(self, name: str, forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def quiet(*args: Any, **kwargs: Any) -> Any:
            assert self.session is not None
            return self.session.opaque_called(name, forward, args, kwargs)

        return quiet

    def _branching(self, name: str, forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.session is None:
                return forward(*args, **kwargs)
            return self.session.branching_called(name, forward, args, kwargs)

        return called

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.session is None:
                return None
            if self.session.quiet is not None:
                return self.session.entered_quietly(name, args, kwargs)
            self.session.inside.append(name)
            self.session.entered(name, args, kwargs)
            return self.session.given(name, args, kwargs)

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return None if self.session is None else self.session.leaving(name, output)

        return hook
