"""The ops on fp8 operands: values by every implementation, scales that travel, what is refused, compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops import scaled
from tests.ops.scaled import ScaledCase, exact_cases, judge_all, judge_cases, parts_of, real_cases, run
from tests.ops.support import IMPLEMENTATIONS, new_group
from tests.ops.test_bad_input import assert_matches, error_of
from tpkernels.errors import GroupMismatch
from tpkernels.gemm import fp8
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER
from tpkernels.testing.expected import check_weight_gradient, expected_matmul_all_reduce
from tpkernels.testing.numeric import Bounded, BoundExceeded, assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

gloo = pytest.mark.gloo
F8 = torch.float8_e4m3fn


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("at_once", [fp8._WIDENED_AT_ONCE, 40, 1])
def test_every_number_widens_to_itself(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(fp8, "_WIDENED_AT_ONCE", at_once)
    codes = torch.arange(256, dtype=torch.uint8).view(F8)
    square = codes.view(16, 16)
    parts = (codes[codes.float().isfinite()], square[:, 3:9], codes[:0], square[:, :0])
    for numbers in (codes, square, square.t(), *parts):
        wide, expected = fp8.Scaled(numbers, torch.ones(1)).wide(), numbers.float()
        assert torch.equal(wide.isnan(), expected.isnan())
        assert_bitwise_equal(wide.nan_to_num(), expected.nan_to_num())


@pytest.mark.cpu
def test_quantised_numbers_are_the_nearest_ones_and_reach_the_largest() -> None:
    x = payload((5, 33)) * torch.tensor([1e-6, 1.0, 0.0, 3e4, 7.0])[:, None]
    for per in ("row", "tensor"):
        numbers, scale = tpk.quantize_fp8(x, per=per)
        assert scale.shape == ((5, 1) if per == "row" else ()) and scale.dtype == torch.float32
        largest = numbers.double().abs().amax(-1)
        assert bool((largest[[0, 1, 3, 4]] == 448).all() if per == "row" else largest.max() == 448)
        values = torch.arange(256, dtype=torch.uint8).view(F8).double()
        values = values[values.isfinite()]
        nearest = (x.double()[..., None] / scale.double()[..., None] - values).abs().amin(-1)
        chosen = (x.double() / scale.double() - numbers.double()).abs()
        assert bool((chosen <= nearest * (1 + 1e-6) + 1e-4).all())  # x / scale rounds in fp32 before
    zeros, one = tpk.quantize_fp8(torch.zeros(2, 0), per="row")
    assert zeros.shape == (2, 0) and bool((one == 1).all())
    nan, scale = tpk.quantize_fp8(torch.tensor([[float("nan"), 1.0], [1.0, 2.0]]), per="row")
    assert nan.float().isnan().tolist() == [[True, True], [False, False]] or bool(nan.float().isnan()[0, 0])
    experts = torch.stack([payload((3, 4)), 1e3 * payload((3, 4)), torch.zeros(3, 4)])
    numbers, scale = tpk.quantize_fp8(experts, per="matrix")
    assert scale.shape == (3, 1, 1) and numbers.float().abs().amax((1, 2)).tolist() == [448, 448, 0]
    for whole, own, own_scale in zip(experts, numbers, scale, strict=True):
        assert_bitwise_equal(tpk.quantize_fp8(whole)[0].float(), own.float())
        assert_bitwise_equal(tpk.quantize_fp8(whole)[1], own_scale.view(()))
    assert tpk.quantize_fp8(torch.zeros(2, 0, 5), per="matrix")[1].flatten().tolist() == [1, 1]
    with pytest.raises(ValueError, match="per must be 'tensor', 'row' or 'matrix', got 'column'"):
        tpk.quantize_fp8(x, per="column")
    with pytest.raises(ValueError, match=r"per='matrix' needs a tensor of at least 2 dimensions, got shape \(5,\)"):
        tpk.quantize_fp8(x[:, 0], per="matrix")


@gloo
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_integers_are_exact_in_every_implementation(ranks: Pools, world: int, full: bool) -> None:
    for number, name in enumerate(IMPLEMENTATIONS if world > 1 else ("auto",)):
        cases = exact_cases(name, world)
        if not full and world > 2:  # a sample, of other cases for each world and implementation
            cases = cases[(number + world) % 4 :: 4]
        assert ranks(world).run(judge_all, cases, 3) == [len(cases)] * world


@gloo
@pytest.mark.parametrize("world", [1, 2, 3])
def test_real_numbers_are_within_the_bound_of_fp64(ranks: Pools, world: int, full: bool) -> None:
    for number, name in enumerate(IMPLEMENTATIONS if world > 1 else ("auto",)):
        ranks(world).run(judge_all, real_cases(name)[number :: 1 if full or world == 2 else 3], 2)


# --- faults that the judge must see -----------------------------------------------------------------------------------


def strike(name: str, fault: str | None) -> list[str]:
    """What the judge says of a gather on this rank, with integers and at random."""
    said = []
    owner, attribute, make = scaled.FAULTS[fault or "one scale for all rows"]
    change = {} if fault is None else {attribute: make(getattr(owner, attribute))}
    with new_group(2) as group, mock.patch.multiple(owner, **change) if change else mock.patch.dict({}):
        for integers in (True, False):
            case = ScaledCase(GATHER, (12, 24), ns=(10,), integers=integers, implementation=name)
            try:
                judge_cases([case], group)
            except BoundExceeded as error:
                said.append(str(error))
    return said


@gloo
@pytest.mark.parametrize("fault", [None, *scaled.FAULTS])
def test_wrong_scales_are_caught(ranks: Pools, fault: str | None) -> None:
    for name in IMPLEMENTATIONS:
        said = [len(reports) for reports in ranks(2).run(strike, name, fault)]
        assert (sum(said) == 0) if fault is None else (max(said) == 2), f"{name}: {said}"


# --- refusals ---------------------------------------------------------------------------------------------------------


def f8(*shape: int) -> Tensor:
    return torch.ones(*shape).to(F8)


ONE = torch.ones(())
GOOD: dict[str, Any] = {"scale_x": ONE, "scale_weight": ONE}
BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no scales": (
        lambda g: tpk.all_gather_matmul(f8(4, 16), f8(5, 16), g),
        r"x of torch.float8_e4m3fn needs scale_x and scale_weight",
    ),
    "one scale": (
        lambda g: tpk.matmul_all_reduce(f8(4, 16), f8(5, 16), g, scale_weight=ONE),
        r"fp8 operands need scale_x and scale_weight, got no scale_x",
    ),
    "scales of bf16 operands": (
        lambda g: tpk.matmul_reduce_scatter(f8(4, 16).bfloat16(), f8(5, 16).bfloat16(), g, **GOOD),
        r"go with x and weight of torch.float8_e4m3fn, got x of torch.bfloat16",
    ),
    "another fp8": (
        lambda g: tpk.all_gather_matmul(f8(4, 16).to(torch.float8_e5m2), f8(5, 16), g, **GOOD),
        r"go with x and weight of torch.float8_e4m3fn, got x of torch.float8_e5m2",
    ),
    "a weight of bf16": (
        lambda g: tpk.all_gather_matmul(f8(4, 16), f8(5, 16).bfloat16(), g, **GOOD),
        r"weight must have the dtype of x \(torch.float8_e4m3fn\), got torch.bfloat16",
    ),
    "scales per column": (
        lambda g: tpk.matmul_all_reduce(f8(4, 16), f8(5, 16), g, scale_x=torch.ones(1, 16), scale_weight=ONE),
        r"scale_x must have one element \(per tensor\) or shape \(4, 1\) \(per row\), got \(1, 16\)",
    ),
    "scales of the other operand": (
        lambda g: tpk.matmul_reduce_scatter(f8(4, 16), f8(5, 16), g, scale_x=ONE, scale_weight=torch.ones(4, 1)),
        r"scale_weight must have one element \(per tensor\) or shape \(5, 1\) \(per row\), got \(4, 1\)",
    ),
    "scales of fp64": (
        lambda g: tpk.all_gather_matmul(f8(4, 16), f8(5, 16), g, scale_x=ONE.double(), scale_weight=ONE),
        r"scale_x must be torch.float32, got torch.float64",
    ),
    "one scale for two weights": (
        lambda g: tpk.all_gather_matmul(f8(4, 16), [f8(5, 16), f8(3, 16)], g, **GOOD),
        r"scale_weight must have one entry per weight \(2\), got 1",
    ),
    "a result in fp8": (
        lambda g: tpk.all_gather_matmul(f8(4, 16), f8(5, 16), g, out_dtype=F8, **GOOD),
        r"out_dtype must be one of bfloat16, float16, float32, got torch.float8_e4m3fn",
    ),
    "a bias that is not like the result": (
        lambda g: tpk.matmul_all_reduce(f8(4, 16), f8(5, 16), g, bias=torch.ones(5), **GOOD),
        r"bias must have the dtype of the result \(out_dtype=torch.bfloat16\), got torch.float32",
    ),
    "a gradient of x": (
        lambda g: tpk.all_gather_matmul(f8(4, 16).requires_grad_(), f8(5, 16), g, **GOOD),
        r"a call with fp8 operands has no gradient, but one of x, weight, bias, scale_x and scale_weight requires",
    ),
    "a gradient of a scale": (
        lambda g: tpk.matmul_reduce_scatter(
            f8(4, 16), f8(5, 16), g, scale_x=ONE, scale_weight=torch.ones(5, 1, requires_grad=True)
        ),
        r"call it under torch.no_grad\(\), or quantise inside of a torch.autograd.Function",
    ),
    "explain: out_dtype of bf16": (
        lambda g: tpk.explain(GATHER, m=8, n=8, k=8, dtype=torch.bfloat16, out_dtype=torch.float32, group=g),
        r"out_dtype is for GEMMs of float8_e4m3fn",
    ),
    "explain: a collective": (
        lambda g: tpk.explain("all_gather", m=8, n=8, k=8, dtype=F8, group=g),
        r"dtype must be one of .*, got torch.float8_e4m3fn",
    ),
}


def refused() -> dict[str, tuple[BaseException | None, bool]]:
    found = {}
    for name, (bad, _) in BAD.items():
        with new_group() as group:
            error = error_of(bad, group)
            total = tpk.all_reduce(torch.ones(2), group)
            found[name] = error, bool((total == dist.get_world_size(group)).all())
    return found


@gloo
def test_bad_arguments_are_refused_on_every_rank_and_the_group_works_on(ranks: Pools) -> None:
    for found in ranks(2).run(refused):
        for name, (error, works) in found.items():
            assert type(error) is ValueError, f"{name}: {error!r}"
            assert_matches(BAD[name][1], str(error))
            assert works, name


def different_results() -> str:
    """Rank 1 asks for another dtype of the result."""
    with new_group(timeout=12.0) as group:
        dtype = torch.float16 if dist.get_rank() else torch.bfloat16
        try:
            tpk.matmul_all_reduce(f8(4, 16), f8(5, 16), group, out_dtype=dtype, **GOOD)
        except GroupMismatch as error:
            return str(error)
    return "nothing"


@gloo
def test_ranks_that_want_different_results_are_told_both_sides(ranks: Pools) -> None:
    for said in ranks(2).run(different_results):
        assert "float8_e4m3fn -> float16" in said and "float8_e4m3fn -> bfloat16" in said, said


# --- gradients of one's own -------------------------------------------------------------------------------------------


class Fp8Linear(torch.autograd.Function):
    """Forward in fp8 of what was quantised here, backward in the dtype of the operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any) -> Tensor:
        (x8, scale_x), (w8, scale_w) = (tpk.quantize_fp8(t, per="row") for t in (x, w))
        y, whole, scales = tpk.all_gather_matmul(
            x8, w8, group, scale_x=scale_x, scale_weight=scale_w, out_dtype=x.dtype, return_gathered=True
        )
        ctx.save_for_backward(whole.to(x.dtype) * scales, w8.to(w.dtype) * scale_w)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        whole, w = ctx.saved_tensors
        return tpk.matmul_reduce_scatter(dy, w.t(), ctx.group), dy.t() @ whole, None


