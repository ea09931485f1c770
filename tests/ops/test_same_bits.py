"""`same_bits=8`: one, two, four and eight ranks give the same bits, by every implementation and chunk count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.ops.same_bits import (
    FAULTS,
    SAME_BITS,
    Draw,
    Result,
    assert_same,
    calls_of,
    cut_call,
    draw,
    run_all,
    scales_of,
    together,
)
from tests.ops.support import IMPLEMENTATIONS, new_group, run_and_check
from tpkernels.comm.groups import resolve
from tpkernels.errors import GroupMismatch, UnsupportedProblem
from tpkernels.gemm import canonical, fp8, gaps
from tpkernels.testing.cases import COPY, FUSED, GATHER, REDUCE, SCATTER, Case
from tpkernels.testing.expected import (
    expected_all_gather_matmul,
    expected_gated_matmul,
    expected_matmul_all_reduce,
)
from tpkernels.testing.fp8_operands import Fp8
from tpkernels.testing.spawn import Pools

# fp8: rows and features gathered, products of many blocks added and scattered; each kind of scale and of results.
SCALED = [
    Draw(GATHER, (130,), (12, 5), 17, 0, fp8.DTYPE, True, None, False, 7),
    Draw(GATHER, (2, 45), (16, 16), 9, 2, fp8.DTYPE, False, "swiglu", False, 12),
    Draw(SCATTER, (300,), (16,), 17, 0, fp8.DTYPE, True, None, True, 9),
    Draw(REDUCE, (2, 45), (5,), 48, 0, fp8.DTYPE, True, None, False, 8),
]
CHUNKS = {"unfused": None, "chunked": 3, "shared_memory": None}
Alone = tuple[list[Draw], list[list[Result]]]


@pytest.fixture(scope="module")
def alone(ranks: Pools, full: bool) -> Alone:
    """Calls, and what one rank gives for them."""
    draws = [*SCALED, *(draw(seed) for seed in range(10_000 if full else 12))]
    (results,) = ranks(1).run(run_all, draws, "unfused", None, timeout=3600.0 if full else 120.0)
    return draws, results


def compare(of_one: Sequence[Result], of_ranks: Sequence[Sequence[Result]], what: str) -> None:
    for place, (name, _, expected) in enumerate(of_one):
        found_name, found = together([results[place] for results in of_ranks])
        assert found_name == name
        assert_same(found, expected, f"{name} of {what}")


def compare_all(ranks: Pools, world: int, implementation: str, alone: Alone, count: int) -> None:
    draws, expected = alone[0][:count], alone[1][:count]
    found = ranks(world).run(run_all, draws, implementation, CHUNKS[implementation], timeout=60.0 + 2 * count)
    for i, of in enumerate(draws):
        compare(expected[i], [results[i] for results in found], f"{of}, {implementation} on {world} ranks")


@pytest.mark.sample(3)
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world", "implementation"), [*((4, name) for name in IMPLEMENTATIONS), *((2, name) for name in IMPLEMENTATIONS)]
)
def test_every_op_gives_the_bits_of_one_rank(ranks: Pools, alone: Alone, world: int, implementation: str) -> None:
    compare_all(ranks, world, implementation, alone, len(alone[0]))


@pytest.mark.gloo
@pytest.mark.full("eight processes take ten CPU seconds to start; four ranks stand for them")
def test_eight_ranks_give_the_bits_of_one(ranks: Pools, alone: Alone) -> None:
    for implementation in IMPLEMENTATIONS:
        compare_all(ranks, SAME_BITS, implementation, alone, 300)


# In these each fault shows on the library that was measured: many rows, sums of many blocks, strides of one row.
REVEALING = [
    Draw(SCATTER, (300,), (16,), 17, 0, torch.float32, True, None, False, 1),
    Draw(REDUCE, (2, 45), (5,), 48, 0, torch.float32, False, None, False, 2),
    Draw(GATHER, (513,), (12, 5), 48, 0, torch.float32, True, None, False, 3),
    Draw(COPY, (130,), (3,), 32, 0, torch.float64, True, "silu", False, 4),
    *SCALED[1:3],
]


ARITHMETIC = ("tree order", "a rank scales the sum of its blocks")
"""Faults that leave the library's calls as they are."""


@pytest.mark.gloo
@pytest.mark.parametrize("fault", [*ARITHMETIC, "a rank sums its part of K in one call", "chunk rows"])
def test_a_seeded_fault_changes_bits(ranks: Pools, fault: str) -> None:
    (expected,) = ranks(1).run(run_all, REVEALING, "unfused", None)
    found = ranks(4).run(run_all, REVEALING, "chunked", 3, fault)
    with pytest.raises(AssertionError, match="elements differ"):
        for i, of in enumerate(REVEALING):
            compare(expected[i], [results[i] for results in found], str(of))


