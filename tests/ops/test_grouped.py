"""The grouped ops (mixture of experts): values and gradients against fp64, edges of the routing, bits, bad input.

The compiler's view of them is in test_compile.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS, Said, assert_peer_is_told, new_group, refused
from tpkernels import dispatch
from tpkernels.backends import grouped_gemms
from tpkernels.backends.point_to_point import grouped as point_to_point
from tpkernels.backends.shared_memory import implementations as shared_memory
from tpkernels.comm.groups import resolve
from tpkernels.dispatch import Implementation
from tpkernels.errors import GroupMismatch, UnsupportedProblem
from tpkernels.gemm import few_rows
from tpkernels.gemm.grouped import TokenRows, are_few
from tpkernels.gemm.native import why_not
from tpkernels.testing.faults import poisoned_memory
from tpkernels.testing.grouped import (
    COPY,
    GATHER,
    GROUPED,
    REDUCE,
    SCATTER,
    GroupedCase,
    call,
    judge,
    operands,
)
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = {1: (7,), 2: (9, 4), 3: (5, 0, 8), 4: (3, 1, 0, 6)}


def cases(world: int) -> list[GroupedCase]:
    """Every op at every option; sizes that do not divide, ranks without tokens."""
    found = []
    for op in GROUPED:
        base = GroupedCase(op, SIZES[world])
        found += [
            base,
            base.but(dtype=FP64, routing_dtype=FP64, bias=True, own=True, implementation="unfused", call=1),
            base.but(dtype=BF16, bias=True, load="one", num_experts=5, top_k=3, call=2),
            base.but(dtype=FP16, routing_dtype=FP16, load="few", top_k=1, strided=True, call=3),
            base.but(routing_dtype=BF16, load="one", top_k=1, bias=True, implementation="unfused", call=4),
            base.but(sizes=(0,) * world, bias=True, call=5),
            base.but(shape=(1, 1), num_experts=1, top_k=1, implementation="unfused", call=6),
            base.but(shape=(33, 40), num_experts=3, bias=True, implementation="auto", call=7),
        ]
        if op in (GATHER, COPY):
            found += [
                base.but(activation="swiglu", bias=True, call=8),
                base.but(activation="geglu", dtype=BF16, own=True, implementation="unfused", call=9),
                base.but(activation="gelu", dtype=FP64, own=True, bias=True, call=10),
                base.but(activation="clamped_swiglu", shape=(6, 90), dtype=BF16, bias=True, call=14),
            ]
        if op == GATHER:
            found += [
                base.but(return_gathered=True, call=11),
                base.but(save_gathered=True, activation="silu", bias=True, implementation="unfused", call=12),
                base.but(return_gathered=True, dtype=BF16, activation="swiglu", strided=True, call=13),
            ]
    return found


def judge_all(num_chunks: int | None, every: int) -> int:
    chosen = cases(dist.get_world_size())[::every]
    with new_group(num_chunks) as group:
        for case in chosen:
            judge(case, group)
    return len(chosen)


@pytest.mark.parametrize(("world", "num_chunks", "every"), [(1, None, 6), (2, None, 3), (3, 3, 2), (4, 2, 6)])
def test_values_and_gradients_are_within_the_bound(
    ranks: Pools, world: int, num_chunks: int, every: int, full: bool
) -> None:
    every = 1 if full else every
    assert min(ranks(world).run(judge_all, num_chunks, every)) == -(-43 // every)


def judge_in_shared_memory() -> int:
    """Both ways of the gather, both of a large sum."""
    sizes, count = SIZES[dist.get_world_size()], 0
    for in_one, in_one_step in ((True, 0), (False, 1 << 20)):
        with (
            mock.patch.object(shared_memory, "in_one_gemm", lambda problem, costs, one=in_one: one),
            mock.patch.object(shared_memory, "ONE_SHOT_BYTES", in_one_step),
            new_group() as group,
        ):
            for op in GROUPED:
                base = GroupedCase(op, sizes, implementation="shared_memory", shape=(9, 16))
                cases = [base.but(bias=True, load="one"), base.but(dtype=BF16), base.but(sizes=(0,) * len(sizes))]
                if op == GATHER:
                    cases.append(base.but(activation="swiglu", return_gathered=True, bias=True))
                for case in cases:
                    judge(case, group)
                    count += 1
    return count


@pytest.mark.sample(1)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("world", [3, 2])
@pytest.mark.slow("2 s")
def test_every_way_through_shared_memory_is_within_the_bound(ranks: Pools, world: int) -> None:
    assert min(ranks(world).run(judge_in_shared_memory)) == 26


def judge_few_rows() -> list[tuple[set[int], int]]:
    """Every op by the compiled kernel, judged: what it was measured for, and how many rows it has multiplied."""
    found, of_experts, kernel = [], few_rows.of_experts, mock.Mock()

    def counted(*given: Any) -> Callable[..., None] | None:
        multiplies = of_experts(*given)
        kernel.side_effect = multiplies
        return None if multiplies is None else kernel

    with (
        mock.patch.object(few_rows, "wins_in_blocks", return_value=True) as wins,
        mock.patch.object(few_rows, "of_experts", counted),
        mock.patch.object(few_rows.native(), "MAX_FEW_ROWS", 32),
        new_group(2) as group,
    ):
        for number, op in enumerate(GROUPED):
            for name in IMPLEMENTATIONS:
                dtype = (FP32, BF16)[(number + len(found)) % 2]
                case = GroupedCase(
                    op, (30, 9), (65, 256), dtype=dtype, bias=True, num_experts=5, load="one", implementation=name
                )
                judge(case, group)
                rows = sum(call.args[1].shape[0] for call in kernel.mock_calls)
                found.append(({call.args[0] for call in wins.mock_calls}, rows))
                wins.reset_mock()
                kernel.reset_mock()
    return found


@pytest.mark.skipif(not few_rows.serves(4, 130, 256, FP32), reason="no compiled kernel for few rows")
def test_rows_of_experts_take_the_compiled_kernel_where_it_wins(ranks: Pools) -> None:
    """One expert has more rows than the kernel takes at once.  In the backward pass it takes none: weights do not lie
    by the rows of what is summed."""
    for found in ranks(2).run(judge_few_rows):
        assert found == [({-(-78 // 5)}, 78)] * (len(GROUPED) * len(IMPLEMENTATIONS))


@pytest.mark.cpu
def test_experts_without_rows_do_not_count_in_the_mean() -> None:
    rows = TokenRows(torch.tensor([[1, 3], [1, 3], [1, 0]]), 64)
    matrices = torch.ones(64, 40, 8).transpose(1, 2)
    with mock.patch.object(few_rows, "wins_in_blocks", return_value=True) as wins:
        assert are_few(torch.ones(6, 8), matrices, rows)
        assert not are_few(torch.ones(6, 40), matrices.transpose(1, 2), rows), "its contraction does not lie by rows"
    wins.assert_called_once_with(2, 40, 8, FP32)


def exact(num_chunks: int | None) -> list[list[torch.Tensor]]:
    """Every op forward and backward on integers, whose sums are exact, in all implementations."""
    found = []
    with new_group(num_chunks) as group:
        for op in GROUPED:
            for dtype in (FP32, BF16):
                case = GroupedCase(
                    op, (11, 0, 4), dtype=dtype, integers=True, bias=True, activation=None, num_experts=5, top_k=3
                )
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


def twice() -> None:
    """Calls of equal arguments give equal bits, in real numbers, and a slow peer changes none."""
    with new_group(3) as group:
        for op in GROUPED:
            case = GroupedCase(op, (9, 4), dtype=BF16, bias=True, shape=(24, 40))
            first = judge(case, group)
            if dist.get_rank() == 1:
                time.sleep(0.05)
            for now, before in zip(judge(case, group), first, strict=True):
                assert_bitwise_equal(now.detach(), before.detach(), f"{case}, again")


def test_repeated_calls_and_late_ranks_give_the_same_bits(ranks: Pools) -> None:
    ranks(2).run(twice)


def after_poison() -> None:
    """NaN in the calls before, in all buffers and in the outputs that the caller owns, reaches no later call."""
    with new_group(2) as group, poisoned_memory():
        for op in GROUPED:
            for name in IMPLEMENTATIONS:
                case = GroupedCase(op, (9, 4), dtype=BF16, bias=True, implementation=name, shape=(24, 40))
                parts, rank = operands(case), dist.get_rank()
                own = parts.own(case, rank)
                own[0].fill_(float("nan"))
                for _ in range(2):  # slots alternate
                    (out, *rest) = call(case, parts, own, group)
                    assert bool(out.isnan().all())
                    for one in (out, *(one for one in rest if one.is_floating_point())):
                        one.fill_(float("nan"))
                for turn in range(2):
                    judge(case.but(call=turn), group)


def test_nothing_of_an_earlier_call_is_left(ranks: Pools) -> None:
    ranks(2).run(after_poison)


def seeded(fault: str) -> str:
    """The judge's error for an op with a fault in it."""
    sums, rows = grouped_gemms.partial_tokens, TokenRows.of_slots

    def unweighted(call: Any, *rest: Any) -> None:
        sums(replace(call, weights=None), *rest)

    faults: dict[str, tuple[Any, Any, Any, str]] = {
        "unweighted": (point_to_point, "partial_tokens", unweighted, SCATTER),
        "weights of other rows": (TokenRows, "of_slots", lambda self, v: rows(self, v.flip(0)), SCATTER),
        "no order": (torch.Tensor, "argsort", lambda x, stable: torch.arange(len(x)), GATHER),
    }
    where, name, wrong, op = faults[fault]
    with new_group() as group, mock.patch.object(where, name, wrong):
        try:
            judge(GroupedCase(op, (9, 4), implementation="unfused"), group, backward=False)
        except AssertionError as error:
            return str(error)
    return "not caught"


