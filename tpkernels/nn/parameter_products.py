"""Products with parameters of a module's own, ``torch.einsum("ibh,hnd->ibnd", x, self.q)``, that are cut over ranks.

::

    einsum(x, q)   runs as   y_r = einsum(x, q_r)                      where the dimension of q that is cut is one of y
    einsum(x, o)   runs as   y = sum over ranks of einsum(x_r, o_r)    where it is one of x, over which the op sums

XLNet's attention is made of these: queries, keys and values are products of the first kind, cut by heads, as a column
layer is; what the heads give is summed by one of the second kind, as by a row layer.  The gradient of a whole x is
summed over the ranks: one all-reduce backward for each product of the first kind, and one forward for each of the
second.  The gradients of q_r and o_r are complete.

It owns what such a product is, for the planner that records it and for the parallel model.  To the module's code
``self.q`` is this rank's part already (:mod:`tpkernels.nn.sliced`).  A product counts where the module's ``forward``
runs; it takes the parameter itself, and not what code makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tpkernels.ops import all_reduce, copy_to_group

__all__ = ["OwnProducts", "Product", "multiplied_by", "product_of", "run_products"]

_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")
_HELD = "_tpkernels_products"


class Product(NamedTuple):
    """A call of ``torch.einsum`` with two tensors, in whose equation every dimension has a letter of its own."""

    equation: str
    x: Tensor
    weight: Tensor
    taken: str
    """The letters of x, of the weight, and of the result."""
    of_weight: str
    given: str

    def place(self, dim: int) -> tuple[bool, int] | None:
        """What cutting the weight in ``dim`` means: the dimension of the result that is cut, with False, or the one of
        x over parts of which ranks sum, with True; None if it is neither, or both."""
        letter = self.of_weight[dim]
        if (letter in self.taken) == (letter in self.given):
            return None
        return (True, self.taken.index(letter)) if letter in self.taken else (False, self.given.index(letter))


def product_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Product | None:
    """What a call multiplies, or None if it is another one."""
    if func is not torch.einsum or kwargs or len(args) != 3 or not isinstance(args[0], str):
        return None
    found, tensors = _EQUATION.fullmatch(args[0].replace(" ", "")), args[1:]
    if found is None or not all(isinstance(one, Tensor) for one in tensors):
        return None
    letters = found.groups()
    shapes = zip(letters, tensors, strict=False)
    if any(len({*some}) < len(some) for some in letters) or any(len(some) != one.dim() for some, one in shapes):
        return None
    return Product(found[0], *tensors, *letters)


multiplied_by: ContextVar[Callable[[nn.Module, str, Tensor, int, bool], None] | None] = ContextVar(
    "multiplied_by", default=None
)
"""Who is told of a product in a call that is followed: the module, the parameter, and which dimension of the result is
cut, or (True) of x."""


class OwnProducts:
    """The products of one module: its parameters with the dimension that is cut of each."""

    def __init__(self, dims: Mapping[str, int], mesh: DeviceMesh) -> None:
        self.dims, self.mesh = dict(dims), mesh
        self._names: Any = WeakIdKeyDictionary()
        """Of the tensors that code has read as these parameters."""
        self.opened: Callable[[nn.Module, Tensor], None] = lambda module, y: None
        """What else happens behind a product of the first kind,"""
        self.closing: Callable[[], None] = lambda: None
        """and before one of the second."""

    def __deepcopy__(self, memo: object) -> OwnProducts:
        """Of a copy of the module, whose code reads tensors of its own."""
        copied = OwnProducts(self.dims, self.mesh)
        copied.opened, copied.closing = self.opened, self.closing
        return copied

    def read(self, name: str, part: Any) -> None:
        """Code has read a parameter, and got ``part``."""
        if isinstance(part, Tensor):
            self._names[part] = name

    def check(self, name: str, product: Product, dim: int) -> None:
        """Refuse an x with another number of parts than the parameter has: torch repeats what there is one of."""
        taken, held = product.x.shape[dim], product.weight.shape[self.dims[name]]
        if taken != held:
            raise ValueError(
                f"{product.equation!r} takes {taken} in dimension {dim}, and this rank has {held} of {name}: this call "
                "takes another path than those that the plan was proven for; make the plan with example_inputs like "
                "those of this call"
            )

    def name_of(self, weight: Tensor) -> str | None:
        name: str | None = self._names.get(weight)
        return name


class _Products(TorchFunctionMode):
    """Within it, products with parameters of a module are those above."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.own = module, cast(OwnProducts, module.__dict__[_HELD])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = product_of(func, args, kwargs)
        name = None if product is None else self.own.name_of(product.weight)
        place = None if product is None or name is None else product.place(self.own.dims[name])
        if product is None or name is None or place is None:
            return func(*args, **kwargs)
        sums, dim = place
        told = multiplied_by.get()
        if sums:
            self.own.check(name, product, dim)
            if told is not None:
                told(self.module, name, product.x, dim, True)
            self.own.closing()
            return all_reduce(func(*args), self.own.mesh)
        y = func(product.equation, copy_to_group(product.x, self.own.mesh), product.weight)
        if told is not None:
            told(self.module, name, y, dim, False)
        self.own.opened(self.module, y)
        return y


def run_products(module: nn.Module, dims: Mapping[str, int], mesh: DeviceMesh) -> OwnProducts:
    """Let ``forward`` of ``module``, whose parameters are cut along ``dims`` already, multiply so from now on.

    Compilers run it as it is, without a graph.
    """
    own = OwnProducts(dims, mesh)
    module.__dict__[_HELD] = own
    kind: Any = type(module)
    module.__class__ = _noting(kind, tuple(sorted(dims)))
    return own


@lru_cache(maxsize=256)
def _noting(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of ``cls`` that knows the tensors read as parameters ``names``, and multiplies by them as above."""

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Products(self):
            return cls.forward(self, *args, **kwargs)

    members: dict[str, Any] = {name: _noted(cls, name) for name in names}
    members |= {"forward": torch.compiler.disable(forward), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members | {"__qualname__": cls.__qualname__}))


def _noted(cls: type[nn.Module], name: str) -> property:
    of_part = getattr(cls, name).fget

    def read(self: nn.Module) -> Any:
        part = of_part(self)
        self.__dict__[_HELD].read(name, part)
        return part

    return property(read)
