"""What stands for the weight of a packed layer, whose parts are parameters of their own.

It has the shape, the dtype and the device that the layer's weight had.  Whoever merges an adapter into the layer (PEFT)
computes with its parts: products, sums and copies are made part by part, on what each rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tpkernels.nn.gathering import true_everywhere

__all__ = ["PackedParameter"]

_PART_BY_PART = frozenset(
    (Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__, Tensor.copy_, Tensor.mul, Tensor.__mul__, Tensor.clone)
) | frozenset((Tensor.detach, Tensor.data.__get__, Tensor.float, Tensor.to, torch.isfinite, Tensor.isfinite))  # type: ignore[attr-defined]
_PRODUCTS = frozenset((Tensor.matmul, Tensor.__matmul__, torch.matmul))


class PackedParameter(Tensor):
    """Stands for a parameter whose ``parts`` follow each other along ``dim``.

    Raises:
        TypeError: an op that is not done part by part.
    """

    what: str
    parts: tuple[Tensor, ...]
    along: int

    @classmethod
    def of(cls, name: str, shape: Sequence[int], parts: Sequence[Tensor], dim: int = 0) -> Self:
        """The one of ``shape`` that consists of ``parts``."""
        first = parts[0]
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        made.what, made.parts, made.along = name, tuple(parts), dim
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            packed = args[0] if args and isinstance(args[0], cls) else None
            if packed is not None and func in _PART_BY_PART:
                return packed._each(func, args, kwargs or {})
            if packed is not None and func in _PRODUCTS and packed.along == 0 and not isinstance(args[1], cls):
                return packed._each(func, args, kwargs or {}, packed.shape[0], args[1].shape[-1])
            if packed is not None and func == Tensor.T.__get__ and packed.parts[0].dim() == 2:  # type: ignore[attr-defined]
                parts = [part.T for part in packed.parts]
                return cls.of(packed.what, packed.shape[::-1], parts, 1 - packed.along)
            if packed is not None and func is Tensor.all and len(args) == 1:
                return torch.tensor(all(map(true_everywhere, packed.parts)), device=packed.device)
            if packed is not None and func == Tensor.data.__set__:  # type: ignore[attr-defined]
                with torch.no_grad():
                    packed._each(Tensor.copy_, args, {})
                return None
            return func(*args, **kwargs or {})

    def _each(self, func: Callable[..., Any], args: Any, kwargs: Any, *shape: int) -> PackedParameter:
        """``func`` of each part, and of the parts of all that is packed like it."""
        sizes = [part.shape[self.along] for part in self.parts]
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, PackedParameter):
                continue
            if leaf.along != self.along or [part.shape[leaf.along] for part in leaf.parts] != sizes:
                raise TypeError(f"{func.__name__} of a packed layer's {self.what} and what has other parts")

        def part(index: int) -> Any:
            mine, named = tree_map(
                lambda leaf: leaf.parts[index] if isinstance(leaf, PackedParameter) else leaf, (args, kwargs)
            )
            return func(*mine, **named)

        return self.of(self.what, shape or self.shape, [part(index) for index in range(len(sizes))], self.along)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        name = next(leaf.what for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PackedParameter))
        raise TypeError(
            f"{func} of a packed layer's {name}, which has no values of its own: it consists of parts (part0.{name}, "
            f"part1.{name}, ...) that are cut over the ranks; call the layer, or keep it whole with an override"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedParameter({self.what}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"
