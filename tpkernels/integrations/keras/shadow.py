"""A Keras model for the planner: run on fake tensors, without a copy of it.

It owns the :class:`KerasShadow`, which stands where :class:`tpkernels.planning.runs.shadow.Shadow` stands for a PyTorch
model.  Keras layers cannot be copied, so the model itself runs: ``keras.StatelessScope`` gives its variables fake
values, and what a run changes (attributes, ``input_spec``, methods of instances, hooks) is put back afterwards.

``Dense``, and ``EinsumDense`` by its equation, report to the session as linear layers on flattened features; their
activation is traced.  Layers with an exact class of Keras's alone count: code of a subclass could read the kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tpkernels.integrations.keras import backend
from tpkernels.planning.modules.layers import Layer
from tpkernels.planning.runs.fake_answers import GUESSES
from tpkernels.planning.runs.gradient_code import code_of_gradients
from tpkernels.planning.runs.session import Session
from tpkernels.planning.runs.shadow import MODES, Mode, Shadow

__all__ = ["Equation", "KerasShadow", "equation_of", "named_layers"]


@dataclass(frozen=True)
class Equation:
    """What a Dense or EinsumDense computes: ``inputs`` are contracted with ``contracted``, which makes ``made``.

    All are letters of the equation; ``kernel`` are those of the kernel in their order.
    """

    kernel: str
    contracted: str
    made: str
    sizes: Mapping[str, int]

    @property
    def in_features(self) -> int:
        return prod(self.sizes[letter] for letter in self.contracted)

    @property
    def out_features(self) -> int:
        return prod(self.sizes[letter] for letter in self.made)


def equation_of(layer: Any) -> Equation | str:
    """The equation of a layer that is a matrix multiplication on its last dimensions, or why it is none."""
    keras = backend.keras_module()
    if type(layer) is keras.layers.Dense:
        if getattr(layer, "quantization_mode", None) is not None:
            return f"is quantized ({layer.quantization_mode})"
        shape = backend.plain_shape(backend.kernel_of(layer))
        return Equation("io", "i", "o", {"i": shape[0], "o": shape[1]})
    if type(layer) is not keras.layers.EinsumDense:
        return f"no way to cut a {type(layer).__name__} is known"
    if getattr(layer, "quantization_mode", None) is not None:
        return f"is quantized ({layer.quantization_mode})"
    inputs, output = layer.equation.replace(" ", "").split("->")
    x, kernel = (term.replace("...", "") for term in inputs.split(","))
    output = output.replace("...", "")
    sizes = dict(zip(kernel, backend.plain_shape(backend.kernel_of(layer)), strict=True))
    contracted = "".join(letter for letter in x if letter in kernel and letter not in output)
    made = "".join(letter for letter in output if letter in kernel and letter not in x)
    if set(kernel) != set(contracted) | set(made) or not contracted or not made:
        return f"its equation {layer.equation!r} is no matrix multiplication"
    if not x.endswith(contracted) or not output.endswith(made):
        return f"its equation {layer.equation!r} does not contract and make the last dimensions"
    if x[: len(x) - len(contracted)] != output[: len(output) - len(made)]:
        return f"its equation {layer.equation!r} moves other dimensions"
    return Equation(kernel, contracted, made, sizes)


def named_layers(model: Any) -> dict[str, Any]:
    """The layers of a model by names with dots, each under the first way to it; the model itself is ``""``.

    Names are those of the layers, with a number where two of one parent have the same.
    """
    found: dict[str, Any] = {"": model}
    names = {id(model): ""}
    waiting = [model]
    while waiting:
        parent = waiting.pop(0)
        prefix = names[id(parent)]
        for layer in backend.sublayers(parent):
            if id(layer) in names:
                continue
            own = layer.name.replace(".", "_")
            name = f"{prefix}.{own}" if prefix else own
            number = 1
            while name in found:
                number += 1
                name = f"{prefix}.{own}_{number}" if prefix else f"{own}_{number}"
            names[id(layer)], found[name] = name, layer
            waiting.append(layer)
    return found


def traced_einsum(equation: str, *operands: Tensor) -> Tensor:
    """The same ops whatever the sizes are: torch's own einsum squeezes dimensions of size 1 away."""
    inputs, output = equation.replace(" ", "").split("->")
    if "..." in equation:
        return _without_ellipsis(inputs.split(","), output, operands)
    terms = inputs.split(",")
    letters = output + "".join(dict.fromkeys(c for term in terms for c in term if c not in output))
    total: Tensor | None = None
    for term, x in zip(terms, operands, strict=True):
        x = x.permute([term.index(letter) for letter in letters if letter in term])
        for place, letter in enumerate(letters):
            if letter not in term:
                x = x.unsqueeze(place)
        total = x if total is None else total * x
    assert total is not None
    summed = list(range(len(output), len(letters)))
    return total.sum(summed) if summed else total


