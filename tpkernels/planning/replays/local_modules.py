"""Modules, such as norms, that work on a part of the sequence as they would on all of it.

It owns the proof.  Such a module is called with this rank's part, and its code sees the part's length.  It is therefore
run on a shorter sequence as well.  The same ops must run with the same numbers, and their results must be shorter where
the residual is cut, and nowhere else.  The module must also run on a part without any rows, which a rank gets when
there are more ranks than tokens: a rank that raised there would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tpkernels.planning.runs.events import Shape, as_shapes, canonical, constant_of
from tpkernels.planning.runs.module_state import State
from tpkernels.planning.runs.op_arguments import same_scalars, without_sizes
from tpkernels.planning.runs.session import Session
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.tensors import tensors_in
from tpkernels.planning.splits import Split, Unproven

__all__ = ["LocalCall", "Step", "check_on_a_part"]


@dataclass
class Step:
    """An op on the whole sequence."""

    packet: Any
    arguments: tuple[Any, Any]
    constant: bytes | None
    outputs: list[tuple[Shape, Split | None]]


@dataclass
class LocalCall:
    """One call of such a module: what it was given, how that is cut, and what it did."""

    name: str
    args: Any
    kwargs: Any
    cuts: dict[int, Split]
    """By the ids of tensors among the arguments."""
    steps: list[Step] = field(default_factory=list)
    gives: list[Shape] = field(default_factory=list)

    @property
    def cut(self) -> Split:
        """How the first tensor that is cut, and the module's result, are cut."""
        return next(self.cuts[id(leaf)] for leaf in tree_leaves((self.args, self.kwargs)) if id(leaf) in self.cuts)


def check_on_a_part(shadow: Shadow, calls: Sequence[LocalCall], state: State) -> None:
    """Run each module again on a shorter sequence, and on an empty one; ``state`` is what the run has left in modules.

    Raises:
        Unproven: one of them does something else there.
    """
    short = _Short(shadow)
    short.begins = state
    with shadow.running(short):
        for call in calls:
            length = call.cut.segments[0]
            short.run(call, length // 2 if length > 3 else length + 1)  # more than 1, which could be broadcast
            short.run(call, 0)


class _Short(Session):
    def __init__(self, shadow: Shadow) -> None:
        super().__init__(shadow, {})
        self._call = LocalCall("", (), {}, {})
        self._at = self._length = 0
        self._strict = True
        """The same ops must run."""

    def run(self, call: LocalCall, length: int) -> None:
        self._call, self._at, self._length = call, 0, length
        module = self.shadow.modules[call.name]
        # Without rows dropout does nothing; with parameters the other ranks wait for this one's gradients.
        self._strict = length > 0 or any(True for _ in module.parameters())
        args, kwargs = tree_map_only(Tensor, self._shorter, (call.args, call.kwargs))
        try:
            output = module(*args, **kwargs)
        except Unproven:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            raise self._unproven(f"raises {type(error).__name__}: {text[:160]}") from error
        if self._strict and self._at != len(call.steps):
            raise self._unproven("runs fewer ops")
        if [tuple(tensor.shape) for tensor in tensors_in(output)] != [self._shape(s, call.cut) for s in call.gives]:
            raise self._unproven("gives other shapes than a part of the whole")

    def _unproven(self, what: str) -> Unproven:
        part = "a part of the sequence" if self._length else "a part of the sequence without any rows"
        return Unproven(f"on {part} {self._call.name} {what}")

    def _shape(self, shape: Sequence[int], split: Split | None) -> tuple[int, ...]:
        if split is None:
            return tuple(shape)
        size = sum(split.segments) * self._length // self._call.cut.segments[0]
        return (*shape[: split.dim], size, *shape[split.dim + 1 :])

    def _shorter(self, tensor: Tensor) -> Tensor:
        split = self._call.cuts.get(id(tensor))
        if split is None:
            return tensor
        out = self.new_output(tensor, self._shape(tensor.shape, split), tensor.dtype)
        self.requiring.made([out])
        return out

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if self._strict:
            self._check(func, args, kwargs, tensors, outputs)
        self.pass_origins(func, tensors, outputs)
        return out

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Check that the op is the one that ran on the whole sequence."""
        if self._at == len(self._call.steps):
            raise self._unproven("runs more ops")
        step, packet = self._call.steps[self._at], canonical(func)
        self._at += 1
        if packet != step.packet:
            raise self._unproven(f"runs {packet} where {step.packet} was")
        arguments = as_shapes(args), {key: as_shapes(value) for key, value in kwargs.items()}
        both = (without_sizes(packet, *step.arguments), without_sizes(packet, *arguments))
        if not same_scalars(*both) or step.constant != constant_of(func, tensors):
            raise self._unproven(f"gives {packet} other numbers: they depend on its length")
        if [tuple(output.shape) for output in outputs] != [self._shape(*known) for known in step.outputs]:
            raise self._unproven(f"has other shapes after {packet} than a part of the whole")
