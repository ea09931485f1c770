"""What a type checker knows of results: mypy reads the first functions, the test asks the annotations."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any, assert_type, get_overloads

import pytest
from torch import Tensor

import tpkernels as tpk


def judged_by_mypy(x: Tensor, w: Tensor, routing: tpk.Routing, group: Any) -> None:
    assert_type(tpk.all_gather_matmul(x, w, group), Tensor)
    assert_type(tpk.all_gather_matmul(x, (w, w), group, gather_dim=1), list[Tensor])
    assert_type(tpk.all_gather_matmul(x, (w, w), group, activation="swiglu"), Tensor)
    assert_type(tpk.all_gather_matmul(x, w, group, return_gathered=True), tuple[Tensor, Tensor])
    assert_type(tpk.all_gather_matmul(x, w, group, scale_x=x, return_gathered=True), tuple[Tensor, Tensor, Tensor])
    assert_type(
        tpk.all_gather_matmul(x, (w, w), group, scale_x=x, return_gathered=True), tuple[list[Tensor], Tensor, Tensor]
    )
    assert_type(
        tpk.all_gather_matmul(x, (w, w), group, activation="swiglu", return_gathered=True), tuple[Tensor, Tensor]
    )
    assert_type(tpk.copy_matmul(x, w, group, activation="gelu"), Tensor)
    assert_type(tpk.copy_matmul(x, [w, w], group, bias=[None, w]), list[Tensor])
    assert_type(tpk.copy_matmul(x, [w, w], group, activation="geglu"), Tensor)
    assert_type(tpk.copy_grouped_matmul(x, w, routing, group), Tensor)
    assert_type(tpk.copy_grouped_matmul(x, [w, w], routing, group), list[Tensor])
    assert_type(tpk.all_gather_grouped_matmul(x, w, routing, group), tuple[Tensor, tpk.Routing])
    assert_type(tpk.all_gather_grouped_matmul(x, (w, w), routing, group), tuple[list[Tensor], tpk.Routing])
    assert_type(
        tpk.all_gather_grouped_matmul(x, w, routing, group, return_gathered=True), tuple[Tensor, tpk.Routing, Tensor]
    )
    assert_type(
        tpk.all_gather_grouped_matmul(x, w, routing, group, scale_x=x, return_gathered=True),
        tuple[Tensor, tpk.Routing, Tensor, Tensor],
    )
    assert_type(tpk.dispatch_grouped_matmul(x, w, routing, group), tuple[Tensor, tpk.Routing])
    assert_type(tpk.dispatch_grouped_matmul(x, [w, w], routing, group), tuple[list[Tensor], tpk.Routing])
    assert_type(tpk.matmul_all_reduce(x, w, group), Tensor)
    assert_type(tpk.matmul_all_reduce(x, w, group, residual=x, norm_weight=w), tuple[Tensor, Tensor])


def judged_of_keras(model: Any, x: Any) -> None:
    parallel = tpk.keras.TensorParallel(model)
    assert_type(parallel, tpk.keras.TensorParallel)
    assert_type(parallel.tensor_parallel_plan, tpk.keras.KerasPlan)
    assert_type(parallel.stop_training, Any)  # of the model's own class
    assert_type(tpk.keras.make_plan(model, 2), tpk.keras.KerasPlan)
    assert_type(tpk.keras.array_split(x, 2), list[Any])
    tpk.keras.tensor_parallel(model)  # type: ignore[attr-defined]


@pytest.mark.cpu
def test_no_public_function_returns_anything() -> None:
    functions: list[Any] = [one for name in tpk.__all__ if inspect.isfunction(one := getattr(tpk, name))]
    functions += [signature for one in functions for signature in get_overloads(one)]
    functions += [one for one in map(partial(getattr, tpk.nn), tpk.nn.__all__) if inspect.isfunction(one)]
    functions.append(tpk.optim.MasterWeights.step)
    assert len(functions) > 60
    anything = {one.__name__ for one in functions if re.search(r"\bAny\b", str(one.__annotations__["return"]))}
    assert anything == {"load_snapshot"}  # which returns what save_snapshot was given
