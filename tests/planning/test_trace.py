"""Traces: nothing of them stays in the model, and models run on fake tensors wherever they run on real ones."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import tpkernels as tpk
from tests.planning import asking
from tests.planning.asking import Keeping
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.higher_order_ops import flex_attention
from tpkernels.planning.runs.trace_leaks import FakeTensorLeft
from tpkernels.sharding import Column, Row

pytestmark = pytest.mark.cpu

X = torch.zeros(3, 5, 8)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    asking.positions.cache_clear()
    asking.TABLES.clear()
    asking.SEEN.clear()
    if hasattr(Keeping, "table"):
        del Keeping.table


def runs_on_real_tensors(model: nn.Module) -> bool:
    y = model(torch.randn(3, 5, 8))
    return type(y) is Tensor and bool(y.isfinite().all())


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["lru_cache", "dict", "list"])
@pytest.mark.parametrize("ran_before", [False, True])
def test_the_model_runs_after_a_plan_as_it_did_before(how: str, ran_before: bool) -> None:
    torch.manual_seed(0)
    model, x = Keeping(how), torch.randn(3, 5, 8)
    if ran_before:
        model(x)
    plan = tpk.make_plan(model, 2, example_inputs=X)
    if how != "dict" or ran_before:  # what only the first of all runs computes proves nothing
        assert plan["up"].style == Column() and plan["down"].style == Row()
    assert runs_on_real_tensors(model)
    table = torch.arange(5, dtype=torch.float32)
    assert torch.equal(model(x), model.down(model.up(x + table[:, None]).relu()))
    assert not any(isinstance(tensor, FakeTensor) for tensor in asking.SEEN)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["class", "shared object", "closure"])
@pytest.mark.slow("2 s")
def test_a_fake_tensor_that_cannot_be_taken_out_is_an_error_that_says_where(how: str) -> None:
    where = {"class": r"tests\.planning\.asking\.Keeping\.table", "shared object": r"an object of Scratch\.table"}
    with pytest.raises(FakeTensorLeft, match=where.get(how, r"closure|cell|list")):
        tpk.make_plan(Keeping(how), 2, example_inputs=X)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["lru_cache", "closure"])
@pytest.mark.slow("2 s")
def test_objects_that_the_user_took_from_the_garbage_collector_are_looked_at_too(how: str) -> None:
    """As servers do with ``gc.freeze``: they stay frozen."""
    model = Keeping(how)
    gc.freeze()
    try:
        if how == "lru_cache":
            tpk.make_plan(model, 2, example_inputs=X)
            assert runs_on_real_tensors(model)
        else:
            with pytest.raises(FakeTensorLeft, match=r"closure|cell|list"):
                tpk.make_plan(model, 2, example_inputs=X)
        assert gc.get_freeze_count() > 0
        held = {
            id(model),
            *(id(part) for part in model.modules()),
            id(gc),
            id(Keeping),
        }  # they live as long as the test
        assert not held & {id(one) for one in gc.get_objects()}, "what was frozen is collected again"
    finally:
        gc.unfreeze()
    tpk.make_plan(Keeping("list"), 2, example_inputs=X)
    assert gc.get_freeze_count() == 0, "a plan leaves nothing frozen"


def test_a_plan_has_pythons_collector_look_at_nothing_but_what_is_new() -> None:
    """A collection of everything counts what is not frozen, and Python then looks at everything again and again."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    tpk.make_plan(model, 2, example_inputs=X)  # imports what there is to import
    before = gc.get_stats()[2]["collections"], gc.get_threshold()
    tpk.make_plan(model, 2, example_inputs=X)
    assert (gc.get_stats()[2]["collections"], gc.get_threshold()) == before


def test_nothing_is_left_either_where_there_is_no_plan() -> None:
    model = Keeping("dict")
    with pytest.raises(ValueError, match="conflict"):
        tpk.make_plan(model, 2, example_inputs=X, overrides={"up": "column", "down": "replicate"})
    assert not asking.TABLES and runs_on_real_tensors(model)


