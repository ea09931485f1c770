"""The ops whose experts are dealt out over the ranks: values and gradients against fp64, edges of routing and cuts,
bits, bad input, ranks that differ.

The compiler's view of them is in test_compile.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS, Said, assert_peer_is_told, new_group, refused
from tpkernels.backends.point_to_point import dealt as point_to_point
from tpkernels.backends.shared_memory import implementations as shared_memory
from tpkernels.comm.groups import resolve
from tpkernels.errors import GroupMismatch
from tpkernels.gemm.dealt import DealtRows
from tpkernels.testing.dealt import COMBINE, DEALT, DISPATCH, DealtCase, call, judge, operands
from tpkernels.testing.faults import poisoned_memory
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = {1: (7,), 2: (9, 4), 3: (5, 0, 8), 4: (3, 1, 0, 6)}


def cases(world: int) -> list[DealtCase]:
    """Both ops at every option; sizes that do not divide, ranks without tokens, experts or either."""
    found = []
    for op in DEALT:
        base = DealtCase(op, SIZES[world])
        found += [
            base,
            base.but(
                dtype=FP64, routing_dtype=FP64, bias=True, num_experts=2 * world, implementation="unfused", call=1
            ),
            base.but(dtype=BF16, bias=True, load="one", top_k=3, implementation="shared_memory", call=2),
            base.but(dtype=FP16, routing_dtype=FP16, load="few", top_k=1, strided=True, call=3),
            base.but(routing_dtype=BF16, load="one", top_k=1, bias=True, implementation="unfused", call=4),
            base.but(sizes=(0,) * world, bias=True, call=5),
            base.but(shape=(1, 1), num_experts=2, load="one", implementation="shared_memory", call=6),
            base.but(shape=(33, 40), dealt=(0,) * (world - 1) + (5,), bias=True, implementation="auto", call=7),
            base.but(shape=(33, 40), dtype=BF16, num_experts=3, bias=True, top_k=3, call=8),
        ]
        if op == DISPATCH:
            found += [
                base.but(activation="swiglu", bias=True, call=9),
                base.but(activation="clamped_swiglu", dtype=BF16, shape=(6, 90), implementation="unfused", call=10),
                base.but(activation="gelu", dtype=FP64, bias=True, implementation="shared_memory", call=11),
            ]
    return found


def judge_all(num_chunks: int | None, every: int) -> int:
    world = dist.get_world_size()
    chosen = cases(world)[::every]
    with new_group(num_chunks) as group:
        for case in chosen:
            able = case.implementation in (*IMPLEMENTATIONS, "auto") and world > 1
            judge(case if able else case.but(implementation="unfused"), group)
    return len(chosen)


@pytest.mark.parametrize(("world", "num_chunks", "every"), [(1, None, 6), (2, None, 3), (3, 3, 2), (4, 2, 3)])
def test_values_and_gradients_are_within_the_bound(
    ranks: Pools, world: int, num_chunks: int, every: int, full: bool
) -> None:
    every = 1 if full else every
    assert min(ranks(world).run(judge_all, num_chunks, every)) == -(-21 // every)


def exact(num_chunks: int | None) -> list[list[torch.Tensor]]:
    """Both ops forward and backward on integers, whose sums are exact, in all implementations; shared memory in both
    of its ways."""
    found, one_gemm = [], mock.patch.object(shared_memory, "in_one_gemm", lambda problem, costs: num_chunks == 1)
    with new_group(num_chunks) as group, one_gemm:
        for op in DEALT:
            for dtype in (FP32, BF16):
                case = DealtCase(op, (11, 0, 4), dtype=dtype, integers=True, bias=True, num_experts=5, top_k=3)
                results = [judge(case.but(implementation=name), group) for name in IMPLEMENTATIONS]
                for other in results[1:]:
                    for now, before in zip(other, results[0], strict=True):
                        assert_bitwise_equal(now.detach(), before.detach(), f"{case}", either_zero=True)
                found.append([one.detach() for one in results[0]])
    return found


def test_integers_have_the_same_bits_in_every_implementation_and_number_of_chunks(ranks: Pools) -> None:
    of_one, of_four = (ranks(3).run(exact, chunks) for chunks in (1, 4))
    for one, four in zip(of_one, of_four, strict=True):
        for before, now in zip(one, four, strict=True):
            for a, b in zip(before, now, strict=True):
                assert_bitwise_equal(a, b, "4 chunks against 1", either_zero=True)


def again() -> None:
    """Calls of equal arguments give equal bits, also with a late peer, and NaN of earlier calls is gone."""
    with new_group(3) as group, poisoned_memory():
        for op in DEALT:
            for name in IMPLEMENTATIONS:
                case = DealtCase(op, (9, 4), dtype=BF16, bias=True, shape=(24, 40), implementation=name)
                parts, rank = operands(case), dist.get_rank()
                own = parts.own(case, rank)
                own[0].fill_(float("nan"))
                for _ in range(2):  # slots alternate
                    out = call(case, parts, own, group)[0]
                    assert bool(out.isnan().all())
                    out.fill_(float("nan"))
                first = judge(case, group)
                if rank == 1:
                    time.sleep(0.05)
                for now, before in zip(judge(case, group), first, strict=True):
                    assert_bitwise_equal(now.detach(), before.detach(), f"{case}, again")


def test_repeated_calls_give_the_same_bits_and_nothing_of_earlier_ones_is_left(ranks: Pools) -> None:
    ranks(2).run(again)


def seeded(fault: str) -> str:
    """The judge's error for an op with a fault in it."""
    sums, picks = point_to_point.sum_returned, DealtRows.__init__

    def of_other_tokens(self: DealtRows, *arguments: Any) -> None:
        picks(self, *arguments)
        self.picks = [one.flip(0) for one in self.picks]

    faults: dict[str, tuple[Any, str, Any, str]] = {
        "own part twice": (
            point_to_point, "sum_returned", lambda call, parts: sums(call, [next(iter(parts))] * 2), COMBINE,
        ),
        "other tokens": (DealtRows, "__init__", of_other_tokens, DISPATCH),
    }  # fmt: skip
    where, name, wrong, op = faults[fault]
    case = DealtCase(op, (8, 8), implementation="unfused", num_experts=4, top_k=4)  # all tokens go everywhere
    with new_group() as group, mock.patch.object(where, name, wrong):
        try:
            judge(case, group, backward=False)
        except AssertionError as error:
            return str(error)
    return "not caught"