@pytest.mark.parametrize("fault", ["unweighted", "weights of other rows", "no order"])
def test_a_seeded_fault_is_caught(ranks: Pools, fault: str) -> None:
    for said in ranks(2).run(seeded, fault):
        assert "exceed the bound" in said


def refusals() -> list[Said]:
    """What rank 0 passes wrong, and what both ranks raise; after each the group works."""
    x, w = torch.ones(4, 8), torch.ones(3, 5, 8)
    good = tpk.Routing(torch.tensor([[0, 2]] * 4), torch.full((4, 2), 0.5))
    whole = tpk.Routing(good.experts.repeat(2, 1), good.weights.repeat(2, 1))
    h, down = torch.ones(16, 5), torch.ones(3, 8, 5)
    dtensor = DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])

    def gather(group: Any, x: Any = x, w: Any = w, routing: Any = good, **options: Any) -> Any:
        return tpk.all_gather_grouped_matmul(x, w, routing, group, **options)

    def scatter(group: Any, h: Any = h, w: Any = down, routing: Any = whole, **options: Any) -> Any:
        return tpk.grouped_matmul_reduce_scatter(h, w, routing, group, **options)

    def reduce(group: Any, h: Any = h, w: Any = down, routing: Any = whole, **options: Any) -> Any:
        return tpk.grouped_matmul_all_reduce(h, w, routing, group, **options)

    wrong: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (gather, {"routing": good._replace(experts=good.experts + 1)}),
        (gather, {"routing": good._replace(experts=good.experts - 1)}),
        (gather, {"routing": good._replace(experts=good.experts.int())}),
        (gather, {"routing": good._replace(experts=good.experts[:3])}),
        (gather, {"routing": good._replace(experts=good.experts.flatten())}),
        (gather, {"routing": good._replace(weights=good.weights[:, :1])}),
        (gather, {"routing": good._replace(weights=good.weights.long())}),
        (gather, {"routing": good.experts}),
        (gather, {"x": x.view(2, 2, 8)}),
        (gather, {"x": dtensor}),
        (gather, {"w": torch.ones(5, 8)}),
        (gather, {"w": torch.ones(3, 5, 7)}),
        (gather, {"w": torch.ones(0, 5, 8)}),
        (gather, {"w": w.double()}),
        (gather, {"w": [w, torch.ones(2, 5, 8)]}),
        (gather, {"w": []}),
        (gather, {"bias": torch.ones(5)}),
        (gather, {"activation": "swiglu"}),
        (gather, {"activation": "tanh"}),
        (gather, {"shard_sizes": [3, 5]}),
        (gather, {"implementation": "symmetrical"}),
        (scatter, {"h": h[:15]}),
        (scatter, {"h": h.view(8, 2, 5)}),
        (scatter, {"w": down[:, :, :4]}),
        (scatter, {"bias": torch.ones(3, 5)}),
        (scatter, {"shard_sizes": [4, 5]}),
        (scatter, {"routing": good}),
        (scatter, {"routing": whole._replace(experts=whole.experts + 1)}),
        (reduce, {"h": h.long()}),
        (reduce, {"routing": whole._replace(experts=whole.experts - 1)}),
    ]
    return refused(wrong, lambda group: torch.equal(reduce(group), torch.full((8, 8), 10.0)))


