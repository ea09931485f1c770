"""Which layers' weights a model's code asks for their shape, which no recorded op would show.

It owns the watch.  A layer that keeps its weight by heads has no parameter of the whole layer's shape, and code that
reads ``layer.weight.shape`` would continue with a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ShapesAsked"]

_SAME_FOR_PARTS = frozenset({
    "dtype", "device", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_floating_point", "is_complex", "element_size", "itemsize", "get_device", "grad", "grad_fn",
    "__hash__",
})  # fmt: skip
"""What a part answers as the whole does."""


class ShapesAsked(TorchFunctionMode):
    """Within it, every use of a layer's parameter outside of the layer is noted.

    Args:
        owners: layers by the ids of their parameters.
        asked: their names are added to this.
    """

    def __init__(self, owners: Mapping[int, str], asked: set[str]) -> None:
        super().__init__()
        self.owners, self.asked = owners, asked

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property such as Tensor.shape
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _SAME_FOR_PARTS:
            for value in args:
                if isinstance(value, Tensor) and id(value) in self.owners:
                    self.asked.add(self.owners[id(value)])
        return func(*args, **(kwargs or {}))
