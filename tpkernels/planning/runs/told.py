"""What a run tells of its steps, to whoever follows it.

It owns :class:`Told`, from which sessions inherit: by default nothing is noted, and what is called runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tpkernels.nn.parameter_products import Product
from tpkernels.nn.part_maxima import Extreme
from tpkernels.nn.part_statistics import Statistic
from tpkernels.planning.runs.conditions import Rest
from tpkernels.planning.runs.gradient_code import Works

__all__ = ["Told"]


class Told:
    """The steps, in the words of their methods."""

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        """A module is called,"""

    def given(self, name: str, args: Any, kwargs: Any) -> Any:
        """what it is called with instead (None for what it is given),"""
        return None

    def left(self, name: str, output: Any = None) -> Any:
        """and it returns; what it returns instead (None for what it gives)."""
        return None

    def original_called(self, name: str) -> None:
        """A module of the model itself runs, not its copy."""

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        """A module that needs values of tensors is called,"""

    def after_opaque(self, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """and gives these."""

    def read_quietly(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """An op inside of such a module."""

    def before_decision(self, number: int, tensors: list[Tensor]) -> None:
        """A condition of ``tensors`` is answered by the turns of this run."""

    def before_rest(self, rest: Rest, tensors: list[Tensor]) -> None:
        """A module asks for a condition of ``tensors``."""

    def rest_gives(self, rest: Rest, tensors: list[Tensor]) -> None:
        """It returns what are not yet fresh tensors,"""

    def after_rest(self, rest: Rest, given: Any, outputs: list[Tensor]) -> None:
        """and these in their place."""

    def before_mixture(self, name: str, given: list[Tensor]) -> None:
        """Experts of a mixture are called,"""

    def after_mixture(self, name: str, given: list[Tensor], out: Tensor, slots: int) -> None:
        """and give this."""

    def mixture_read_quietly(self, name: str, given: list[Tensor]) -> None:
        """Experts inside of an opaque module."""

    def read_by_weight(self, name: str) -> None:
        """A product with a layer's weight, which is a call of the layer."""

    def weight_converted(self, name: str) -> None:
        """Code asks for a layer's weight in some dtype."""

    def norm_called(self, name: str, forward: Callable[..., Any], *given: Tensor) -> Any:
        """A module that may be a norm over the last dimension, called with x alone, or with a gate as well."""
        return forward(*given)

    def statistic_taken(self, statistic: Statistic, run: Callable[[], Tensor]) -> Tensor:
        """A mean or a spread of the last dimension (``nn/part_statistics.py``), also inside of an opaque module."""
        return run()

    def maximum_taken(self, taken: Extreme, run: Callable[[], Tensor]) -> Tensor:
        """The largest or smallest element of a tensor (``nn/part_maxima.py``), also inside of an opaque module."""
        return run()

    def product_taken(self, product: Product, run: Callable[[], Tensor]) -> Tensor:
        """A product that may be with a parameter (``nn/parameter_products.py``), also inside of an opaque module."""
        return run()

    def item_written(self, target: Tensor, index: Any, value: Any, run: Callable[[], Any]) -> Any:
        """``target[index] = value``, also inside of an opaque module."""
        return run()

    def channels_called(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A module that can be cut by channels (``modules/channel_modules.py``), called with x alone."""
        return forward(x)

    def channels_called_otherwise(self, name: str) -> None:
        """Such a module is called in another way, or within an opaque module."""

    def gradient_code_called(self, name: str, tensors: list[Tensor], made: list[Tensor], works: Works) -> None:
        """The gradients of ``tensors``, of which it has ``made`` others, pass through code that this run does not see;
        ``works`` finds out whether it takes each slice by itself."""
