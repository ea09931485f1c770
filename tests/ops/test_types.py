"""What a type checker knows of the results of ops: mypy reads the first function, the second asks the annotations."""

from __future__ import annotations

import inspect
from typing import Any, assert_type

import pytest
from torch import Tensor

import tpkernels as tpk


def judged_by_mypy(x: Tensor, w: Tensor, routing: tpk.Routing, group: Any) -> None:
    assert_type(tpk.all_gather_matmul(x, w, group), Tensor)
    assert_type(tpk.all_gather_matmul(x, (w, w), group, gather_dim=1), list[Tensor])
    assert_type(tpk.all_gather_matmul(x, (w, w), group, activation="swiglu"), Tensor)
    assert_type(tpk.all_gather_matmul(x, w, group, return_gathered=True), tuple[Tensor, Tensor])
    assert_type(tpk.all_gather_matmul(x, w, group, scale_x=x, return_gathered=True), tuple[Tensor, Tensor, Tensor])
    assert_type(tpk.copy_matmul(x, w, group, activation="gelu"), Tensor)
    assert_type(tpk.copy_matmul(x, [w, w], group, bias=[None, w]), list[Tensor])
    assert_type(tpk.copy_matmul(x, [w, w], group, activation="geglu"), Tensor)
    assert_type(tpk.copy_grouped_matmul(x, w, routing, group), Tensor)
    assert_type(tpk.copy_grouped_matmul(x, [w, w], routing, group), list[Tensor])
    assert_type(tpk.matmul_all_reduce(x, w, group), Tensor)
    assert_type(tpk.matmul_all_reduce(x, w, group, residual=x, norm_weight=w), tuple[Tensor, Tensor])


@pytest.mark.cpu
def test_no_public_function_returns_anything() -> None:
    functions = [one for name in tpk.__all__ if inspect.isfunction(one := getattr(tpk, name))]
    assert len(functions) > 20
    anything = {one.__name__ for one in functions if one.__annotations__["return"] in (Any, "Any")}
    assert anything == {"load_snapshot"}  # which returns what save_snapshot was given
