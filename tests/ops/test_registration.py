"""An op's schema and arguments, as its kernel's annotations say them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tpkernels.nn  # its ops are registered then
from tpkernels.ops import registration

pytestmark = pytest.mark.cpu


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class Options(NamedTuple):
    group_name: str
    dim: int
    sizes: list[int] | None
    dtype: torch.dtype
    scale: float


def kernel(
    xs: list[Tensor], pair: Pair, options: Options, needs: list[bool], how: str = "auto", *, sinks: Any = None
) -> list[Tensor | None]:
    raise NotImplementedError


FLAT = ([1], "l", "r", "g", 2, [3], torch.half, 0.5, [True], "how")


def test_a_named_tuple_stands_for_its_fields_in_the_schema() -> None:
    arguments = registration._arguments(kernel)
    assert registration._schema(kernel, arguments) == (
        "(Tensor[] xs, Tensor left, Tensor? right, str group_name, int dim, SymInt[]? sizes, ScalarType dtype, "
        'float scale, bool[] needs, str how="auto") -> Tensor[]'
    )


@pytest.mark.parametrize("given", [FLAT, FLAT[:-1]])
def test_flat_arguments_arrive_as_the_tuples_they_stand_for(given: tuple[Any, ...]) -> None:
    """Also where the dispatcher leaves out a default at the end."""
    xs, pair, options, *rest = registration._arguments(kernel).packed(lambda *args: args)(*given)
    assert (xs, pair, options) == ([1], Pair(*given[1:3]), Options(*given[3:8]))  # type: ignore[arg-type]
    assert (type(pair), type(options), rest) == (Pair, Options, list(given[8:]))


def test_arguments_behind_the_gradients_have_none() -> None:
    padded = registration._arguments(kernel).padded(lambda ctx, dy: (dy, ctx))
    assert padded("ctx", "dy") == ("dy", "ctx", *(None,) * 8)


def test_no_kernel_has_arguments_that_its_op_lacks() -> None:
    assert tpkernels.nn is not None
    for name, function in registration._KERNELS.items():
        schema = getattr(torch.ops.tpkernels, name).default._schema
        fields = [field.name for field in registration._arguments(function).fields]
        assert len(fields) == len(schema.arguments), name
