"""Numbers that the example inputs give: followed through a run of fake tensors, for the code that asks for them.

Models of images ask for numbers among their inputs: how many patches there are in each direction of an image.
It owns :class:`KnownValues`: which fake tensors have known values, and these, real tensors on the CPU.  Integers among
the example inputs have them, single integers in buffers that no checkpoint has (Mimi's strides and paddings), and what
an op makes of known values alone, or of no tensor at all.  Parameters, other buffers and activations have none: who
asks for their numbers gets a guess (:mod:`tpkernels.planning.runs.fake_answers`), or cannot be recorded.

Such numbers are taken for sizes, which another call may have others of.  A condition on them is not answered here: code
that branches on one may take the other path in another call, and is run both ways where it can be
(:mod:`tpkernels.planning.runs.shared_conditions`).  Nor is a single number followed, which may be a flag.  A
condition on what code makes of its own numbers and of those constants alone (whether ``torch.arange(start, stop)``
begins with 0, whether a padding is longer than the input) is one that it could as well have asked of these numbers,
without a tensor: it is answered.

It assumes that what a model computes from the numbers in its inputs is small; larger tensors are not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tpkernels.planning.runs.tensors import storage_of, written_by

__all__ = ["Changes", "KnownValues", "constants_of", "is_condition", "values_of"]

aten = torch.ops.aten
_INTEGERS = (torch.int16, torch.int32, torch.int64)
LARGEST = 1 << 16
"""Elements of a tensor that is followed."""
_ASKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def values_of(tensor: Tensor) -> Tensor | None:
    """A copy of the numbers of an example input; None where it has none that are followed."""
    if type(tensor) is not Tensor or tensor.is_meta or not 1 < tensor.numel() <= LARGEST:
        return None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return None
    with _disable_current_modes():
        return tensor.detach().to("cpu", copy=True)


class Changes(Exception):
    """Code writes to what was taken for a constant, and has asked for its number; ``storages`` of such buffers."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__("a buffer whose number the model's code asks for is written to by it")
        self.storages = storages


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """Single integers in buffers that are made anew with every model: numbers of its configuration, by name.

    A counter, which a checkpoint has, is none; nor is one that code writes to.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if type(buffer) is Tensor and buffer.numel() == 1 and not buffer.is_meta and buffer.dtype in _INTEGERS:
                with _disable_current_modes():
                    found[f"{name}.{key}" if name else key] = buffer.detach().to("cpu", copy=True)
    return found


class KnownValues:
    """Of one run; ``given`` has those of its inputs, each with the fake tensor that stands for it, and ``constants``
    those of :func:`constants_of` the model.

    Values are never written to: runs share them.
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        given: Sequence[tuple[Tensor, Tensor]],
        constants: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._fake_mode = fake
        self._values = {id(tensor): value for tensor, value in (*given, *constants)}
        self._given = {id(tensor) for tensor, _ in given}
        """Those of them that numbers of the inputs went into, or of tensors that code keeps."""
        self._fixed = {id(tensor) for tensor, _ in constants}
        self._asked: set[int] = set()
        """Storages of constants that ops have read."""
        self._made: list[Tensor] = []
        """Fake tensors of its own, so that ids stay theirs."""

    def take(self, other: KnownValues) -> None:
        """Know what another run knew of the tensors that this one is given."""
        self._values |= other._values
        self._given |= other._given

    def run(self, func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """``run`` the op on fake tensors; where it asks for values that are known, they answer."""
        if not isinstance(func, torch._ops.OpOverload):
            return run(func, args, kwargs)
        known = self._are_known(func, args, kwargs)
        given = known and self._are_given(func, args, kwargs)
        if self.answers(func, args, kwargs):
            device = next(tensor.device for tensor in _tensors(args, kwargs))
            answer = self._real(func, args, kwargs)
            return tree_map_only(Tensor, lambda value: self._fake(value, device, given=given), answer)
        if func is aten.masked_select.default and id(args[1]) in self._values:
            func, args = aten.index.Tensor, self._picked(*args)
        if func is aten.index.Tensor:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        out = run(func, args, kwargs)
        values = self._values_of(func, args, kwargs, out) if known else []
        if func._schema.is_mutable:
            self._forget(written_by(func, args, kwargs))
        elif known:
            self._asked |= {storage_of(tensor) for tensor in _tensors(args, kwargs) if id(tensor) in self._fixed}
        for fake, value in zip(_tensors(out), values, strict=False):
            if isinstance(fake, FakeTensor) and fake.shape == value.shape and fake.dtype == value.dtype:
                self._values[id(fake)] = value
                self._note(fake, given)
        return out

    def answers(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether it asks for values that are known; of a condition, for those that code made of its own numbers."""
        if not any(tag in func.tags for tag in _ASKS) or not self._are_known(func, args, kwargs):
            return False
        return not (is_condition(func, args) and self._are_given(func, args, kwargs))

    def truth(self, func: Any, args: Any, kwargs: Any) -> bool | None:
        """The answer to a condition by the numbers that the example inputs give; None where they do not tell."""
        if not self._are_known(func, args, kwargs):
            return None
        return bool(self._real(func, args, kwargs))

    def _are_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether all of its tensors have values; a real one, which only the model's own code has, is never written."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if func._schema.is_mutable and any(id(tensor) in self._fixed for tensor in written_by(func, args, kwargs)):
            return False  # a counter, whose number is another in every call
        return all(
            id(tensor) in self._values or not (isinstance(tensor, FakeTensor) or func._schema.is_mutable)
            for tensor in _tensors(args, kwargs)
        )

    def _are_given(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether its tensors are more than what code makes of its own numbers; a literal tensor is lifted first."""
        if func is aten.lift_fresh.default:
            return False
        tensors = _tensors(args, kwargs)
        return any(id(tensor) in self._given or not isinstance(tensor, FakeTensor) for tensor in tensors)

    def _note(self, fake: Tensor, given: bool) -> None:
        if given:
            self._given.add(id(fake))
        else:
            self._given.discard(id(fake))

    def _values_of(self, func: Any, args: Any, kwargs: Any, out: Any) -> list[Tensor]:
        if any(tensor.numel() > LARGEST for tensor in _tensors(args, kwargs, out)):
            return []
        try:
            return _tensors(self._real(func, args, kwargs))
        except (RuntimeError, NotImplementedError, IndexError):  # of no consequence, unless somebody asks
            return []

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        copied = func._schema.is_mutable or func is aten.lift_fresh.default

        def value(tensor: Tensor) -> Tensor:
            known = self._values.get(id(tensor), tensor)
            return known.clone() if copied else known

        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map_only(Tensor, value, (args, kwargs))
            return func(*args, **(kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs))

    def _forget(self, written: list[Tensor]) -> None:
        """What shares memory with tensors that were written to.

        Raises:
            Changes: a constant of the model is among them, and its number has been used.
        """
        changed = {storage_of(tensor) for tensor in written if storage_of(tensor) in self._asked}
        if changed:
            raise Changes(changed)
        gone = {storage_of(self._values[id(tensor)]) for tensor in written if id(tensor) in self._values}
        if gone:
            self._values = {key: value for key, value in self._values.items() if storage_of(value) not in gone}

    def _fake(self, value: Tensor, device: torch.device, *, given: bool) -> Tensor:
        with _disable_current_modes(), self._fake_mode:
            made = torch.empty(value.shape, dtype=value.dtype, device=device)
        self._made.append(made)
        self._values[id(made)] = value
        self._note(made, given)
        return made

    def _picked(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What to index, and the known mask of that shape: how many elements it selects is known, whatever they are."""
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        with _disable_current_modes():
            value = self._values[id(mask)].expand(shape)
        return aten.expand.default(x, shape), [self._fake(value, mask.device, given=id(mask) in self._given)]

    def _without_masks(self, indices: Any) -> list[Tensor | None]:
        """Known masks as the numbers of what they select."""
        found: list[Tensor | None] = []
        for index in indices:
            value = self._values.get(id(index))
            if value is None or value.dtype is not torch.bool:
                found.append(index)
                continue
            with _disable_current_modes():
                rows = value.nonzero().unbind(1)
            found += [self._fake(row, index.device, given=id(index) in self._given) for row in rows]
        return found


def is_condition(func: Any, args: Any) -> bool:
    """Whether the op asks for one truth value of tensors."""
    asked = func is aten._local_scalar_dense.default and args[0].dtype is torch.bool
    return asked or func in (aten.equal.default, aten.allclose.default, aten.is_nonzero.default)


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