def _without_ellipsis(terms: list[str], output: str, operands: tuple[Tensor, ...]) -> Tensor:
    """Spell the dots out: as many new letters as the operand has more dimensions than letters."""
    free = [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in "".join((*terms, output))]
    most = max(x.dim() - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True) if "..." in t)
    spelled = []
    for term, x in zip(terms, operands, strict=True):
        count = x.dim() - len(term.replace("...", ""))
        spelled.append(term.replace("...", "".join(free[most - count : most])))
    return traced_einsum(f"{','.join(spelled)}->{output.replace('...', ''.join(free[:most]))}", *operands)


class _Called:
    """What the engine calls as the model: it passes ``training`` where the model takes it."""

    def __init__(self, model: Any) -> None:
        self.keras_model, self.training = model, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if backend.has_training_argument(self.keras_model):
            kwargs = {"training": self.training, **kwargs}
        return self.keras_model(*args, **kwargs)


class _Seen:
    """A layer as the search sees it: its numbers under the names by which the search knows what they mean.

    ``named`` maps the names that it shows to those of the layer.
    """

    def __init__(self, layer: Any) -> None:
        numbers = {key: value for key, value in vars(layer).items() if type(value) is int}
        public = {backend.meaning_of(key): key for key in numbers}
        self.__dict__.update({key: value for key, value in vars(layer).items() if key not in numbers})
        self.__dict__.update({name: numbers[key] for name, key in public.items()})
        self.__dict__.update(keras_layer=layer, named=public)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["keras_layer"](*args, **kwargs)

    def buffers(self) -> list[Tensor]:
        return []

    def modules(self) -> list[nn.Module]:
        return []

    def named_parameters(self, recurse: bool = True) -> list[tuple[str, nn.Parameter]]:
        return []


