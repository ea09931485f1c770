"""States that a module is given whole, reads this rank's part of, and writes parts to.

::

    module(x, state=[s])          runs as   module(x, state=[s_r])       s_r: this rank's features of s, a copy
    s_r[:, :, i] = v_r  in it     runs as   s_r[:, :, i] = v_r;  s[:, :, i] = all_gather(v_r, the features)

RWKV's attention takes a list of five tensors, in which it finds what the recurrence of its layer has come to, and
leaves what it comes to now.  The list is a result of the model and an argument of its next call, so that every rank has
all of it.  The gradient of s_r is gathered to that of s, which is whole on every rank; that of v_r is a slice of it.

It owns which writes are followed (:func:`place_written`), for the planner and for the parallel model.  It assumes that
a plan has proven that the module reads nothing but its part.  A write that it does not follow raises when the module
returns, but in inference mode, in which nobody counts them.  Compilers run the module as it is, without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

from tpkernels.nn.sliced_arguments import named_arguments, with_arguments
from tpkernels.ops import all_gather, shard
from tpkernels.partition import chunk_sizes

__all__ = ["items_changed", "place_written", "run_with_states", "states_back"]

_HELD = "_tpkernels_states"


def place_written(index: Any, shape: Sequence[int], dim: int) -> tuple[int, tuple[int, ...]] | None:
    """What ``x[index] = value`` writes to, where x has this ``shape``: the place of dimension ``dim``, and the shape.

    None where the index has anything but whole numbers and slices, or does not take all of ``dim``.
    """
    steps = index if isinstance(index, tuple) else (index,)
    if len(steps) > len(shape) or any(type(step) not in (int, slice) for step in steps):
        return None
    if dim < len(steps) and steps[dim] != slice(None):
        return None
    every = [*steps, *[slice(None)] * (len(shape) - len(steps))]
    kept = [place for place, step in enumerate(every) if isinstance(step, slice)]
    return kept.index(dim), tuple(len(range(*every[place].indices(shape[place]))) for place in kept)


def items_changed(args: Any, kwargs: Any, before: Mapping[str, int], module: nn.Module) -> list[str]:
    """Arguments, and items of lists among them, that are other objects than ``before``, by their ids."""
    return sorted(name for name, one in named_arguments(module, args, kwargs).items() if before.get(name) != id(one))


def states_back(output: Any, wholes: Mapping[int, Tensor]) -> Any:
    """What a module returns, with whole states in the place of parts, by the ids of these."""
    if not tree_any(lambda leaf: id(leaf) in wholes, output):
        return output
    return tree_map(lambda leaf: wholes.get(id(leaf), leaf), output)


class _State:
    """A state in one call: all of it, and this rank's part."""

    def __init__(self, name: str, whole: Any, cut: tuple[int, int], mesh: DeviceMesh) -> None:
        self.dim, features = cut
        if not isinstance(whole, Tensor) or whole.dim() <= self.dim or whole.shape[self.dim] != features:
            what = list(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise ValueError(f"{name} must be a tensor with {features} features in dimension {self.dim}, got {what}")
        self.name, self.whole, self.mesh = name, whole, mesh
        self.sizes = chunk_sizes(features, mesh.size())
        self.part = shard(whole, mesh, dim=self.dim, shard_sizes=self.sizes)
        self._known = self._version()

    def _version(self) -> int:
        return -1 if self.part.is_inference() else self.part._version  # those have none

    def write(self, index: Any, value: Any) -> None:
        """Write a part, and all of it to the whole."""
        place = place_written(index, self.part.shape, self.dim)
        if place is None or not isinstance(value, Tensor) or tuple(value.shape) != place[1]:
            raise ValueError(self._otherwise(f"at {index!r}, or with something else than this rank's part"))
        self.check()
        Tensor.__setitem__(self.part, index, value)
        self._known = self._version()
        gathered = all_gather(value.contiguous(), self.mesh, dim=place[0], shard_sizes=self.sizes, replicated_grad=True)
        Tensor.__setitem__(self.whole, index, gathered)

    def check(self) -> None:
        """Refuse to go on where somebody has written to the part in another way."""
        if self._version() != self._known:
            raise ValueError(self._otherwise("by other means than an index"))

    def _otherwise(self, how: str) -> str:
        return (
            f"the module writes to {self.name} {how}: this call takes another path than those that the plan was proven "
            "for; make the plan with example_inputs like those of this call"
        )


class _Writes(TorchFunctionMode):
    """Within it, what is written to parts of states goes to the whole ones as well."""

    def __init__(self, states: Sequence[_State]) -> None:
        super().__init__()
        self.states = {id(state.part): state for state in states}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__setitem__ and (state := self.states.get(id(args[0]))) is not None:
            return state.write(*args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def _within(states: Sequence[_State]) -> Iterator[None]:
    with _Writes(states):
        yield
    for state in states:
        state.check()


def run_with_states(module: nn.Module, cuts: Mapping[str, tuple[int, int]], mesh: DeviceMesh) -> None:
    """From now on, let ``module`` take its part of ``cuts``: of each state the dimension, and how many features it has.

    A call without the state, or with None, is left alone.
    """
    module.__dict__[_HELD] = dict(cuts), mesh
    kind: Any = type(module)
    module.__class__ = _taking(kind)


@lru_cache(maxsize=256)
def _taking(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` whose code reads and writes parts of the states."""

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cuts, mesh = self.__dict__[_HELD]
        given = named_arguments(self, args, kwargs)
        states = [
            _State(name, one, cuts[name], mesh) for name, one in given.items() if name in cuts and one is not None
        ]
        if not states:
            return cls.forward(self, *args, **kwargs)
        args, kwargs = with_arguments(self, args, kwargs, {state.name: state.part for state in states})
        before = {name: id(one) for name, one in named_arguments(self, args, kwargs).items()}
        with _within(states):
            output = cls.forward(self, *args, **kwargs)
        if changed := items_changed(args, kwargs, before, self):
            raise ValueError(states[0]._otherwise(f"by changing {', '.join(changed)}"))
        return states_back(output, {id(state.part): state.whole for state in states})

    members = {"forward": torch.compiler.disable(forward), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members | {"__qualname__": cls.__qualname__}))