def trained() -> None:
    with new_group() as group:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        xs = [payload((5, 24), rank=r, name="x") for r in range(world)]
        ws = [payload((8, 24), rank=r, name="w") for r in range(world)]
        dys = [payload((5 * world, 8), rank=r, name="dy") for r in range(world)]
        x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
        y = Fp8Linear.apply(x, w, group)  # type: ignore[no-untyped-call]
        y.backward(dys[rank])
        assert x.grad is not None and w.grad is not None
        exact_xs, exact_ws = ([Bounded.scaled(*tpk.quantize_fp8(t, per="row")) for t in ts] for ts in (xs, ws))
        whole = Bounded(torch.cat([t.value for t in exact_xs]), torch.cat([t.error for t in exact_xs]))
        check_weight_gradient(w.grad, dys[rank], whole)
        dx = expected_matmul_all_reduce(dys, [t.transposed() for t in exact_ws], dtype=x.dtype)
        dx.narrow(0, 5 * rank, 5).check(x.grad, "input gradient")


@gloo
def test_an_autograd_function_that_quantises_inside_trains(ranks: Pools) -> None:
    ranks(2).run(trained)


# --- modes ------------------------------------------------------------------------------------------------------------


def modes() -> int:
    """Autocast and torch.compile give the bits of eager; explain knows fp8; a gradient of one's own trains."""
    checked = 0
    with new_group(2) as group:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        for case in (
            ScaledCase(GATHER, (12, 24), ns=(10, 4), bias=True, activation="gelu", return_gathered=True),
            ScaledCase(GATHER, (6, 8), ns=(3,), dim=1, implementation="unfused", return_gathered=True),
            ScaledCase(SCATTER, (2, 7, 24), ns=(10,), dim=1, dtype=torch.float32),
            ScaledCase(REDUCE, (2, 7, 24), ns=(10,), dtype=torch.float16),
        ):
            parts = parts_of(case, world)
            eager = run(case, parts, group)
            with torch.autocast("cpu", torch.bfloat16):
                under_autocast = run(case, parts, group)
            torch._dynamo.reset()
            compiled = torch.compile(scaled.call, fullgraph=True, backend="aot_eager")
            for others in (
                under_autocast,
                compiled(case, parts.xs[rank], parts.ws[rank], parts.bs[rank], group),
            ):
                for now, before in zip(others, eager, strict=True):
                    assert now.stride() == before.stride(), case
                    assert_bitwise_equal(now, before, f"{case}")
                    checked += 1
        table = str(tpk.explain(GATHER, m=64, n=64, k=64, dtype=F8, out_dtype=torch.float16, group=group))
        assert "float8_e4m3fn -> float16" in table, table
    return checked


@pytest.mark.full("seconds of compiling")
@gloo
def test_autocast_and_compiled_graphs_give_the_bits_of_eager(ranks: Pools) -> None:
    assert ranks(2).run(modes) == [2 * (4 + 3 + 1 + 1)] * 2