class KerasShadow(Shadow):
    """``model`` itself, whose variables have fake values while a session runs."""

    def __init__(self, model: Any) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.keras_layers = named_layers(model)
        self.model: Any = _Called(model)
        self.modules: Any = {name: _seen(layer) for name, layer in self.keras_layers.items()}
        self.session: Session | None = None
        self.gradients = True
        self.opaque: set[str] = set()
        self.guess = GUESSES[0]
        self.given: list[tuple[Tensor, Tensor]] = []
        self.constants: list[tuple[Tensor, Tensor]] = []
        self.layers: dict[str, Layer] = {}
        self.equations: dict[str, Equation] = {}
        self.reasons: dict[str, str] = {}
        """Of layers with weights that cannot be cut together with others: why."""
        self.owners: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.buffers: dict[int, str] = {}
        self.asked: set[str] = set()
        self.scaled: set[str] = set()
        self.weights: dict[int, str] = {}
        self.attentions: dict[int, str] = {}
        self.originals: dict[int, str] = {}
        self.holders: dict[int, str] = {}
        self.frozen: set[str] = set()
        self.mapping: list[tuple[Any, Tensor]] = []
        self._calls: dict[str, Callable[..., Any]] = {}
        self._fake_variables()

    def _fake_variables(self) -> None:
        fakes: dict[int, Tensor] = {}
        for layer in self.keras_layers.values():
            for variable in backend.variables_of(layer):
                if id(variable) in fakes or backend.raw_value(variable) is None:
                    continue
                value = backend.raw_value(variable)
                with self.fake:
                    empty = torch.empty(backend.plain_shape(variable), dtype=value.dtype)
                    weight = empty if variable.dtype.startswith(("int", "uint", "bool")) else nn.Parameter(empty, False)
                fakes[id(variable)] = weight
                self.mapping.append((variable, weight))
                if isinstance(weight, nn.Parameter):
                    self.names[id(weight)] = variable.path
                if not variable.trainable:
                    self.frozen.add(variable.path)
        for name, layer in self.keras_layers.items():
            equation = equation_of(layer)
            own = backend.variables_of(layer)
            if isinstance(equation, str):
                if own:
                    self.reasons[name] = equation
                continue
            self.equations[name] = equation
            self.layers[name] = Layer("linear", equation.in_features, equation.out_features)
            self.owners |= {id(fakes[id(variable)]): name for variable in own if id(variable) in fakes}
            self.modules[name].__dict__["weight"] = fakes[id(backend.kernel_of(layer))]
            self._calls[name] = self._linear(name, layer, equation)

    def _linear(self, name: str, layer: Any, equation: Equation) -> Callable[..., Any]:
        inner = [equation.sizes[letter] for letter in equation.made[1:]]
        trained = any(variable.trainable for variable in backend.weights_of(layer))

        def call(inputs: Tensor, training: object = None) -> Any:
            assert self.session is not None
            x = inputs
            if len(equation.contracted) > 1:
                x = x.reshape(*x.shape[: -len(equation.contracted)], -1)
            y = self.session.layer_called(name, x)
            if trained or x in self.session.requiring:
                self.session.requiring.made([y])
            if inner:
                y = y.reshape(*y.shape[:-1], -1, *inner)
            return y if layer.activation is None else layer.activation(y)

        return call

    def own_tensors(self, read: Container[str] = ()) -> dict[str, Tensor]:
        return {}  # variables are no parameters of modules

    def set_mode(self, mode: Mode) -> None:
        self.model.training, self.gradients = mode.training, mode.gradients

    def make_opaque(self, name: str) -> None:
        raise NotImplementedError(f"{name} needs the values of tensors, which a Keras model is not asked for")

    def fake_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with self.fake:
            made: tuple[Any, Any] = torch.utils._pytree.tree_map_only(
                Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), (args, kwargs)
            )
            return made

    @contextmanager
    def running(self, session: Session) -> Iterator[None]:
        """Run with the session's attributes, fake variables and reporting layers; all of it is put back."""
        keras = backend.keras_module()
        self.session = session
        with ExitStack() as stack:
            stack.callback(setattr, self, "session", None)
            for (name, attribute), value in session.attributes.items():
                holder = self.keras_layers[name]
                attribute = self.modules[name].named[attribute]
                stack.callback(backend.bare, holder, attribute, vars(holder)[attribute])
                backend.bare(holder, attribute, value)
            for name, layer in self.keras_layers.items():
                if getattr(layer, "input_spec", None) is not None:
                    stack.callback(setattr, layer, "input_spec", layer.input_spec)
                    layer.input_spec = None
                if name not in self._calls:
                    before = layer.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                    after = layer.register_forward_hook(self._leaving(name))
                    stack.callback(before.remove)
                    stack.callback(after.remove)
                for generator in backend.seed_generators(layer):
                    backend.bare(generator, "next", lambda ordered=True: (0, 0))
                    stack.callback(object.__delattr__, generator, "next")
            for name, call in self._calls.items():
                backend.bare(self.keras_layers[name], "call", call)
                stack.callback(object.__delattr__, self.keras_layers[name], "call")
            if keras.config.is_traceback_filtering_enabled():
                keras.config.disable_traceback_filtering()
                stack.callback(keras.config.enable_traceback_filtering)
            log = logging.getLogger("torch._subclasses.fake_tensor")
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
            stack.callback(setattr, torch, "einsum", torch.einsum)
            torch.einsum = traced_einsum
            stack.enter_context(backend.repeats_as_numbers())
            stack.enter_context(keras.StatelessScope(state_mapping=self.mapping))
            stack.enter_context(code_of_gradients(session))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            stack.enter_context(self.fake)
            stack.enter_context(session)
            yield


def _seen(layer: Any) -> Any:
    """A view of the layer, of a class of its own for each class of layers."""
    kind = type(layer)
    return type(kind.__name__, (_Seen,), {"kind": kind})(layer)


MODES_RUN = tuple(mode for mode in MODES if mode.gradients)
"""Keras's layers do not ask whether gradients are enabled."""
