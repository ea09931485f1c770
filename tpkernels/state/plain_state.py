"""``state_dict`` and ``load_state_dict`` of a parallelized model, in the names and shapes that it had before.

A parameter that one DTensor can describe is that DTensor.  Any other (packed query, key and value; heads that do not
divide) is gathered, and is a plain tensor that is equal on all ranks.  All ranks must therefore call ``state_dict()``,
of the model or a part of it; if one does not, the others raise.  ``load_state_dict`` takes the same tensors, or whole
plain tensors that are equal on all ranks, of which each rank keeps its part.  A state dict that does not fit is refused
on every rank before anything changes.

It owns the hooks and the class that :func:`speak_originals` gives to a model.  Modules that hold the model (a wrapper
of the user's, ``torch.compile``) reach it through the hooks, which do not receive ``strict``.  There shapes are checked
before anything changes, and torch checks names afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from tpkernels.errors import StateMismatch
from tpkernels.nn.digests import digest_of, json_digest
from tpkernels.nn.gathering import gathered
from tpkernels.nn.parameters import as_parameter
from tpkernels.state.checkpoint import full_state_dict
from tpkernels.state.collective_errors import Ranks
from tpkernels.state.originals import (
    Original,
    Part,
    as_held,
    holds_as_held,
    is_held_otherwise,
    keys_of,
    local_of,
    meshes_of,
)
from tpkernels.state.staging import as_real, device_of

__all__ = ["cut_alike", "speak_originals"]

M = TypeVar("M", bound=nn.Module)


def speak_originals(model: M) -> M:
    """Give a parallel model ``state_dict`` and ``load_state_dict`` in original names and shapes; returns it."""
    parts: set[int] = set()
    for module in model.modules():
        module.register_state_dict_pre_hook(_meet)
        module.register_load_state_dict_pre_hook(_cut)
        if id(module) in parts:
            continue
        if _may_differ(module) and is_held_otherwise(module):
            module.register_state_dict_post_hook(_gather)
            parts |= {id(child) for child in module.modules()}
    model.__class__ = _speaking(type(model))  # type: ignore[assignment,arg-type]
    return model


def _may_differ(module: nn.Module) -> bool:
    return callable(getattr(module, "packed_parameters", None)) or any(
        isinstance(parameter, DTensor) for parameter in module._parameters.values()
    )


@lru_cache(maxsize=256)
def _speaking(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a model's class that loads all or nothing, and whose ``save_pretrained``, if any, gathers."""
    members: dict[str, Any] = {"load_state_dict": _load_state_dict, "_speaks_originals": True}
    if hasattr(cls, "save_pretrained"):
        members["save_pretrained"] = _saver(cls)
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))


def _is_spoken_for(module: nn.Module, prefix: str) -> bool:
    """Whether the model, or the part that was called, is above ``module``, and has done the work for it."""
    return holds_as_held() or (prefix != "" and not getattr(type(module), "_speaks_originals", False))


