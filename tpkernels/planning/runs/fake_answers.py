"""Answers where torch's fake tensors have none: ops that need values inside opaque modules, and ops it refuses wrongly.

It owns :class:`Answers`, the mode between a session and the fake mode.  While an opaque module runs, ``nonzero`` finds
as many rows as the :class:`Guess` says, ``.item()`` gives its number, and so on.  A guess need not be right, but what
it changes must not leave the module.  Two runs with different guesses show whether it does
(:mod:`tpkernels.planning.runs.opaque_modules`).

Grouped products are answered here in every dtype, because torch's fake ``_grouped_mm`` takes only bfloat16 while its
CPU and CUDA kernels take more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tpkernels.planning.runs.known_values import is_condition

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session

__all__ = ["FEW", "GUESSES", "MOST_ANSWERS", "Answers", "Guess", "fake_as_real"]

aten = torch.ops.aten
MOST_ANSWERS = 50_000
"""In one run; a loop that waits for a value may otherwise never end."""


@dataclass(frozen=True)
class Guess:
    """``rows`` is how many elements satisfy a condition, ``number`` a scalar's value, ``truth`` a condition's."""

    rows: int
    number: int
    truth: bool
    size: int
    """Of either, where sizes outside of opaque modules depend on it: convolutions take as many rows."""


GUESSES = (
    Guess(3, 1, True, 7),
    Guess(2, 0, True, 6),
    Guess(2, 2, True, 8),
    Guess(3, 1, False, 7),
    Guess(2, 0, False, 6),
    Guess(2, 2, False, 8),
)
"""Those with 3 rows differ in everything but the truth from those with 2."""
FEW = (0, 1)
"""Sizes that code may treat otherwise than others: no point found, or a single one."""


class Answers(TorchDispatchMode):
    """Answers for fake tensors: known values everywhere, and guesses while ``session`` is inside an opaque module."""

    supports_higher_order_operators = True

    def __init__(self, session: Session, guess: Guess) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session, self.guess = session, guess

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._grouped_mm.default:
            return _grouped_mm(*args, **kwargs)
        return self.session.values.run(func, args, kwargs, self._run)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.session.rest is not None:
            if is_condition(func, args):
                return self.session.rest.answer()
        elif self.session.quiet is not None or (self.session.asks_openly and _may_be_size(func, args)):
            answer = _ANSWERS.get(func)
            if answer is not None:
                size = self.guess.size
                quiet = self.session.quiet is not None
                out = answer(self.guess if quiet else replace(self.guess, rows=size, number=size), *args, **kwargs)
                if out is not None:
                    self._count(out)
                    return out
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            return self._written_as_fake(func, args, kwargs)
        return func(*args, **kwargs)

    def _written_as_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Real tensors that the model keeps outside of its modules keep their values."""
        real: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            made: Tensor = self.session.shadow.fake.from_tensor(tensor)
            real[id(made)] = tensor
            return made

        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        return tree_map_only(Tensor, lambda tensor: real.get(id(tensor), tensor), func(*args, **kwargs))

    def _count(self, answer: Any) -> None:
        self.session.asked += 1
        self.session.asked_truth |= isinstance(answer, bool)
        self.session.asked_openly |= self.session.quiet is None
        if self.session.asked > MOST_ANSWERS:
            name = self.session.quiet or (self.session.inside[-1] if self.session.inside else "the model")
            raise RuntimeError(f"{name} asks for more than {MOST_ANSWERS} values: a loop without end?")