@pytest.mark.parametrize("fault", ["own part twice", "other tokens"])
def test_a_seeded_fault_is_caught(ranks: Pools, fault: str) -> None:
    for said in ranks(2).run(seeded, fault):
        assert "exceed the bound" in said


def refusals() -> list[Said]:
    """What rank 0 passes wrong, and what both ranks raise."""
    x, w = torch.ones(4, 8), torch.ones(3, 5, 8)
    good = tpk.Routing(torch.tensor([[0, 5]] * 4), torch.full((4, 2), 0.5))
    whole = tpk.Routing(good.experts.repeat(2, 1), good.weights.repeat(2, 1))
    h, down = torch.ones(8, 5), torch.ones(3, 8, 5)

    def dispatch(group: Any, x: Any = x, w: Any = w, routing: Any = good, **options: Any) -> Any:
        return tpk.dispatch_grouped_matmul(x, w, routing, group, **options)

    def combine(group: Any, h: Any = h, w: Any = down, routing: Any = whole, **options: Any) -> Any:
        return tpk.grouped_matmul_combine(h, w, routing, group, **options)

    wrong: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (dispatch, {"routing": good._replace(experts=good.experts + 1)}),
        (dispatch, {"routing": good._replace(experts=good.experts[:3])}),
        (dispatch, {"expert_sizes": [3]}),
        (dispatch, {"expert_sizes": [4, 2]}),
        (dispatch, {"expert_sizes": [3, -3]}),
        (dispatch, {"w": w[:0]}),
        (dispatch, {"w": torch.ones(3, 5, 7)}),
        (dispatch, {"activation": "swiglu"}),
        (dispatch, {"shard_sizes": [3, 5]}),
        (dispatch, {"implementation": "symmetrical"}),
        (combine, {"h": h[:7]}),
        (combine, {"bias": torch.ones(6, 8)}),
        (combine, {"shard_sizes": [4, 5]}),
        (combine, {"routing": good}),
    ]
    return refused(wrong, lambda group: torch.equal(combine(group), torch.full((4, 8), 5.0)))