def _meet(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook before ``state_dict``: all ranks are here, or it raises."""
    if not _is_spoken_for(module, prefix) and meshes_of(module):
        Ranks.of(module).exchange(f"state_dict() of {type(module).__name__}", {})


def _gather(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """A hook after ``state_dict`` of a module that holds other tensors than the originals."""
    if holds_as_held():
        return
    originals, keys, _ = keys_of(module)
    held = {name: [destination.pop(prefix + key) for key in keys[name]] for name in originals}
    with torch.no_grad():
        for name, original in originals.items():
            destination[prefix + name] = held[name][0] if original.is_held_whole else original.whole()


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before ``load_state_dict`` of a part of the model, or of a module that holds it."""
    if not _is_spoken_for(module, prefix) and meshes_of(module):
        _Load(module, state_dict, prefix, strict=False, assign=True).into(state_dict)


def _load_state_dict(
    self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> _IncompatibleKeys:
    """``nn.Module.load_state_dict``, but all or nothing: see :mod:`tpkernels.state.plain_state`.

    Raises:
        StateMismatch: names that are missing or unexpected (if ``strict``), other shapes, tensors that differ between
            ranks; a ``RuntimeError``, as torch's, on every rank, with the model as it was.
    """
    cut = dict(state_dict)
    load = _Load(self, cut, "", strict=strict, assign=assign)
    load.into(cut)
    metadata = getattr(state_dict, "_metadata", None)
    given = _StateDict(cut)
    if metadata is not None:
        given._metadata = metadata
    with as_held():
        result = super(_owner(type(self)), self).load_state_dict(given, strict=strict, assign=assign)
    names = {key: name for name, keys in load.keys.items() for key in keys}
    return _IncompatibleKeys(
        list(dict.fromkeys(names.get(key, key) for key in result.missing_keys)), result.unexpected_keys
    )


class _StateDict(dict[str, Any]):
    """A dictionary that can have ``_metadata``."""

    _metadata: Any


def _owner(cls: type) -> Any:
    """The class that :func:`_speaking` made, of which FSDP2 may have made another one."""
    return next(one for one in cls.__mro__ if "_speaks_originals" in vars(one))


class _Seen(NamedTuple):
    """What a rank says of a state dict before it takes anything from it."""

    wrong: list[str]
    facts: list[Any]


class _Load:
    """One state dict that is to be loaded into ``module``; the constructor raises on all ranks or on none."""

    def __init__(self, module: nn.Module, given: Mapping[str, Any], prefix: str, *, strict: bool, assign: bool) -> None:
        self._module, self._given, self._prefix, self._assign = module, given, prefix, assign
        self.originals, self.keys, self._others = keys_of(module)
        seen = self._look(strict)
        facts = json_digest(seen.facts)
        said = Ranks.of(module).exchange(
            f"load_state_dict() of {type(module).__name__}",
            {"rank": dist.get_rank(), "wrong": seen.wrong[:4], "count": len(seen.wrong), "facts": facts},
        )
        blamed = {one["rank"]: one for one in said if one["wrong"]}
        if blamed:
            rank = dist.get_rank() if dist.get_rank() in blamed else min(blamed)
            more = blamed[rank]["count"] - len(blamed[rank]["wrong"])
            raise StateMismatch(
                f"this is not a state dict of the {type(module).__name__}"
                + (f" on rank(s) {sorted(blamed)}" if len(blamed) < len(said) else "")
                + f": {'; '.join(blamed[rank]['wrong'])}{f'; and {more} more' if more else ''}. Nothing was changed"
            )
        if len({one["facts"] for one in said}) > 1:
            raise StateMismatch(
                f"the ranks gave different state dicts for the {type(module).__name__}: "
                f"{[one['facts'][:8] for one in said]}. Nothing was changed"
            )

    def _look(self, strict: bool) -> _Seen:
        """What is wrong with names and shapes; and what must be the same on all ranks."""
        names = {key.removeprefix(self._prefix) for key in self._given if key.startswith(self._prefix)}
        wrong = self._wrong_names(names) if strict else []
        facts: list[Any] = []
        for name, original in self.originals.items():
            if name not in names:
                continue
            value = self._given[self._prefix + name]
            if not isinstance(value, Tensor):
                wrong.append(f"{name} must be a tensor, it is a {type(value).__name__}")
            elif tuple(value.shape) != original.shape:
                wrong.append(f"{name} is {tuple(value.shape)}, in the model {original.shape}")
            elif isinstance(value, DTensor) and not self._is_reachable(original, value):
                wrong.append(
                    f"{name} is a DTensor on {value.device_mesh}, and the model is not: give the whole tensor "
                    "(tpk.full_state_dict), or load the file with torch.distributed.checkpoint or tpk.load_snapshot"
                )
            elif isinstance(value, DTensor):
                facts.append([name, str(value.dtype), str(value.placements), list(value.device_mesh.shape)])
            elif any(isinstance(part.tensor, DTensor) for part in original.parts):  # buffers may differ
                digest = None if value.is_meta else digest_of(value.detach(), [0] * value.dim())
                facts.append([name, str(value.dtype), digest])
        return _Seen(wrong, facts)

    def _is_reachable(self, original: Original, value: DTensor) -> bool:
        """Whether a DTensor is cut as the model's, or can be gathered on a mesh of the model's."""
        if original.is_held_whole and cut_alike(value, original.parts[0].tensor):
            return True
        return any(value.device_mesh is mesh or value.device_mesh == mesh for mesh in meshes_of(self._module))

    def _wrong_names(self, names: set[str]) -> list[str]:
        lenient = _with_own_loading(self._module)
        inner = {key for keys in self.keys.values() for key in keys}
        missing = [name for name in self.originals if name not in names]
        unexpected = [
            name for name in sorted(names)
            if name not in self.originals and name not in self._others and not (name in inner and self._is_own(name))
        ]  # fmt: skip
        return [
            f"{kind} {name}" for kind, some in (("missing", missing), ("unexpected", unexpected)) for name in some
            if not name.startswith(lenient)
        ]  # fmt: skip

    def _is_own(self, key: str) -> bool:
        """Whether torch's ``set_model_state_dict`` has added this to a full state dict, from what the model holds."""
        value = self._given[self._prefix + key]
        if not isinstance(value, DTensor):
            return False
        mine = {id(part.tensor) for original in self.originals.values() for part in original.parts}
        return id(value) in mine

    def into(self, state_dict: dict[str, Any]) -> None:
        """Replace originals by what the model's modules hold of them."""
        with torch.no_grad():
            for name, original in self.originals.items():
                if self._prefix + name not in state_dict:
                    continue
                value = state_dict[self._prefix + name]
                if not any(isinstance(part.tensor, DTensor) for part in original.parts):
                    continue
                del state_dict[self._prefix + name]
                for key, tensor in zip(self.keys[name], self._parts(original, value), strict=True):
                    state_dict[self._prefix + key] = tensor

    def _parts(self, original: Original, value: Tensor) -> list[Tensor]:
        like = original.parts[0].tensor
        if isinstance(value, DTensor) and original.is_held_whole and cut_alike(value, like):
            return [self._as(original.parts[0], local_of(value))]
        whole = gathered(value)
        return [self._as(part, whole[original.box(part).slices]) for part in original.parts]

    def _as(self, part: Part, local: Tensor) -> Tensor:
        """``local`` as the module holds it; to be assigned it is a parameter with memory of its own."""
        like = cast(DTensor, part.tensor)
        if not local.is_meta:
            local = local.to(device_of(self._module) if like.is_meta else like.device)
        local = local.clone(memory_format=torch.contiguous_format) if self._assign else local.contiguous()
        made = cast(DTensor, as_real(part, local))
        return as_parameter(made, like.requires_grad) if self._assign and isinstance(like, nn.Parameter) else made


def cut_alike(value: DTensor, like: Tensor) -> bool:
    """Whether each rank holds of ``value`` what it holds of ``like``."""
    return (
        isinstance(like, DTensor)
        and value.placements == like.placements
        and value.device_mesh.shape == like.device_mesh.shape
        and local_of(value).shape == local_of(like).shape
    )


def _with_own_loading(model: nn.Module) -> tuple[str, ...]:
    """Prefixes of modules that take other names than they give (old checkpoints'): their names are left to torch."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
        renames = any(hook is not _cut and not str(hook.__module__).startswith("torch.") for hook in hooks)
        if renames or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
            found.append(f"{path}." if path else "")
    return tuple(found)


def _saver(cls: type[Any]) -> Any:
    """``save_pretrained`` of a model of transformers or PEFT: gathers on all ranks, and writes on rank 0 of the job."""
    names = list(inspect.signature(cls.save_pretrained).parameters)[1:]

    def save_pretrained(self: Any, save_directory: str | Path, *args: Any, **options: Any) -> None:
        writes = dist.get_rank() == 0
        given = dict(zip(names, (save_directory, *args), strict=False)) | options
        state_dict: Mapping[str, Any] | None = given.pop("state_dict", None)
        if state_dict is None:
            state_dict = full_state_dict(self, rank=0)
        else:
            state_dict = {
                name: gathered(value) if isinstance(value, DTensor) else value for name, value in state_dict.items()
            }

        def write() -> None:
            if not writes:
                return
            # It writes to the model's configuration, whose values are part of what a call is: ranks would then differ.
            described = vars(self.config)
            before = dict(described)
            try:
                cls.save_pretrained(self, **given, state_dict=state_dict)
            finally:
                described.clear()
                described.update(before)

        Ranks.all().step("save_pretrained", write)

    return save_pretrained
