"""A module is given its rank's heads of an argument, by place or by name, in one run or in one for each sample."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.nn.sliced_arguments import Holders, named_arguments, slice_arguments
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.testing.spawn import Pools

HEADS = 5


class Held(UserDict[str, Any]):
    """A dict of its own kind."""


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
    within = Told()
    slice_arguments(within, {"bias['a'][1][0]": (1, HEADS), "bias[0]": (1, HEADS)}, mesh)
    for kind in (dict, Held):
        held = kind({"a": (x, [inner]), "b": [x]})
        shown = within(x, held)[1]
        found += [] if type(shown) is kind and shown["b"] is held["b"] else [f"{kind} of its own"]
        found += [] if torch.equal(shown["a"][1][0], wanted.t()) and shown["a"][0] is x else [f"in a {kind}"]
        found += [] if held["a"][1][0] is inner else [f"the {kind} outside is changed"]
    others = {"a": x, 3: x}
    found += [] if within(x, others)[1] is others else ["a dict with another key than words is copied"]
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


@pytest.mark.cpu
def test_what_holds_itself_has_names_to_a_depth_and_keys_that_are_no_words_have_none() -> None:
    held: list[Any] = [1]
    held.append(held)
    names = named_arguments(Told(), (held,), {"more": {"a": 1, "b c": 2, "d": {3: 4}}})
    assert [name for name in names if name.startswith("x")] == [
        "x", "x[0]", "x[1]", "x[1][0]", "x[1][1]", "x[1][1][0]", "x[1][1][1]", "x[1][1][1][0]", "x[1][1][1][1]",
    ]  # fmt: skip
    assert [name for name in names if name.startswith("more")] == ["more", "more['a']", "more['d']"]


@pytest.mark.cpu
def test_changes_of_what_holds_an_argument_are_seen() -> None:
    one, kept = torch.ones(1), {"a": (torch.ones(1), [1]), "b": torch.ones(1)}

    def changed(change: Any) -> list[str]:
        given = copy.copy(kept)
        given["a"] = (kept["a"][0], [1])  # type: ignore[index]
        holders = Holders(Told(), (one, given), {"mask": given}, ["bias['a'][0]", "x"])
        change(given)
        return holders.changed

    assert changed(lambda given: None) == []
    for change in (
        lambda given: given.update(c=one), lambda given: given.update({3: one}), lambda given: given.pop("b"),
        lambda given: given.update(b=torch.ones(1)), lambda given: given["a"][1].append(1),
    ):  # fmt: skip
        assert changed(change) == ["bias"]
