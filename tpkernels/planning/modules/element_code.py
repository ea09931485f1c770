"""A ``torch.autograd.Function`` of a model's own that works on each element by itself, such as Bloom's GeLU.

It owns the trial.  A replay follows what such a function does in its forward, but its backward is code that runs later.
It may meet a part of a tensor where on numbers the function gives for any of its elements, forward and backward, what
it gives for them among all others.  A function that does not run on numbers in fp64 is not one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["works_on_elements"]

SHAPE, SOME = (3, 4, 5), 23
"""Of the samples, and how many of their elements are tried by themselves."""
SCALES = 1e-3, 1.0, 1e3
MARGIN = 1e-12


def works_on_elements(apply: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``apply`` does so with arguments as these; tensors among them stand for numbers of any kind."""
    count = sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
    with (
        _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):  # fmt: skip
        torch.manual_seed(0)
        for scale in SCALES:
            given = [scale * torch.randn(SHAPE, dtype=torch.float64) for _ in range(count + 1)]
            picked = torch.randperm(given[0].numel())[:SOME]
            try:
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