class _Numbers(TorchFunctionMode):
    """Makes tensors of lists in which scalars are tensors themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            numbers = tree_map_only(FakeTensor, lambda one: one.item() if one.dim() == 0 else one, args[0])
            args = (numbers, *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_as_real() -> Iterator[None]:
    """Within it, fake tensors do what torch would do only for real ones.

    A scalar is formatted as its value (``experts[f"expert_{index}"]``), and so it is in a list that a tensor is made of
    (``torch.tensor([0, *lengths])``).  ``module.to(dtype)`` in a forward leaves the parameters that they are, where
    torch would swap them and refuses, because they are referred to.
    """

    def scalar(tensor: FakeTensor, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)

    def swap(first: Tensor, second: Tensor) -> None:
        if not (isinstance(first, FakeTensor) and isinstance(second, FakeTensor) and first.shape == second.shape):
            original(first, second)

    original: Any = torch.utils.swap_tensors
    FakeTensor.__format__ = scalar  # type: ignore[method-assign, assignment]
    torch.utils.swap_tensors = swap
    try:
        with _Numbers():
            yield
    finally:
        del FakeTensor.__format__
        torch.utils.swap_tensors = original


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    if a.dim() not in (2, 3) or b.dim() not in (2, 3) or a.dtype != b.dtype:
        raise ValueError(f"no grouped product of {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    if (a.dim() == 3 or b.dim() == 3) and a.shape[-1] != b.shape[-2]:
        raise ValueError(f"no grouped product of {list(a.shape)} and {list(b.shape)}: inner sizes differ")
    groups = [] if offs is None else [offs.shape[0]]
    if any(x.dim() == 3 and groups and x.shape[0] != groups[0] for x in (a, b)) and a.dim() != b.dim():
        raise ValueError(f"no grouped product of {list(a.shape)} and {list(b.shape)} in {groups[0]} groups")
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape = [*(groups if a.dim() == 2 else [a.shape[0]]), *shape]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _may_be_size(func: Any, args: Any) -> bool:
    """Whether what an op asks for may be a size: how many rows there are, or an integer; no fraction, no condition."""
    if func is aten._local_scalar_dense.default:
        return not (args[0].is_floating_point() or args[0].is_complex() or args[0].dtype is torch.bool)
    return not is_condition(func, args)


def _some(guess: Guess, limit: int) -> int:
    return min(guess.rows, limit)


def _scalar(guess: Guess, x: Tensor) -> bool | int | float:
    if x.dtype is torch.bool:
        return guess.truth
    return float(guess.number) if x.is_floating_point() else guess.number


def _truth(guess: Guess, *_: Any, **__: Any) -> bool:
    return guess.truth


def _nonzero(guess: Guess, x: Tensor) -> Tensor:
    return x.new_empty((_some(guess, x.numel()), x.dim()), dtype=torch.long)


def _masked_select(guess: Guess, x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(_some(guess, max(x.numel(), mask.numel())))


def _unique(
    guess: Guess, x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    count = _some(guess, x.numel())
    inverse = x.new_empty(x.shape if return_inverse or return_counts else (0,), dtype=torch.long)
    return x.new_empty(count), inverse, x.new_empty(count if return_counts else 0, dtype=torch.long)


def _unique_dim(
    guess: Guess, x: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    count, shape = _some(guess, x.shape[dim]), list(x.shape)
    inverse = x.new_empty(shape[dim], dtype=torch.long)
    shape[dim] = count
    return x.new_empty(shape), inverse, x.new_empty(count, dtype=torch.long)


def _unique_consecutive(
    guess: Guess, x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is not None:
        return _unique_dim(guess, x, dim)
    return _unique(guess, x, True, return_inverse, return_counts)


def _bincount(guess: Guess, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.long if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return x.new_empty(max(minlength, guess.rows), dtype=dtype)


def _repeat_interleave(guess: Guess, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return repeats.new_empty(guess.rows if output_size is None else output_size, dtype=torch.long)


def _with_rows(guess: Guess, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Boolean masks as the rows that they would select, or None where there is no mask."""
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += _nonzero(guess, index).unbind(1)
        else:
            found.append(index)
    return found


def _index(guess: Guess, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    rows = _with_rows(guess, indices)
    return None if rows is None else aten.index.Tensor(x, rows)


def _split(guess: Guess, x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor] | None:
    """Split by sizes that are guesses themselves and need not add up: the last part takes what is left."""
    total, before = x.shape[dim], sum(sizes[:-1])
    if sum(sizes) == total or not sizes or before > total:
        return None
    pieces: list[Tensor] = aten.split_with_sizes.default(x, [*sizes[:-1], total - before], dim)
    return pieces


_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _truth,
    aten.allclose.default: _truth,
    aten.is_nonzero.default: _truth,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique_dim,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.index.Tensor: _index,
    aten.split_with_sizes.default: _split,
}
