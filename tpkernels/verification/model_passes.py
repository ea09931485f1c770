"""One forward and backward pass of a model, and everything in it that can be compared.

It owns the names of a result's tensors, the loss, and the record of what every module took and gave, with the gradients
of both.  Random numbers come from one seed in every pass, and the generators are left as they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.nn.host_generators import seeded_hosts

__all__ = ["Event", "Loss", "Pass", "Recorder", "compared", "is_compared", "is_state", "run", "tensors_of"]

Loss = Callable[[Any], Tensor]
STATES = ("past", "cache")
"""Parts of the names of results that the next call takes: a rank keeps its own part of them."""
DEEPEST = 8
_compared = ContextVar("tpkernels_compared", default=False)


@contextmanager
def compared() -> Iterator[None]:
    """Within it, calls are compared with the unsharded model, so a warning that they may be wrong is superfluous."""
    token = _compared.set(True)
    try:
        yield
    finally:
        _compared.reset(token)


def is_compared() -> bool:
    """Whether this runs within :func:`compared`."""
    return _compared.get()


@dataclass
class Pass:
    """The results of a pass."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    slopes: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the loss by the outputs."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """The tensors that the model was called with; they have gradients."""
    drew: bool = False
    """Random numbers were drawn."""


@dataclass
class Event:
    """A module was entered, or left; with the tensors that may have gradients, as they were then."""

    module: str
    leaves: bool
    turn: int
    """Of how many-th call of this module."""
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    """The tensors themselves: the same one may be several modules' input."""
    parent: str | None = None

    @property
    def key(self) -> tuple[str, bool, int]:
        return self.module, self.leaves, self.turn


class Recorder:
    """Notes what the modules ``names`` of ``model`` take and give during its first forward pass."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.events: list[Event] = []
        self.open: list[str] = []
        self._turns: dict[str, int] = {}
        self._recording = True
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name in modules:
                modules[name].register_forward_pre_hook(self._entering(name), with_kwargs=True)
                modules[name].register_forward_hook(self._leaving(name))

    def stop(self) -> None:
        """Checkpointing computes modules again while gradients are computed."""
        self._recording = False

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._recording:
                parent = self.open[-1] if self.open else None
                self._turns[name] = self._turns.get(name, -1) + 1
                self._note(Event(name, False, self._turns[name], parent=parent), {"": args, **kwargs})
                self.open.append(name)

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._recording:
                self.open.pop()
                self._note(Event(name, True, self._turns[name]), output)

        return hook

    def _note(self, event: Event, value: Any) -> None:
        for path, tensor in tensors_of(value).items():
            if tensor.requires_grad and tensor.is_floating_point():
                event.values[path] = tensor.detach().clone()
                event.held[path] = tensor
                tensor.register_hook(_keeper(event.gradients, path))
        self.events.append(event)


def _keeper(into: dict[str, Tensor], path: str) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        into[path] = gradient.detach().clone()

    return keep


def run(model: nn.Module, call: tuple[Any, Any], loss: Loss | None, recorder: Recorder | None = None) -> Pass:
    """A forward pass, and a backward pass if anything has a gradient."""
    found = Pass()
    args, kwargs = call
    found.inputs = {path: leaf for path, leaf in tensors_of({"": args, **kwargs}).items() if leaf.requires_grad}
    # What the model works on in place must be no leaf.
    args, kwargs = torch.utils._pytree.tree_map_only(
        Tensor, lambda leaf: leaf.clone() if leaf.requires_grad else leaf, (args, kwargs)
    )
    devices = [torch.cuda.current_device()] if any(p.is_cuda for p in model.parameters()) else []
    with torch.random.fork_rng(devices=devices), seeded_hosts(0), torch.enable_grad():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        result = model(*args, **kwargs)
        found.drew = not torch.equal(torch.get_rng_state(), before)
        found.outputs = tensors_of(result)
        learning = {path: tensor for path, tensor in found.outputs.items() if _learns(path, tensor)}
        for tensor in learning.values():
            tensor.retain_grad()
        if recorder is not None:
            recorder.stop()
        found.loss = _loss_of(result, learning, loss)
        if found.loss is not None and found.loss.requires_grad:
            found.loss.backward()
        found.slopes = {path: tensor.grad for path, tensor in learning.items() if tensor.grad is not None}
    found.outputs = {path: tensor.detach() for path, tensor in found.outputs.items()}
    found.loss = None if found.loss is None else found.loss.detach()
    return found


def is_state(path: str) -> bool:
    return any(word in path for word in STATES)


def _learns(path: str, tensor: Tensor) -> bool:
    plain = tensor.requires_grad and tensor.is_floating_point() and not isinstance(tensor, DTensor)
    return plain and not is_state(path)


def _loss_of(result: Any, learning: Mapping[str, Tensor], loss: Loss | None) -> Tensor | None:
    """The caller's, the model's own, or a sum with fixed random weights, to which every element of every output
    contributes."""
    if loss is not None:
        value: Any = loss(result)
        if not torch.is_tensor(value) or value.numel() != 1:
            raise ValueError(f"loss must return a tensor of one element, got {value!r}")
        return value
    own: Any = getattr(result, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own
    total: Tensor | None = None
    for path, tensor in learning.items():
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        weights = torch.randn(tensor.shape, generator=generator).bfloat16().double().to(tensor.device)
        share = (tensor.double() * weights).sum()
        total = share if total is None else total + share
    return total


def tensors_of(value: Any) -> dict[str, Tensor]:
    """All tensors of a result (or of arguments) by where they stand: ``logits``, ``[1]``, ``past.layers[0].keys``."""
    found: dict[str, Tensor] = {}
    _walk(value, "", found, set(), 0)
    return found


def _walk(value: Any, path: str, found: dict[str, Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, Tensor):
        found[path or "output"] = value
        return
    if depth > DEEPEST or id(value) in seen or isinstance(value, nn.Module | type | str | bytes | float):
        return
    seen.add(id(value))
    ends: list[str]
    if isinstance(value, Mapping):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)  # of a named tuple
        ends = [f".{name}" for name in names] if names else [f"[{index}]" for index in range(len(value))]
        items = [((path + end).lstrip("."), item) for end, item in zip(ends, value, strict=True)]
    elif is_dataclass(value) or (hasattr(value, "__dict__") and not type(value).__module__.startswith("torch")):
        items = [(f"{path}.{key}" if path else key, item) for key, item in vars(value).items()]
    else:
        return
    for where, item in items:
        _walk(item, where, found, seen, depth + 1)
