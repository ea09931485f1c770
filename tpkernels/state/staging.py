"""Loading in two steps: read everything into tensors of this rank's sizes, then put them into the model.

Everything that can fail happens in the first step, in which the model does not change.  A model on the meta device
takes the staged tensors themselves, so that a rank never holds more than its shards; a model with weights gets copies.

A parameter of a model on the meta device stays the same object (``torch.utils.swap_tensors``), because optimizers may
hold it already.  Buffers that are in no checkpoint (rotary frequencies, position ids) are computed by the model's own
``_init_weights``, as transformers computes them.  A model is refused if it has no such method, or if the method leaves
them alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.nn.parameters import as_parameter
from tpkernels.state.originals import Box, Original, Part, local_of, meshes_of

__all__ = ["Buffers", "Target", "as_real", "check_unseen", "commit", "computed_buffers", "device_of", "targets_of"]

Buffers = list[tuple[nn.Module, str, Tensor]]
"""Module, name of the buffer, value."""


@dataclass(frozen=True)
class Target:
    """A tensor of the model, where it lies in the original, and what it will hold."""

    part: Part
    original: Original
    box: Box
    staged: Tensor

    @property
    def tensor(self) -> Tensor:
        return self.part.tensor


def targets_of(originals: Sequence[Original], device: torch.device) -> list[Target]:
    """Empty tensors for this rank's part of every original; ``device`` is where a model on the meta device goes."""
    targets = []
    for original in originals:
        for part in original.parts:
            box = original.box(part)
            where = device if part.tensor.is_meta else torch.device("cpu")
            staged = torch.empty(box.sizes, dtype=original.dtype, device=where)
            targets.append(Target(part, original, box, staged))
    return targets


def device_of(model: nn.Module) -> torch.device:
    """The device that a model on the meta device goes to: that of its mesh."""
    kind = meshes_of(model)[0].device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def commit(model: nn.Module, targets: Sequence[Target], buffers: Buffers) -> None:
    """Put what was staged into the model."""
    real: dict[int, Tensor] = {}
    for target in targets:
        if not target.tensor.is_meta:
            local_of(target.tensor).copy_(target.part.placed(target.staged))
        elif isinstance(target.tensor, DTensor):
            _materialise(target.part, target.staged)
        else:
            real[id(target.tensor)] = target.staged
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in real:
                module._buffers[name] = real[id(buffer)]
    for module, name, value in buffers:
        module._buffers[name] = value


def as_real(part: Part, values: Tensor) -> Tensor:
    """A tensor like the part's, of which this rank holds ``values`` (in the original's dimensions)."""
    like = part.tensor
    if not isinstance(like, DTensor):
        return values
    return DTensor.from_local(
        part.placed(values), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _materialise(part: Part, values: Tensor) -> None:
    parameter = part.tensor
    whole = cast(DTensor, as_real(part, values))
    if isinstance(parameter, nn.Parameter):
        as_parameter(whole, parameter.requires_grad)
    vars(whole).update({key: value for key, value in vars(parameter).items() if not hasattr(whole, key)})
    torch.utils.swap_tensors(parameter, whole)


def check_unseen(model: nn.Module, targets: Sequence[Target]) -> None:
    """Refuse what a model on the meta device has and no checkpoint could fill.

    Raises:
        ValueError: a tensor on the meta device that is neither a parameter nor a buffer, or a parameter with a weak
            reference to it, which could not be replaced.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(
                    f"{path}.{name} is a tensor on the meta device that is neither a parameter nor a buffer: nothing "
                    "can fill it; register it as a buffer, or build the model on the CPU"
                )
    for target in targets:
        if target.tensor.is_meta and weakref.getweakrefs(target.tensor):
            raise ValueError(f"{target.original.name} has weak references to it and cannot leave the meta device")


def computed_buffers(model: nn.Module, device: torch.device) -> Buffers:
    """Values of the buffers on the meta device that no checkpoint has; the model stays as it is.

    Raises:
        ValueError: nobody computes one of them.
    """
    made: Buffers = []
    initialiser: Any = None
    above: dict[str, Any] = {}
    for path, module in model.named_modules():
        initialiser = above.get(path.rpartition(".")[0]) if path else None
        above[path] = getattr(module, "_init_weights", None) or initialiser
        names = [
            name for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None and cast(Tensor, module._buffers[name]).is_meta
        ]  # fmt: skip
        if names:
            made += _compute(path, module, names, above[path], device)
    return made


def _compute(path: str, module: nn.Module, names: Sequence[str], initialise: Any, device: torch.device) -> Buffers:
    before: Mapping[str, Tensor | None] = dict(module._buffers)
    marked = [parameter for parameter in module.parameters() if not hasattr(parameter, "_is_hf_initialized")]
    fresh = {name: torch.empty_like(cast(Tensor, before[name]), device=device) for name in names}
    versions = {name: tensor._version for name, tensor in fresh.items()}
    try:
        module._buffers.update(fresh)
        for parameter in marked:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers then leaves it alone
        if initialise is not None:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                initialise(module)
        after = {name: cast(Tensor, module._buffers[name]) for name in names}
    finally:
        module._buffers.update(before)
        for parameter in marked:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]
    untouched = [name for name in names if after[name] is fresh[name] and after[name]._version == versions[name]]
    if untouched:
        raise ValueError(
            f"{path or type(module).__name__} has buffers {untouched} that are in no checkpoint (persistent=False), "
            "and nothing computes them for a model on the meta device: build that module on the CPU, register them as "
            "persistent, or give the model an _init_weights(module) that fills them"
        )
    return [(module, name, after[name].to(device)) for name in names]