def test_bad_input_raises_on_every_rank(ranks: Pools) -> None:
    by_rank = ranks(2).run(refusals, timeout=120)
    assert_peer_is_told(by_rank, 30)
    assert "routing.experts must be from 0 to 2, got values from 1 to 3" in by_rank[0][0][1]


def copy_refusals() -> None:
    """Nothing is sent, so that each rank is told by itself."""
    with new_group() as group:
        routing = tpk.Routing(torch.tensor([[0], [3]]), torch.ones(2, 1))
        with pytest.raises(ValueError, match=r"from 0 to 2, got values from 0 to 3"):
            tpk.copy_grouped_matmul(torch.ones(2, 8), torch.ones(3, 5, 8), routing, group)
        with pytest.raises(ValueError, match=r"a row per token \(3\)"):
            tpk.copy_grouped_matmul(torch.ones(3, 8), torch.ones(3, 5, 8), routing, group)
        with pytest.raises(ValueError, match=r"x must be \[tokens, K\]"):
            tpk.copy_grouped_matmul(torch.ones(2, 1, 8), torch.ones(3, 5, 8), routing, group)


def test_bad_input_of_an_op_that_sends_nothing_raises_here(ranks: Pools) -> None:
    ranks(2).run(copy_refusals)


def disagreements() -> list[str]:
    """Ranks whose calls differ in what each of them finds right."""
    rank, said = dist.get_rank(), []
    x, w = torch.ones(4, 8), torch.ones(3 + rank, 5, 8)
    for top_k, weight in ((1 + rank, w[:3]), (1, w)):
        routing = tpk.Routing(torch.arange(4 * top_k).view(4, top_k) % 3, torch.ones(4, top_k))
        with new_group() as group, pytest.raises(GroupMismatch) as caught:
            tpk.all_gather_grouped_matmul(x, weight, routing, group)
        said.append(str(caught.value))
    return said