@pytest.mark.gloo
def test_the_library_is_called_with_the_same_sizes_strides_and_alignment(ranks: Pools) -> None:
    """Whatever kernel it picks, it picks the same; faults that this library forgives show here."""
    (expected,) = ranks(1).run(calls_of, REVEALING, "unfused")

    def differ(fault: str | None) -> bool:
        found = ranks(4).run(calls_of, REVEALING, "unfused", fault)
        return any(not same_calls(expected[i], [of_rank[i] for of_rank in found]) for i in range(len(REVEALING)))

    assert not differ(None)
    for fault in FAULTS:
        assert fault in ARITHMETIC or differ(fault), fault


def same_calls(of_one: Counter[str], of_ranks: Sequence[Counter[str]]) -> bool:
    """Each rank makes its fourth of the calls of one rank, of every kind."""
    return bool(of_one) and all(Counter({call: 4 * n for call, n in one.items()}) == of_one for one in of_ranks)


@pytest.mark.gloo
def test_explain_says_how_many_calls_the_library_gets(ranks: Pools) -> None:
    for world in (1, 2):
        ranks(world).run(check_explained)


def check_explained() -> None:
    m, n, k, world = 520, 1040, 64, dist.get_world_size()
    with new_group(None) as group, pytest.MonkeyPatch.context() as patch:
        resolve(group).keep_same_bits(SAME_BITS)
        calls = Counter[str]()
        right = torch.mm

        def counted(x: torch.Tensor, w: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
            calls[f"{x.shape[0]}x{x.shape[1]}x{w.shape[1]}"] += 1
            return right(x, w, **options)

        patch.setattr(torch, "mm", counted)
        patch.setattr(gaps, "keeps_bits", lambda *_: False)  # which makes calls of its own, once
        for op, largest in ((GATHER, "512x64x130"), (REDUCE, "512x8x512")):
            calls.clear()
            if op == GATHER:
                rows = m // world
                tpk.all_gather_matmul(torch.ones(rows, k), torch.ones(n // world, k), group)
            else:
                tpk.matmul_all_reduce(torch.ones(m, k // world), torch.ones(n, k // world), group)
            check_said(calls, largest, str(tpk.explain(op, m=m, n=n, k=k, dtype=torch.float32, group=group)))
        m, k, experts = 16, 24, torch.arange(16)[:, None] % 4  # four rows for each expert
        for op, largest in (("all_gather_grouped_matmul", "4x24x130"), ("grouped_matmul_all_reduce", "4x3x1040")):
            calls.clear()
            if op == "all_gather_grouped_matmul":
                own = tpk.Routing(*(tpk.array_split(one, world)[dist.get_rank()] for one in (experts, experts / 4)))
                tpk.all_gather_grouped_matmul(torch.ones(m // world, k), torch.ones(4, n // world, k), own, group)
            else:
                weight = torch.ones(4, n, k // world)
                tpk.grouped_matmul_all_reduce(
                    torch.ones(m, k // world), weight, tpk.Routing(experts, experts / 4), group
                )
            sizes: Any = {"m": m, "n": n, "k": k, "experts": 4, "top_k": 1}
            check_said(calls, largest, str(tpk.explain(op, **sizes, dtype=torch.float32, group=group)))


def check_said(calls: Counter[str], largest: str, said: str) -> None:
    assert f", {calls.total()} library calls of at most {largest}" in said, (calls, said)
    assert calls[largest], calls


@pytest.mark.gloo
def test_values_are_right(ranks: Pools) -> None:
    ranks(2).run(check_values_of_all)


def check_values_of_all() -> None:
    """Every op against fp64, and integers exactly."""
    cases = [
        Case(op, (300, 48), ns=(24,), bias=True, dtype=dtype, integers=dtype not in (torch.float32, torch.float64))
        for op in FUSED
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]
    cases += [Case(GATHER, (40, 32), ns=(16, 16), activation="swiglu"), Case(SCATTER, (3, 20, 32), ns=(16,), dim=1)]
    with new_group(3) as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for name in IMPLEMENTATIONS:
            for case in cases:
                run_and_check(case.but(implementation=name), group)


@pytest.mark.gloo
def test_values_of_fp8_are_right(alone: Alone) -> None:
    """Those of one rank, whose bits the others have."""
    draws = [(of, results) for of, results in zip(*alone, strict=True) if of.is_fp8]
    assert len(draws) >= len(SCALED)
    for of, results in draws:
        check_fp8(of, results)


def check_fp8(of: Draw, results: Sequence[Result]) -> None:
    """``results`` of one rank against fp64."""
    call = cut_call(of, 0, 1)
    _, scales = scales_of(of, 0, 1)
    x = Fp8(call.x, call.options["scale_x"]).bounded("cpu")
    ws = [Fp8(w, scale).bounded("cpu") for w, scale in zip(call.weights, scales, strict=True)]
    of_gather: Any = {"dtype": of.out_dtype, "activation": of.activation, "input_rounded": False}
    if of.activation in ("swiglu", "geglu"):
        bounds = [expected_gated_matmul(x, ws, biases=call.biases, **of_gather)]
    elif of.op == GATHER:
        pairs = zip(ws, call.biases, strict=True)
        bounds = [expected_all_gather_matmul(x, w, bias=bias, **of_gather) for w, bias in pairs]
    else:
        bounds = [expected_matmul_all_reduce([x], ws, bias=call.biases[0], dtype=of.out_dtype)]
    for bound, (_, _, y) in zip(bounds, results, strict=True):
        bound.check(y, str(of))


@pytest.mark.gloo
def test_scales_of_a_contraction_that_is_cut_must_be_equal(ranks: Pools) -> None:
    for said in ranks(2).run(other_scales):
        assert all(one.count("with scales, which same_bits needs equal on all ranks, #") >= 2 for one in said), said


def other_scales() -> list[str]:
    numbers, weight, said = torch.ones(4, 8).to(fp8.DTYPE), torch.ones(8, 8).to(fp8.DTYPE), []
    fp8_of: Any = {"scale_x": torch.tensor(1.0 + dist.get_rank()), "scale_weight": torch.ones(8, 1)}
    for call in (
        lambda group: tpk.matmul_reduce_scatter(numbers, weight, group, implementation="chunked", **fp8_of),
        lambda group: tpk.matmul_all_reduce(numbers, weight, group, implementation="shared_memory", **fp8_of),
        lambda group: tpk.all_gather_matmul(
            numbers[:, :4], weight, group, gather_dim=-1, implementation="unfused", **fp8_of
        ),
    ):
        with new_group() as group:
            resolve(group).keep_same_bits(SAME_BITS)
            with pytest.raises(GroupMismatch) as caught:
                call(group)
            said.append(str(caught.value))
    return said


@pytest.mark.gloo
def test_what_cannot_keep_the_promise_raises_and_names_why(ranks: Pools) -> None:
    ranks(2).run(check_refusals)


def check_refusals() -> None:
    x, w = torch.ones(4, 16), torch.ones(16, 16)
    with new_group() as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for why, call in {
            "its results depend on the number of ranks": lambda: tpk.all_reduce(x, group),
            "into 4 blocks of one size, and this one has 6 features": lambda: tpk.copy_matmul(x, w[:6], group),
            "needs parts of one size on all ranks": lambda: tpk.copy_matmul(x, w[: 4 + 4 * dist.get_rank()], group),
            "each rank draws numbers of its own": lambda: tpk.nn.sharded_rng(group).__enter__(),
            r"is cut into shards of \[15, 15\] columns": lambda: tpk.nn.vocab_parallel_cross_entropy(
                x[:, : 14 + 2 * dist.get_rank()], torch.ones(4).long(), group, shard_sizes=[14, 16]
            ),
            "with a residual": lambda: tpk.matmul_reduce_scatter(x, w, group, residual=x[:2], norm_weight=w[0]),
            "return_gathered=True": lambda: tpk.all_gather_matmul(
                x, w.clone().requires_grad_(), group, return_gathered=True
            ),
        }.items():
            with pytest.raises(ValueError, match=why):
                call()
        torch.set_num_threads(2)
        try:
            with pytest.raises(UnsupportedProblem, match="one thread per rank, and torch has 2"):
                tpk.copy_matmul(x, w, group)
        finally:
            torch.set_num_threads(1)
        tpk.matmul_all_reduce(x, w, group)  # the group goes on


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((6, 1, 2, "cpu"), "power of two.*got 6"),
        ((0, 1, 1, "cpu"), "power of two.*got 0"),
        ((4, 1, 8, "cpu"), r"same_bits \(4\) must be a multiple of the tensor-parallel degree \(8\)"),
        ((8, 1, 3, "cpu"), r"multiple of the tensor-parallel degree \(3\)"),
        ((8, 3, 2, "cpu"), "dp must be a power of two, got 3"),
        ((8, 1, 2, "cuda"), "CPUs alone"),
    ],
)
def test_a_job_that_is_not_proven_is_refused(arguments: tuple[int, int, int, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        canonical.check_job(*arguments)
