"""The ops with experts on fp8 operands: values by every implementation, what travels, wrong scales, what is refused.

The compiler's view of them is in test_compile.py; symmetric's ranks are in tests/backends/test_symmetric_grouped.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS, new_group
from tests.ops.test_bad_input import assert_matches, error_of
from tpkernels.backends.point_to_point import dealt, exchange
from tpkernels.errors import GroupMismatch
from tpkernels.gemm import fp8
from tpkernels.gemm.fp8 import Scaled, ScaledExperts
from tpkernels.testing import dealt as dealt_cases
from tpkernels.testing import grouped as grouped_cases
from tpkernels.testing.dealt import COMBINE, DISPATCH, DealtCase
from tpkernels.testing.grouped import COPY, GATHER, REDUCE, SCATTER, GroupedCase
from tpkernels.testing.numeric import BoundExceeded, assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

BF16, FP16, FP32, F8 = torch.bfloat16, torch.float16, torch.float32, fp8.DTYPE
SIZES = {1: (7,), 2: (9, 4), 3: (5, 0, 8)}
CUT, DEALT = (GATHER, SCATTER, REDUCE, COPY), (DISPATCH, COMBINE)
AnyCase = GroupedCase | DealtCase


def judge(case: AnyCase, group: Any) -> list[Tensor]:
    return grouped_cases.judge(case, group) if isinstance(case, GroupedCase) else dealt_cases.judge(case, group)


def base_of(op: str, world: int, name: str) -> AnyCase:
    kind = GroupedCase if op in CUT else DealtCase
    return kind(op, SIZES[world], (12, 20), bias=True, dtype=BF16, fp8=("row", "row"), implementation=name)


def cases(world: int, name: str) -> list[AnyCase]:
    """Every op, kind of scale and dtype of results; ranks without tokens, experts without any, all of them on one."""
    found: list[AnyCase] = []
    for op in (*CUT, *DEALT):
        base = base_of(op, world, name)
        per_x = "mixed" if op in (GATHER, SCATTER, REDUCE) else "tensor"
        found += [
            base,
            base.but(fp8=(per_x, "matrix"), dtype=FP32, load="one", num_experts=5, top_k=3, call=1),
            base.but(fp8=("tensor", "tensor"), dtype=FP16, load="few", top_k=1, strided=True, bias=False, call=2),
            base.but(fp8=("row", "matrix"), shape=(1, 1), num_experts=2, call=3),
            base.but(sizes=(0,) * world, call=4),
        ]
        if op in (GATHER, COPY, DISPATCH):
            found += [
                base.but(activation="swiglu", dtype=FP32, fp8=("row", "matrix"), call=5),
                base.but(activation="gelu", call=6),
            ]
        if op == GATHER:
            found.append(base.but(activation="clamped_swiglu", return_gathered=True, fp8=("mixed", "row"), call=7))
    return found


def judge_all(every: int, num_chunks: int | None) -> int:
    count, world = 0, dist.get_world_size()
    with new_group(num_chunks) as group:
        for number, name in enumerate(IMPLEMENTATIONS if world > 1 else ("auto",)):
            chosen = cases(world, name)[number % every :: every]
            for case in chosen:
                judge(case, group)
            count += len(chosen)
    return count


@pytest.mark.parametrize(("world", "every"), [(2, 2), (3, 3), (1, 5)])
def test_values_are_within_the_bound(ranks: Pools, world: int, every: int, full: bool) -> None:
    every, names = 1 if full else every, len(IMPLEMENTATIONS) if world > 1 else 1
    assert min(ranks(world).run(judge_all, every, 3)) >= 37 * names // every


def exact(num_chunks: int) -> list[Tensor]:
    """Every op on integers with scales of powers of two, in all implementations: the same bits."""
    found = []
    with new_group(num_chunks) as group:
        for op in (*CUT, *DEALT):
            case = base_of(op, 2, "").but(integers=True, num_experts=5, top_k=3, dtype=FP32)
            results = [judge(case.but(implementation=name), group) for name in IMPLEMENTATIONS]
            for other in results[1:]:
                for now, before in zip(other, results[0], strict=True):
                    assert_bitwise_equal(now, before, f"{case}", either_zero=True)
            found += results[0]
    return found


def test_integers_have_the_same_bits_in_every_implementation_and_number_of_chunks(ranks: Pools) -> None:
    of_one, of_three = (ranks(2).run(exact, chunks) for chunks in (1, 3))
    for one, three in zip(of_one, of_three, strict=True):
        for before, now in zip(one, three, strict=True):
            assert_bitwise_equal(now, before, "3 chunks against 1", either_zero=True)


def sent_bytes() -> list[set[int]]:
    """Of each op, the bytes of a row that this rank sends beside the routing."""
    found = []
    with new_group(2) as group:
        for op in (GATHER, DISPATCH, SCATTER, COMBINE):
            case = base_of(op, 2, "chunked").but(num_experts=4, top_k=4, shape=(12, 60), dtype=FP32)
            judge(case, group)
            sent: set[int] = set()

            def spy(*arguments: Any, real: Any = exchange.exchange, sent: set[int] = sent) -> Any:
                sent.update(part.shape[1] * part.element_size() for _, part in arguments[3] if part.dim() == 2)
                return real(*arguments)

            with mock.patch.object(exchange, "exchange", spy), mock.patch.object(dealt, "exchange", spy):
                judge(case, group)
            found.append(sent - {4 * 8})  # 4 experts and weights of a token
    return found


def test_a_token_is_sent_as_bytes_with_its_scale_and_a_partial_in_the_dtype_of_the_result(ranks: Pools) -> None:
    assert ranks(2).run(sent_bytes) == [[{64}, {64}, {48}, {48}]] * 2


# --- faults that the judge must see -----------------------------------------------------------------------------------


def _of_the_first_expert(experts: ScaledExperts, expert: int, good: Any = ScaledExperts.__getitem__) -> Scaled:
    return Scaled(good(experts, expert).numbers, good(experts, 0).scale)


def _one_for_all_rows(experts: ScaledExperts, expert: int, good: Any = ScaledExperts.__getitem__) -> Scaled:
    found = good(experts, expert)
    return Scaled(found.numbers, found.scale[:, :1].expand_as(found.scale))


def _twice(x: Scaled, matrix: Scaled, out: Tensor, bias: Tensor | None = None, good: Any = fp8.multiply) -> None:
    good(Scaled(x.numbers, x.scale * x.scale), matrix, out, bias)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the first expert's scale for all": (ScaledExperts, "__getitem__", _of_the_first_expert),
    "one scale for all rows of an expert": (ScaledExperts, "__getitem__", _one_for_all_rows),
    "the scale of x twice": (fp8, "multiply", _twice),
}


def caught(fault: str | None) -> list[str]:
    """Which ops the judge finds wrong."""
    found = []
    owner, name, wrong = FAULTS[fault or "the scale of x twice"]
    with new_group(2) as group, mock.patch.object(owner, name, wrong) if fault else mock.patch.dict({}):
        for op in (*CUT, *DEALT):
            try:
                judge(base_of(op, 2, "chunked").but(sizes=(8, 8), num_experts=4, top_k=4), group)
            except BoundExceeded:
                found.append(op)
    return found


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_wrong_scales_are_caught(ranks: Pools, fault: str | None) -> None:
    assert ranks(2).run(caught, fault) == [[*CUT, *DEALT] if fault else []] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def ones(*shape: int) -> Tensor:
    return torch.ones(shape).to(F8)


ONE = torch.ones(())
GOOD: dict[str, Any] = {"scale_x": ONE, "scale_weight": ONE}
ROUTING = tpk.Routing(torch.tensor([[0, 2]] * 4), torch.full((4, 2), 0.5))


def gather(group: Any, x: Any = None, w: Any = None, routing: tpk.Routing = ROUTING, **options: Any) -> Any:
    x, w = ones(4, 8) if x is None else x, ones(3, 5, 8) if w is None else w
    return tpk.all_gather_grouped_matmul(x, w, routing, group, **{**GOOD, **options})


def reduce(group: Any, w: Any = None, **options: Any) -> Any:
    return tpk.grouped_matmul_all_reduce(
        ones(8, 5), ones(3, 6, 5) if w is None else w, ROUTING, group, **{**GOOD, **options}
    )


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no scales": (
        lambda g: tpk.all_gather_grouped_matmul(ones(4, 8), ones(3, 5, 8), ROUTING, g),
        r"x of torch.float8_e4m3fn needs scale_x and scale_weight",
    ),
    "no scale of h": (
        lambda g: reduce(g, scale_x=None),
        r"fp8 operands need scale_x and scale_weight, got no scale_x",
    ),
    "scales of fp32 operands": (
        lambda g: gather(g, torch.ones(4, 8), torch.ones(3, 5, 8)),
        r"go with x and weight of torch.float8_e4m3fn, got x of torch.float32",
    ),
    "weights of bf16": (
        lambda g: reduce(g, ones(3, 6, 5).bfloat16()),
        r"weights must have the dtype of x \(torch.float8_e4m3fn\), got torch.bfloat16",
    ),
    "scales per expert without its dimensions": (
        lambda g: gather(g, scale_weight=torch.ones(3)),
        r"scale_weight must have one element \(per tensor\) or shape \(3, 5, 1\) \(per row\) or \(3, 1, 1\) "
        r"\(per expert\), got \(3,\)",
    ),
    "scales of K": (
        lambda g: reduce(g, scale_weight=torch.ones(3, 1, 5)),
        r"scale_weight must have one element .*, got \(3, 1, 5\)",
    ),
    "scales of other tokens": (
        lambda g: gather(g, scale_x=torch.ones(8, 1)),
        r"scale_x must have one element \(per tensor\) or shape \(4, 1\) \(per row\), got \(8, 1\)",
    ),
    "scales of bf16": (
        lambda g: gather(g, scale_weight=torch.ones(3, 1, 1).bfloat16()),
        r"scale_weight must be torch.float32, got torch.bfloat16",
    ),
    "one scale for two weights": (
        lambda g: gather(g, w=[ones(3, 5, 8), ones(3, 5, 8)]),
        r"scale_weight must have one entry per weight \(2\), got 1",
    ),
    "a result in fp8": (
        lambda g: reduce(g, out_dtype=F8),
        r"out_dtype must be one of bfloat16, float16, float32, got torch.float8_e4m3fn",
    ),
    "a bias that is not like the result": (
        lambda g: reduce(g, bias=torch.ones(3, 6)),
        r"bias must have the dtype of the result \(out_dtype=torch.bfloat16\), got torch.float32",
    ),
    "a gradient of the routing": (
        lambda g: gather(g, routing=ROUTING._replace(weights=torch.ones(4, 2, requires_grad=True))),
        r"a call with fp8 operands has no gradient, but one of x, weights, bias, the routing's weights, scale_x and "
        r"scale_weight requires one: call it under torch.no_grad\(\), or quantise inside",
    ),
    "a gradient of a scale": (
        lambda g: reduce(g, scale_weight=torch.ones(3, 6, 1, requires_grad=True)),
        r"a call with fp8 operands has no gradient",
    ),
    "scales that are numbers": (lambda g: gather(g, scale_x=1.0), r"scale_x must be a tensor, got float"),
}  # fmt: skip


def refused() -> dict[str, tuple[BaseException | None, BaseException | None]]:
    """What both ranks raise that are wrong alike, after which the group works; and with rank 0 alone wrong."""
    found = {}
    for name, (bad, _) in BAD.items():
        good = gather if "gather" in bad.__code__.co_names else reduce
        with new_group() as group:
            alike = error_of(bad, group)
            assert torch.equal(reduce(group), torch.full((4, 6), 10.0).bfloat16()), name
        with new_group() as group:
            found[name] = alike, error_of(bad if dist.get_rank() == 0 else good, group)
    return found


def test_bad_arguments_are_refused_on_every_rank_and_the_group_works_on(ranks: Pools) -> None:
    of_wrong, of_peer = ranks(2).run(refused, timeout=120)
    for name, (_, pattern) in BAD.items():
        for error in (of_wrong[name][0], of_peer[name][0], of_wrong[name][1]):
            assert type(error) is ValueError, f"{name}: {error!r}"
            assert_matches(pattern, str(error))
        assert type(of_peer[name][1]) is GroupMismatch, f"{name}: {of_peer[name][1]!r}"
        assert_matches(pattern, str(of_peer[name][1]))


def others() -> list[str]:
    """Rank 1 has operands of bf16, then wants another dtype of the result; and what a copy and `explain` say."""
    said, rank = [], dist.get_rank()
    plain = {"scale_x": None, "scale_weight": None, "out_dtype": None}
    bf16: Any = {"x": torch.ones(4, 8).bfloat16(), "w": torch.ones(3, 5, 8).bfloat16(), **plain}
    for changes in (bf16, {"out_dtype": FP16}):
        with new_group(timeout=12.0) as group:
            said.append(str(error_of(lambda g, changes=changes: gather(g, **(changes if rank else {})), group)))
    with new_group(calibrate=True) as group:
        with pytest.raises(ValueError, match="needs scale_x and scale_weight"):
            tpk.copy_grouped_matmul(ones(4, 8), ones(3, 5, 8), ROUTING, group)
        wanted = {"m": 64, "n": 64, "k": 64, "experts": 4, "top_k": 2, "dtype": F8}
        said.append(str(tpk.explain(DISPATCH, **wanted, out_dtype=FP16, group=group)))
        judge(base_of(GATHER, 2, "auto"), group)
    return said


def test_ranks_that_differ_are_told_both_sides_and_explain_knows_fp8(ranks: Pools) -> None:
    for by_dtype, by_result, table in ranks(2).run(others):
        assert "bfloat16" in by_dtype and "routing" in by_dtype, by_dtype
        assert "float8_e4m3fn -> float16" in by_result and "float8_e4m3fn -> bfloat16" in by_result, by_result
        assert "float8_e4m3fn -> float16" in table and all(f"   {name} " in table for name in IMPLEMENTATIONS), table


def recorded() -> None:
    """What autograd records of a low-level op raises as well; under autocast fp8 operands stay what they are."""
    with new_group() as group:
        name = group.group_name
        w = ones(3, 6, 5).requires_grad_()
        with pytest.raises(RuntimeError, match="a call with fp8 operands has no gradient: quantise inside"):
            torch.ops.tpkernels.grouped_matmul_all_reduce(
                ones(8, 5), w, None, *ROUTING, ONE, [ONE], BF16, name, "unfused"
            )
        with torch.autocast("cpu", BF16):
            assert torch.equal(reduce(group, out_dtype=FP32), torch.full((4, 6), 10.0))


def test_a_recorded_call_raises_and_autocast_leaves_fp8_alone(ranks: Pools) -> None:
    ranks(2).run(recorded)


def block(x: Tensor, scale_x: Tensor, both: tuple[Tensor, Tensor], scales: list[Tensor], group: Any) -> list[Tensor]:
    """A gather, and a reduction of what it made, quantised again."""
    h, whole, *gathered = tpk.all_gather_grouped_matmul(
        x, both, ROUTING, group, scale_x=scale_x, scale_weight=scales, out_dtype=FP16, activation="swiglu",
        return_gathered=True, implementation="chunked",
    )  # fmt: skip
    numbers, scale = tpk.quantize_fp8(h, per="row")
    down = both[0].view(torch.uint8).transpose(1, 2).contiguous().view(F8)
    y = tpk.grouped_matmul_reduce_scatter(numbers, down, whole, group, scale_x=scale, scale_weight=scales[1])
    copied = tpk.copy_grouped_matmul(
        gathered[0], both[1], whole, group, scale_x=gathered[1], scale_weight=scales[1], out_dtype=FP32
    )
    return [h, y, copied, *gathered]


def compiled() -> int:
    with new_group(2) as group:
        made = [tpk.quantize_fp8(payload((3, 5, 8), rank=dist.get_rank(), name=name), per="matrix") for name in "ab"]
        x, scale_x = tpk.quantize_fp8(payload((4, 8), rank=dist.get_rank()), per="row")
        arguments: Any = (x, scale_x, (made[0][0], made[1][0]), [made[0][1], made[1][1]], group)
        torch._dynamo.reset()
        found = torch.compile(block, fullgraph=True, backend="aot_eager")(*arguments)
        for now, before in zip(found, block(*arguments), strict=True):
            assert now.stride() == before.stride()
            assert_bitwise_equal(now, before)
    return len(found)


@pytest.mark.full("seconds of compiling")
def test_compiled_graphs_give_the_bits_of_eager(ranks: Pools) -> None:
    assert ranks(2).run(compiled) == [5] * 2
