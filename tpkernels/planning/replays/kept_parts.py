"""Parts that a module keeps from one call for the next as an attribute, or in a dict: the state of a recurrence.

It owns :class:`KeptParts`, between the steps that take arguments and constant parts.  A part may be kept where code of
the module's own class reads the attribute, always cut alike, by features or heads that divide; the replay of the next
call then finds it there (:meth:`KeptParts.begin_after`).  In the parallel model all other code sees the whole
(:mod:`tpkernels.sharding.kept_caches`).
"""

from __future__ import annotations

import dis
import inspect
from functools import lru_cache
from itertools import takewhile
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels.planning.replays.argument_steps import ArgumentSteps
from tpkernels.planning.runs.module_state import State
from tpkernels.planning.runs.tensors import storage_of
from tpkernels.planning.splits import Split, Unproven, degrees

__all__ = ["Kept", "KeptParts"]

Kept = dict[tuple[str, str], tuple[int, int]]
"""By module and attribute: the dimension that is cut, and its whole size."""
_READING = ("LOAD_ATTR", "LOAD_METHOD")


class KeptParts(ArgumentSteps):
    """A run next to a recording, of one rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept_parts: Kept = {}
        """What modules keep for the next call."""
        self._held: dict[tuple[str, str], set[Split | None]] = {}
        """How tensors are cut that the run's code makes attributes of modules,"""
        self._found: State = {}
        """and parts that it finds there."""

    def know(self, other: Any) -> None:
        """An attribute is cut alike in all runs."""
        super().know(other)
        self.kept_parts |= other.kept_parts
        for key, splits in other._held.items():
            self._held.setdefault(key, set()).update(splits)

    def begin_after(self, before: KeptParts | None) -> None:
        """Find in modules the parts that run ``before`` has left there; None if there was none like it."""
        left = {} if before is None else before.state_after()
        for key, whole in self.recording.begins.items():
            wholes = _tensors_of(None if whole is None else whole.value)
            if not wholes:
                continue
            held = left.get(key)
            parts = _tensors_of(None if held is None else held.value)
            if before is None or held is None or parts.keys() != wholes.keys():
                if key in self.kept_parts:
                    raise Unproven(f"nobody knows how {'.'.join(key)} is cut when a second call begins")
                continue
            splits = {place: split for place, x in parts.items() if (split := before._splits.get(id(x))) is not None}
            if splits and len(splits) < len(parts):
                raise Unproven(f"{'.'.join(key)} keeps tensors that are cut in different ways")
            for place, split in splits.items():
                part = parts[place]
                self.kept.append(part)
                self._found[key] = held
                self._mark(part, split, before._groups[id(part)])
                self.made[id(part)] = self.recording.source(wholes[place])
                if storage_of(wholes[place]) in self.recording.origins:
                    self.origins[storage_of(part)] = None
                self._held.setdefault(key, set()).add(split)

    def _check_held(self) -> None:
        """An attribute must not be a part at one time, and whole at another."""
        for key, held in self.changes:
            for one in _tensors_of(held.value).values() if held is not None and held.place == "" else ():
                self._held.setdefault(key, set()).add(self._splits.get(id(one)))
                self.blame = self._groups.get(id(one), self.blame)
                if len(self._held[key]) > 1 and not getattr(self.shadow.modules[key[0]], "takes_parts", False):
                    raise Unproven(f"{'.'.join(key)} keeps tensors that are cut in different ways")

    def _check_left(self) -> None:
        """Whatever modules keep is whole, or what their own code reads."""
        left = self.state_after()
        for name, module in self.shadow.modules.items():
            if getattr(module, "takes_parts", False):  # its author knows
                continue
            changed = {key: held.value for (owner, key), held in left.items() if owner == name and held is not None}
            for attribute, value in (vars(module) | changed).items():
                if (split := self._may_keep(name, attribute, value)) is not None:
                    self.kept_parts[name, attribute] = split.dim, split.segments[0]
                    continue
                for leaf in tree_leaves(value) if isinstance(value, Tensor | list | tuple | dict) else ():
                    if isinstance(leaf, Tensor):
                        self._is_whole(leaf, f"kept by the model as {name}.{attribute}")

    def _may_keep(self, name: str, attribute: str, value: Any) -> Split | None:
        """How the tensors of an attribute are cut, if they may be kept so."""
        module, splits = self.shadow.modules[name], {self._splits.get(id(x)) for x in _tensors_of(value).values()}
        kind: Any = type(module)
        split = splits.pop() if len(splits) == 1 else None
        if split is None or degrees() or (held := self.state_after().get((name, attribute))) is None or held.place:
            return None
        if _tensors_of(vars(module).get(attribute)):
            return None  # the first call begins with a whole one
        simple = len(split.segments) == 1 and split == Split(split.dim, split.segments)
        kept = simple and split.segments[0] % self.world_size == 0 and attribute in attributes_read(kind)
        return split if kept else None


def _tensors_of(value: Any) -> dict[Any, Tensor]:
    """The tensors that an attribute holds: one, or those of a dict that has nothing else."""
    if isinstance(value, Tensor):
        return {"": value}
    tensors = type(value) is dict and all(isinstance(one, Tensor) for one in value.values())
    return dict(value) if tensors else {}


@lru_cache(maxsize=1024)
def attributes_read(kind: type[nn.Module]) -> frozenset[str]:
    """Names of attributes that the methods of a class read; to set one is not to read it."""
    found: set[str] = set()
    todo: list[CodeType] = []
    for own in takewhile(lambda one: one not in (nn.Module, object), kind.__mro__):
        todo += [inspect.unwrap(one).__code__ for one in vars(own).values() if isinstance(one, FunctionType)]
    while todo:
        code = todo.pop()
        found.update(str(step.argval) for step in dis.get_instructions(code) if step.opname in _READING)
        todo += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return frozenset(found)