def other_routings() -> list[str]:
    """What a call says whose ranks have other experts, or other weights, in a new group and after a good call."""
    rank, said = dist.get_rank(), []
    for op in (SCATTER, REDUCE):
        for name in IMPLEMENTATIONS:
            case = GroupedCase(op, (9, 4), implementation=name)
            for known, field in ((False, "experts"), (True, "experts"), (True, "routing_weights")):
                parts = operands(case)
                own = parts.own(case, rank)
                with new_group() as group:
                    if known:
                        call(case, parts, own, group)
                    if rank == 1 and field == "experts":
                        parts = parts._replace(experts=parts.experts.flip(1))
                    elif rank == 1:
                        own[1][5] += 2**-20
                    with pytest.raises(GroupMismatch) as caught:
                        call(case, parts, own, group)
                said.append(str(caught.value))
    return said


def test_ranks_with_other_routings_are_told(ranks: Pools) -> None:
    """Nobody returns the sum of what ranks have computed for other experts."""
    for said in ranks(2).run(other_routings, timeout=120):
        assert len(said) == 6 * len(IMPLEMENTATIONS)
        assert all(one.count("with the routing #") >= 2 for one in said), said


def test_ranks_with_other_numbers_of_experts_are_told(ranks: Pools) -> None:
    for by_top_k, by_experts in ranks(2).run(disagreements):
        assert "routing to 1 of 3 experts" in by_top_k and "routing to 2 of 3 experts" in by_top_k
        assert "of 3 experts" in by_experts and "of 4 experts" in by_experts


def explained() -> list[tuple[str, str, str]]:
    """What `explain` says and what a call chose; a forced name that cannot run leaves a group that goes on."""
    found = []
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(calibrate=True) as group:
        for op in (GATHER, SCATTER, REDUCE):
            sizes = {"m": 12, "n": 6 * world if op == GATHER else 6, "k": 8 if op == GATHER else 8 * world}
            said = tpk.explain(op, **sizes, experts=4, top_k=2, dtype=FP32, group=group)
            judge(GroupedCase(op, (12 // world,) * world, implementation="auto"), group, backward=False)
            agreed = next(plan for one, plan in reversed(resolve(group).agreed.items()) if one.op == op)
            assert said == agreed.explanation
            found.append((str(said), said.chosen, agreed.implementation.name))
        for wrong in ({}, {"experts": 4}, {"experts": 0, "top_k": 2}):
            with pytest.raises(ValueError, match="must be at least 1"):
                tpk.explain(GATHER, m=8, n=8, k=8, dtype=FP32, group=group, **wrong)
        with pytest.raises(ValueError, match="experts and top_k are for"):
            tpk.explain("all_gather", m=8, n=8, k=8, dtype=FP32, group=group, experts=2, top_k=1)
        refusing = Implementation("seeded", GATHER, lambda p: "needs an anvil", lambda p, c: 0.0, lambda c, a: None)
        dispatch.register(refusing)
        try:
            x, routing = payload((3, 8), rank=rank), tpk.Routing(torch.zeros(3, 1).long(), torch.ones(3, 1))
            for _ in range(2):
                with pytest.raises(UnsupportedProblem, match="seeded: needs an anvil"):
                    tpk.all_gather_grouped_matmul(x, torch.ones(2, 5, 8), routing, group, implementation="seeded")
            judge(GroupedCase(GATHER, (3,) * world), group)
            assert not resolve(group).started
        finally:
            del dispatch._registry[GATHER, "seeded"]
    return found


def test_explain_says_what_a_call_runs(ranks: Pools) -> None:
    for found in ranks(2).run(explained, timeout=120):
        for text, said, chosen in found:
            assert said == chosen
            assert "experts=4 top_k=2" in text
            assert all(f"   {name} " in text for name in IMPLEMENTATIONS), text
