"""What a rank has of a variable or an output, and the exact way back: :class:`Split`, :class:`Gather`, :class:`Sum`.

Each takes the whole and a rank, and gives what that rank holds; ``undo`` takes what all ranks hold, in rank order, and
gives the whole, bit for bit.  They work on tensors of whichever backend Keras runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut, array_split, even_cut

__all__ = ["Action", "Gather", "Split", "Sum", "action_of"]


@dataclass(frozen=True)
class Action:
    """``world_size`` ranks take part."""

    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")

    def __call__(self, tensor: Any, rank: int) -> Any:
        raise NotImplementedError

    def undo(self, states: Sequence[Any]) -> Any:
        raise NotImplementedError

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {rank}")

    def _check_states(self, states: Sequence[Any]) -> None:
        if len(states) != self.world_size:
            raise ValueError(f"undo needs what each of {self.world_size} ranks holds, got {len(states)}")


@dataclass(frozen=True)
class Split(Action):
    """Each rank has its part along ``dim``, as ``numpy.array_split`` cuts, in units of ``unit`` that stay together.

    Examples:
        >>> parts = [tpk.keras.Split(2, dim=1)(keras.ops.ones((4, 6)), rank) for rank in range(2)]
        >>> tpk.keras.Split(2, dim=1).undo(parts).shape
        torch.Size([4, 6])
    """

    dim: int = 0
    unit: int = 1

    def __call__(self, tensor: Any, rank: int) -> Any:
        """The part of ``rank``.

        Raises:
            ValueError: there is no such rank or dimension, or ``unit`` does not divide the dimension.
        """
        self._check_rank(rank)
        if self.unit == 1:
            return array_split(tensor, self.world_size, self.dim)[rank]
        cut = self._cut(tensor.shape)
        start, stop = cut.ranges[rank][0] if cut.ranges[rank] else (0, 0)
        return tensor[(*(slice(None),) * cut.dim, slice(start, stop))]

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the parts of a tensor of ``shape``."""
        return self._cut(shape).sizes

    def _cut(self, shape: Sequence[int]) -> Cut:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(f"dim ({self.dim}) is out of range for a tensor of {len(shape)} dimensions")
        dim = self.dim % len(shape)
        if self.unit < 1 or shape[dim] % self.unit:
            raise ValueError(f"unit ({self.unit}) does not divide dimension {dim} of a tensor of shape {tuple(shape)}")
        return even_cut(tuple(shape), dim, self.world_size, unit=self.unit)

    def undo(self, states: Sequence[Any]) -> Any:
        self._check_states(states)
        return backend.keras_module().ops.concatenate(list(states), axis=self.dim)


@dataclass(frozen=True)
class Gather(Action):
    """Each rank has the whole; of an output: the ranks' parts along ``dim`` were gathered.

    Examples:
        >>> whole = keras.ops.ones((4, 6))
        >>> tpk.keras.Gather(2).undo([whole, whole]).shape
        torch.Size([4, 6])
    """

    dim: int = -1

    def __call__(self, tensor: Any, rank: int) -> Any:
        self._check_rank(rank)
        return tensor

    def undo(self, states: Sequence[Any]) -> Any:
        """The whole.

        Raises:
            ValueError: the ranks do not hold the same.
        """
        self._check_states(states)
        ops = backend.keras_module().ops
        for rank, state in enumerate(states):
            if tuple(state.shape) != tuple(states[0].shape) or not bool(ops.all(ops.equal(state, states[0]))):
                raise ValueError(f"rank {rank} holds something else than rank 0 of what should be whole on every rank")
        return states[0]


@dataclass(frozen=True)
class Sum(Action):
    """The whole is the sum of what the ranks have: all of it on rank 0, and zeros elsewhere.

    Examples:
        >>> parts = [tpk.keras.Sum(2)(keras.ops.ones((2,)), rank) for rank in range(2)]
        >>> tpk.keras.Sum(2).undo(parts)
        tensor([1., 1.])
    """

    def __call__(self, tensor: Any, rank: int) -> Any:
        self._check_rank(rank)
        # x + -0.0 is x for every x, and -0.0 + 0.0 is not -0.0.
        return tensor if rank == 0 else backend.keras_module().ops.full_like(tensor, -0.0)

    def undo(self, states: Sequence[Any]) -> Any:
        self._check_states(states)
        total = states[0]
        for state in states[1:]:
            total = total + state
        return total


def action_of(style: str, world_size: int) -> Action | None:
    """What becomes of the output of a layer of a plan's style; None for a part that goes on."""
    if style in ("row", "row_split", "vocabulary"):
        return Sum(world_size)
    return Gather(world_size) if style in ("column_gather", "copied", "whole") else None
