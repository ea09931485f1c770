"""A ``torch.autograd.Function`` of a model's own that works on each element by itself, such as Bloom's GeLU, or on each
slice along a dimension, such as the masked softmax of SEW-D on each head.

It owns the trials.  A replay follows what such a function does in its forward, but its backward is code that runs
later.  It may meet a part of a tensor where on numbers the function gives for any of its elements or slices, forward
and backward, what it gives for them among all others.  A function that does not run on numbers in fp64 is not one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["works_on_elements", "works_on_slices"]

SHAPE, SOME = (3, 4, 5), 23
"""Of the samples, and how many of their elements are tried by themselves."""
SLICES, SOME_SLICES, LARGEST = 5, (3, 1), 1 << 20
"""Of the samples along the dimension that is cut, those that are tried by themselves, and the largest sample."""
SCALES = 1e-3, 1.0, 1e3
MARGIN = 1e-12


@contextmanager
def _on_numbers() -> Iterator[None]:
    """Within it, functions run on real tensors, with gradients and random numbers of their own."""
    with (
        _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):  # fmt: skip
        torch.manual_seed(0)
        yield


def works_on_elements(apply: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``apply`` does so with arguments as these; tensors among them stand for numbers of any kind."""
    count = sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
    with _on_numbers():
        for scale in SCALES:
            given = [scale * torch.randn(SHAPE, dtype=torch.float64) for _ in range(count + 1)]
            picked = torch.randperm(given[0].numel())[:SOME]
            try:
                whole = _run(apply, args, kwargs, given)
                if not all(bool(torch.isfinite(one).all()) for one in whole):  # a root, or a logarithm
                    given = [one.abs() for one in given]
                    whole = _run(apply, args, kwargs, given)
                some = _run(apply, args, kwargs, [one.flatten()[picked] for one in given])
            except Exception:  # noqa: BLE001 - code of whatever the function does
                return False
            if (
                not whole
                or len(some) != len(whole)
                or not all(_alike(one.flatten()[picked], part) for one, part in zip(whole, some, strict=True))
            ):
                return False
    return True


def works_on_slices(
    apply: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Sequence[int | None], cut: int
) -> bool:
    """Whether ``apply`` does so with arguments of these shapes, along dimension ``cuts`` of each of the tensors among
    them and ``cut`` of the result; tensors that are not cut are the same for all slices, and need no gradient."""
    like = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    shapes = [_with_slices(one.shape, dim) for one, dim in zip(like, cuts, strict=True)]
    if max(map(prod, shapes), default=0) > LARGEST:
        return False
    with _on_numbers():
        for scale in SCALES:
            try:
                if not _alike_in_slices(apply, args, kwargs, like, shapes, scale, cuts, cut):
                    return False
            except Exception:  # noqa: BLE001 - code of whatever the function does
                return False
    return True


def _with_slices(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
    return tuple(shape) if dim is None else (*shape[:dim], SLICES, *shape[dim + 1 :])


def _sample(like: Tensor, shape: tuple[int, ...], scale: float) -> Tensor:
    """Numbers; flags, and integers that could be flags."""
    if like.is_floating_point():
        return scale * torch.randn(shape, dtype=torch.float64)
    return torch.randint(2, shape).to(like.dtype)


def _alike_in_slices(
    apply: Callable[..., Any],
    args: Any,
    kwargs: Any,
    like: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    scale: float,
    cuts: Sequence[int | None],
    cut: int,
) -> bool:
    """Whether it does so with numbers of this scale, or of the largest below at which it gives any: an angle is only
    that of a product of at most one (YOSO)."""
    picked = torch.tensor(SOME_SLICES)

    def some(one: Tensor, dim: int | None) -> Tensor:
        return one if dim is None else one.index_select(dim, picked)

    while True:
        given = [_sample(one, shape, scale) for one, shape in zip(like, shapes, strict=True)]
        whole, dy = _gradients(apply, args, kwargs, given, cuts, None)
        if scale <= SCALES[0] or all(bool(torch.isfinite(one).all()) for one in whole):
            break
        scale /= 2
    if dy.shape[cut] != SLICES:
        return False
    few = [some(one, dim) for one, dim in zip(given, cuts, strict=True)]
    part, _ = _gradients(apply, args, kwargs, few, cuts, some(dy, cut))
    dims = [cut, *(dim for one, dim in zip(given, cuts, strict=True) if dim is not None and one.is_floating_point())]
    return all(_alike(some(one, dim), found) for one, found, dim in zip(whole, part, dims, strict=True))


def _gradients(
    apply: Callable[..., Any], args: Any, kwargs: Any, given: Sequence[Tensor], cuts: Sequence[int | None], dy: Any
) -> tuple[list[Tensor], Tensor]:
    """The result and the gradients of what is cut, and the gradient of the result: ``dy``, or one that is drawn."""
    needed = [dim is not None and one.is_floating_point() for one, dim in zip(given, cuts, strict=True)]
    inputs = [one.clone().requires_grad_(needs) for one, needs in zip(given, needed, strict=True)]
    tensors = iter(inputs)
    args, kwargs = tree_map_only(Tensor, lambda _: next(tensors), (tuple(args), dict(kwargs)))
    y = apply(*args, **kwargs)
    dy = torch.randn_like(y) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, [one for one in inputs if one.requires_grad], dy)], dy


def _run(apply: Callable[..., Any], args: Any, kwargs: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """The result, whose gradient is the last of ``given``, and gradients; nothing if it is not like the inputs."""
    *inputs, dy = (one.clone() for one in given)
    tensors = iter([one.requires_grad_() for one in inputs])
    args, kwargs = tree_map_only(Tensor, lambda _: next(tensors), (tuple(args), dict(kwargs)))
    y = apply(*args, **kwargs)
    if not isinstance(y, Tensor) or y.shape != dy.shape or y.dtype != dy.dtype:
        return []
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def _alike(expected: Tensor, found: Tensor) -> bool:
    """A library may compute the last elements of a row otherwise than those before, in the last bits."""
    same = torch.isfinite(expected).all() and (expected - found).abs().max() <= MARGIN * expected.abs().max()
    return bool(same)