class Writing(nn.Module):
    """Works in place on a tensor that no copy has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        TABLE.add_(1)
        y: Tensor = self.down(self.up(x + TABLE).relu())
        return y


TABLE = torch.ones(8)


def test_real_tensors_that_a_trace_meets_keep_their_values() -> None:
    tpk.make_plan(Writing(), 2, example_inputs=X)
    assert type(TABLE) is Tensor and torch.equal(TABLE, torch.ones(8))


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.lock, self.scale = threading.Lock(), torch.ones(1, requires_grad=True) * 2

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            y: Tensor = self.down(self.up(x * self.scale).relu())
        return y


def test_locks_and_tensors_with_a_history_do_not_hinder_the_copy() -> None:
    plan = tpk.make_plan(Uncopyable(), 2, example_inputs=X)
    assert plan["up"].style == Column() and not plan.notes


class Grouped(nn.Module):
    """Experts as one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.down(self.up(x).relu()).flatten(0, 1)
        offs = torch.full((4,), 4, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        y: Tensor = F.grouped_mm(rows, self.experts, offs=offs)
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_traced_in_every_dtype(dtype: torch.dtype) -> None:
    model, x = Grouped().to(dtype), X.to(dtype)
    plan = tpk.make_plan(model, 2, example_inputs=x)
    assert plan["up"].style == Column() and not plan.notes
    observation = Observation(model, x)
    assert observation.recording is not None
    assert observation.recording.events[-1].outputs == [tuple(model(x).shape)]


def test_a_grouped_product_that_the_kernel_refuses_is_refused() -> None:
    model = Grouped()
    model.experts = nn.Parameter(torch.randn(4, 9, 8))
    assert "inner sizes differ" in Observation(model, X).problem


class Chunked(nn.Module):
    """It makes a tensor of no numbers, as the audio encoder of Phi-4 does where it has one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        begins = torch.Tensor(np.arange(0, 3, -1)).long()
        y: Tensor = self.down(self.up(x).relu()) + F.pad(begins, (1, 0)).sum()
        return y


def test_a_constant_without_elements_is_followed() -> None:
    plan = tpk.make_plan(Chunked(), 2, example_inputs=torch.zeros(2, 4))
    assert (plan["up"].style, plan["down"].style) == (Column(), Row())


class Cache:
    """Grows from an empty tensor."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, keys: Tensor) -> Tensor:
        if self.keys is None:
            self.keys = torch.tensor([], dtype=keys.dtype)
        self.keys = torch.cat([self.keys, keys], dim=-2)
        return self.keys


class Cached(nn.Module):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            query, key = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key))
            key = cache.update(key)
            y: Tensor = self.out(F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2))
            return y

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.Attention()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, Cache())
        return y


def test_a_cache_that_grows_from_an_empty_tensor_is_cut_by_heads() -> None:
    plan = tpk.make_plan(Cached(), 2, example_inputs=X)
    assert plan["attention.key"].style == Column() and plan["attention.out"].style == Row()
    assert "2 heads, 1 per rank" in plan["attention.query"].reason


class Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out, self.up, self.down = (nn.Linear(8, 8) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        heads, bias = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2), self.bias
        attended = flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score + bias[h])
        y: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return y + self.down(self.up(y).relu())


def test_flex_attention_is_one_event_that_knows_what_its_functions_hold() -> None:
    model = Flex()
    observation = Observation(model, X)
    assert observation.recording is not None, observation.problem
    (event,) = [event for event in observation.recording.events if event.packet is flex_attention]
    assert event.whole[:3] == [(3, 2, 5, 4)] * 3 and (2,) in event.whole[4]
    plan = tpk.make_plan(model, 2, example_inputs=X)
    assert plan["up"].style == Column() and plan["down"].style == Row()