def test_bad_input_raises_on_every_rank(ranks: Pools) -> None:
    by_rank = ranks(2).run(refusals, timeout=120)
    assert_peer_is_told(by_rank, 14)
    assert "expert_sizes[0] must be the number of this rank's experts (3), got expert_sizes=[4, 2]" in by_rank[0][3][1]


def other_routings() -> list[str]:
    """Ranks whose messages would have other sizes, or sums of other tokens."""
    rank, said = dist.get_rank(), []
    for name in IMPLEMENTATIONS:
        case = DealtCase(COMBINE, (9, 4), implementation=name)
        parts = operands(case)
        own = parts.own(case, rank)
        swapped = parts._replace(experts=parts.experts.flip(1))
        for changes in (swapped, parts):
            with new_group() as group:
                call(case, parts, own, group)
                if rank == 1 and changes is parts:
                    own[1][5] += 2**-20
                with pytest.raises(GroupMismatch) as caught:
                    call(case, changes if rank == 1 else parts, own, group)
            said.append(str(caught.value))
    return said


def test_ranks_with_other_routings_are_told(ranks: Pools) -> None:
    for said in ranks(2).run(other_routings, timeout=120):
        assert len(said) == 2 * len(IMPLEMENTATIONS)
        assert all(one.count("with the routing #") >= 2 for one in said), said


def sent_rows() -> list[int]:
    """What each rank sends, in rows: a token once to a rank, whatever number of its experts are there."""
    from tpkernels.comm import transport

    counts = []
    with new_group() as group:
        for op in DEALT:
            case = DealtCase(op, (6, 6), num_experts=4, top_k=4, implementation="unfused")
            parts, rank = operands(case), dist.get_rank()
            own = parts.own(case, rank)
            call(case, parts, own, group)
            with mock.patch.object(point_to_point, "exchange", wraps=transport.exchange) as exchange:
                call(case, parts, own, group)
            counts.append(sum(len(tensor) for one in exchange.mock_calls for _, tensor in one.args[3]))
    return counts


def test_a_token_is_sent_once_to_a_rank(ranks: Pools) -> None:
    assert ranks(2).run(sent_rows) == [[6, 6], [6, 6]]


def explained() -> list[tuple[Any, Any]]:
    """What `explain` says, and what a call has agreed on."""
    found = []
    with new_group(calibrate=True) as group:
        for op in DEALT:
            said = tpk.explain(op, m=12, n=6, k=8, experts=5, top_k=2, dtype=FP32, group=group)
            judge(DealtCase(op, (6, 6), implementation="auto"), group, backward=False)
            agreed: dict[Any, Any] = resolve(group).agreed
            found.append((said, next(plan.explanation for one, plan in agreed.items() if one.op == op)))
    return found


def test_explain_says_what_a_call_runs(ranks: Pools) -> None:
    for found in ranks(2).run(explained, timeout=120):
        for said, agreed in found:
            assert said == agreed and "experts=5 top_k=2" in str(said)
            assert all(f"   {name} " in str(said) for name in IMPLEMENTATIONS), said
