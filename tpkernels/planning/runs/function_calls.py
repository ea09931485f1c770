"""What a run sees of the functions that a model's code calls, before they are ops.

It owns the list of these function modes, and the one for sums, means and spreads over the last dimension, of which one
rank has a part (:mod:`tpkernels.nn.part_statistics`), for largest elements (:mod:`tpkernels.nn.part_maxima`), for
products with parameters that are no layer's (:mod:`tpkernels.nn.parameter_products`), and for what is written to places
of a tensor (:mod:`tpkernels.nn.written_states`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from tpkernels.nn.parameter_products import Product, product_of
from tpkernels.nn.part_maxima import taken_from
from tpkernels.nn.part_statistics import Statistic, statistic_of
from tpkernels.planning.modules.shape_reads import ShapesAsked
from tpkernels.planning.runs.weight_reads import WeightReads

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session

__all__ = ["MaximumCall", "ProductCall", "StatisticCall", "functions_seen"]


class StatisticCall(NamedTuple):
    """One sum, mean or spread in a recording, by the event that it begins with."""

    statistic: Statistic
    module: str
    """The innermost module that is being called."""
    stop: int
    """The first event behind it."""
    source: Any
    result: Any
    shape: tuple[int, ...]


class MaximumCall(NamedTuple):
    """One largest or smallest element of a tensor in a recording, by the event that it begins with."""

    module: str
    """The innermost module that is being called."""
    stop: int
    """The first event behind it."""
    source: Any
    result: Any
    dtype: torch.dtype
    smallest: bool
    trained: bool
    """Whether it may have a gradient: the code has not detached what it is of."""


class ProductCall(NamedTuple):
    """One product with a parameter in a recording, by the event that it begins with."""

    product: Product
    name: str
    """The parameter's."""
    stop: int
    """The first event behind it."""
    source: Any
    """Of x."""
    result: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    """Whether somebody wants the gradient of x."""


@contextmanager
def functions_seen(session: Session) -> Iterator[None]:
    """Within it, the session is told of functions that its model's code calls."""
    shadow = session.shadow
    with ShapesAsked(shadow.owners, shadow.asked), WeightReads(session), _Calls(session):
        yield


class _Calls(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        statistic, product = statistic_of(func, args, kwargs), product_of(func, args, kwargs)
        before, self.session.function = self.session.function, func
        try:
            if statistic is not None:
                return self.session.statistic_taken(statistic, lambda: func(*args, **kwargs))
            if (taken := taken_from(func, args, kwargs)) is not None:
                return self.session.maximum_taken(taken, lambda: func(*args, **kwargs))
            if product is not None:
                return self.session.product_taken(product, lambda: func(*args, **kwargs))
            if func is torch.Tensor.__setitem__:
                return self.session.item_written(args[0], args[1], args[2], lambda: func(*args))
            return func(*args, **kwargs)
        finally:
            self.session.function = before
