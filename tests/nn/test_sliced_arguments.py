"""A module is given its rank's heads of an argument, by place or by name, in one run or in one for each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.nn.sliced_arguments import named_arguments, slice_arguments
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.testing.spawn import Pools

HEADS = 5


class Told(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor | None, Any]:
        return x, bias, more.get("mask")


def taken() -> list[str]:
    mesh, module, found = tp_mesh(), Told(), []
    slice_arguments(module, {"bias": (0, HEADS), "mask": (1, HEADS)}, mesh)
    sizes, rank = chunk_sizes(HEADS, mesh.size()), mesh.get_local_rank()
    mine = slice(offsets(sizes)[rank], offsets(sizes)[rank] + sizes[rank])
    x, bias = torch.ones(HEADS), torch.randn(2 * HEADS, 3)
    wanted = bias.view(2, HEADS, 3)[:, mine].reshape(-1, 3)
    for args, kwargs in (((x, bias), {}), ((x,), {"bias": bias})):
        given = module(*args, **kwargs)
        found += [] if torch.equal(given[1], wanted) and given[0] is x and given[2] is None else [f"{kwargs.keys()}"]
    found += [] if torch.equal(module(x, mask=bias.t().contiguous())[2], wanted.t()) else ["by name alone"]
    found += [] if module(x, None)[1] is None else ["None"]
    both, inner = Told(), bias.t().contiguous()
    slice_arguments(both, {"bias[1]": (1, HEADS)}, mesh)
    for args, kwargs in (((x, (x, inner)), {}), ((x,), {"bias": [x, inner]})):
        first, second = both(*args, **kwargs)[1]
        found += [] if first is x and torch.equal(second, wanted.t()) else ["in a tuple or a list"]
    try:
        module(x, bias[:7])
        found.append("7 rows are no runs of 5 heads")
    except ValueError as error:
        wrong = "bias must be a tensor with runs of 5 heads in dimension 0, got [7, 3]"
        found += [] if wrong in str(error) else [str(error)]
    return found


@pytest.mark.gloo
def test_a_module_is_given_its_heads(ranks: Pools) -> None:
    assert ranks(2).run(taken, timeout=LIMIT_S) == [[], []]


@pytest.mark.cpu
def test_a_module_without_forward_has_names_for_keywords_alone() -> None:
    """Layers of Keras are called through another method."""
    module: Any = object()
    assert named_arguments(module, ([1],), {"x": (2,)}) == {"x": (2,), "x[0]": 2}
