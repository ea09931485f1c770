"""Selection is a pure function of agreed facts: who refuses and why, who is forced, whose estimate is smallest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import tpkernels  # noqa: F401  (registers the implementations)
from tpkernels import dispatch
from tpkernels.backends.point_to_point import chunked
from tpkernels.backends.shared_memory.segments import SharedMemory
from tpkernels.comm.resources import Standing
from tpkernels.dispatch import GROUPED, OPS, Costs, Implementation, Problem
from tpkernels.errors import TpKernelsError, UnsupportedProblem
from tpkernels.gemm.native import native

pytestmark = pytest.mark.cpu

FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def problem(op: str = "all_gather_matmul", **changes: object) -> Problem:
    base = Problem(op, m=4096, n=8192, k=2048, dtype=torch.bfloat16, world_size=2)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def registry() -> Iterator[dict[tuple[str, str], Implementation]]:
    """The registry, restored afterwards."""
    before = dict(dispatch._registry)
    yield dispatch._registry
    dispatch._registry.clear()
    dispatch._registry.update(before)


def offer(
    name: str, op: str = "all_gather_matmul", refusal: str | None = None, cost: float | None = 1.0
) -> Implementation:
    return Implementation(name, op, lambda p: refusal, lambda p, costs: cost, lambda context, call: None)


def test_what_nobody_can_estimate_runs_by_name_alone(registry: dict[tuple[str, str], Implementation]) -> None:
    registry.clear()
    for one in (offer("untimed", cost=None), offer("unfused", cost=1e9)):
        dispatch.register(one)
    chosen, explanation = dispatch.select(problem(), "auto", Costs())
    assert chosen.name == "unfused" and "untimed  no estimate" in str(explanation), str(explanation)
    assert dispatch.select(problem(), "untimed", Costs())[0].name == "untimed"


@pytest.mark.parametrize("op", [*OPS, *GROUPED])
def test_every_op_has_the_fallback_that_refuses_nothing(op: str) -> None:
    names = [implementation.name for implementation in dispatch.implementations(op)]
    assert names[0] == "unfused"
    for changes in ({}, {"world_size": 1}, {"m": 0}, {"backend": "mpi"}, {"device": "cuda"}, {"dtype": torch.float64}):
        chosen, _ = dispatch.select(problem(op, **changes), "unfused", Costs())
        assert chosen.name == "unfused"


def test_a_slow_link_chooses_overlap_and_a_tiny_problem_does_not() -> None:
    slow = Costs(gemm_gflops=100, link_gbytes=0.125, link_latency_us=100, link_cpu=0.05)
    for op in FUSED:
        chosen, explanation = dispatch.select(problem(op), "auto", slow)
        assert chosen.name == "chunked", str(explanation)
        chosen, explanation = dispatch.select(problem(op, m=4, n=64, k=64), "auto", slow)
        assert chosen.name == "unfused", str(explanation)


@pytest.mark.parametrize("op", [*OPS, *GROUPED])
@pytest.mark.parametrize("changes", [{"m": 0}, {"n": 0}, {"k": 0}, {"world_size": 1}, {"m": 1}, {"world_size": 7}])
def test_estimates_are_finite_and_positive_at_the_edges(op: str, changes: dict[str, int]) -> None:
    for implementation in dispatch.implementations(op):
        if implementation.refuses(problem(op, **changes)) is None:
            assert 0.0 <= implementation.estimate(problem(op, **changes), Costs()) < 1e12


def test_wire_bytes_count_the_payload_once_and_twice_for_an_all_reduce() -> None:
    shape = {"m": 12, "n": 8, "k": 4, "world_size": 4, "dtype": torch.float32}
    assert problem("all_gather_matmul", **shape).wire_bytes == problem("all_gather", **shape).wire_bytes == 12 * 4 * 3
    assert problem("matmul_reduce_scatter", **shape).wire_bytes == 12 * 8 * 3
    assert (
        problem("matmul_all_reduce", **shape).wire_bytes == problem("all_reduce", **shape).wire_bytes == 2 * 12 * 8 * 3
    )
    assert problem("all_gather_matmul", **{**shape, "world_size": 1}).wire_bytes == 0


def test_an_op_gathers_or_reduces_and_its_name_says_what_else_it_does() -> None:
    assert (*OPS, *GROUPED) == tuple(dispatch.FACTS) and len(OPS) == 6
    for op, facts in dispatch.FACTS.items():
        assert facts.multiplies is ("matmul" in op) is (op not in COLLECTIVES)
        assert facts.gathers is op.startswith(("all_gather", "dispatch")) is not facts.reduces
        assert facts.everywhere is ("all_reduce" in op)
        assert facts.grouped is ("grouped" in op) is (op in GROUPED)
        assert facts.dealt is ("dispatch" in op or "combine" in op)
        assert problem(op).facts is facts


def test_flops_are_one_ranks() -> None:
    assert problem("matmul_all_reduce").flops == 2 * 4096 * 8192 * 2048 / 2
    assert problem("grouped_matmul_all_reduce", experts=64, top_k=6).flops == 6 * 4096 * 8192 * 2048
    assert problem("dispatch_grouped_matmul", experts=64, top_k=6).flops == 6 * 4096 * 8192 * 2048
    assert all(problem(op).flops == 0 for op in COLLECTIVES)


def test_a_token_travels_once_to_each_rank_that_has_one_of_its_experts() -> None:
    """Never more than to everybody, as where each rank has a slice of every expert."""
    for op, dense in (("dispatch_grouped_matmul", GROUPED[0]), ("grouped_matmul_combine", GROUPED[1])):
        whole = problem(dense, experts=64, top_k=1).wire_bytes
        sent = [problem(op, experts=64, top_k=k).wire_bytes / whole for k in (1, 2, 8)]
        assert sent == pytest.approx([0.5, 0.75, 1 - 2**-8]), op
        assert problem(op, experts=64, top_k=2).num_matrices() == 32


def test_each_part_of_a_grouped_gemm_goes_through_the_weights_of_the_experts_that_it_uses() -> None:
    """So a cut costs more the more experts there are, and decoding reads as many as there are rows."""
    many = problem("grouped_matmul_all_reduce", experts=64, top_k=2)
    assert [round(many.num_matrices(calls), 2) for calls in (1, 8, 4096)] == [64, 64, 1.98]
    assert 5.5 < problem("grouped_matmul_all_reduce", m=3, experts=64, top_k=2).num_matrices() < 6
    assert all(problem(op, m=m).num_matrices(calls) == 1.0 for op in OPS for m in (0, 1, 999) for calls in (1, 8))
    costs = Costs(gemm_overhead_us=0.0)
    dense, few = (problem("matmul_all_reduce", m=4, experts=experts) for experts in (1, 8))
    assert 2.5 < costs.gemm_us(few) / costs.gemm_us(dense) <= 4.0
    for op, link_gbytes in zip(GROUPED, (0.005, 0.005, 0.1, 0.005, 0.005), strict=True):
        slow = Costs(link_gbytes=link_gbytes)
        chunks = [chunked._num_chunks(problem(op, experts=experts), slow, 2048, 8) for experts in (1, 8, 128)]
        assert sorted(chunks, reverse=True) == chunks and chunks[0] > chunks[-1], op


def test_chunks_are_taken_for_few_large_experts_and_left_for_many_small_ones() -> None:
    """Layers of Mixtral, Qwen3 and GPT-OSS by the sizes of `benchmarks/experts.py`, on a link of 1 Gbit/s."""
    costs = Costs(
        gemm_gflops=600, gemm_overhead_us=4, weight_gbytes=10, relay_gbytes=25, link_gbytes=0.118, link_latency_us=150,
        link_cpu=0.45, copy_gbytes=5, measured=True,
    )  # fmt: skip
    layers = ((8, 2, 1024, 3584, "chunked"), (128, 8, 1024, 768, "unfused"), (32, 4, 720, 720, "unfused"))
    for experts, top_k, d_model, features, best in layers:
        shared = {"m": 2048, "world_size": 2, "experts": experts, "top_k": top_k}
        for op, n, k in ((GROUPED[0], 2 * features, d_model), (GROUPED[1], d_model, features)):
            chosen, explanation = dispatch.select(problem(op, n=n, k=k, **shared), "auto", costs)
            assert chosen.name == best, str(explanation)


def test_auto_takes_the_smallest_estimate_and_the_first_registered_on_a_tie(registry: dict) -> None:
    registry.clear()
    for name, cost in (("a", 3.0), ("b", 2.0), ("c", 2.0)):
        dispatch.register(offer(name, cost=cost))
    chosen, explanation = dispatch.select(problem(), "auto", Costs())
    assert (chosen.name, explanation.reason) == ("b", "smallest estimate")


def test_auto_passes_over_those_that_refuse(registry: dict) -> None:
    registry.clear()
    dispatch.register(offer("fast", refusal="needs peer access", cost=0.1))
    dispatch.register(offer("plain", cost=9.0))
    chosen, explanation = dispatch.select(problem(), "auto", Costs())
    assert (chosen.name, explanation.reason) == ("plain", "the only one that can run this")
    assert "fast   cannot run: needs peer access" in str(explanation)


def test_a_forced_implementation_that_cannot_run_raises_with_everybodys_reason(registry: dict) -> None:
    registry.clear()
    dispatch.register(offer("fast", refusal="needs peer access"))
    dispatch.register(offer("plain"))
    with pytest.raises(UnsupportedProblem) as caught:
        dispatch.select(problem(), "fast", Costs())
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TpKernelsError)
    assert "fast: needs peer access" in str(caught.value)
    assert "plain: can run this" in str(caught.value)


def test_a_forced_implementation_runs_even_where_another_is_faster(registry: dict) -> None:
    dispatch.register(offer("slow_one", cost=1e9))
    chosen, explanation = dispatch.select(problem(), "slow_one", Costs())
    assert (chosen.name, explanation.reason) == ("slow_one", "forced by implementation=")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"implementation.*'fussed'.*") as caught:
        dispatch.select(problem(), "fussed", Costs())
    for name in ("auto", "unfused", "chunked"):
        assert name in str(caught.value)


def test_a_name_is_taken_once_per_op_and_an_unknown_op_is_refused(registry: dict) -> None:
    with pytest.raises(ValueError, match="all_gather_matmul has an implementation named 'chunked' already"):
        dispatch.register(offer("chunked"))
    with pytest.raises(ValueError, match="unknown op 'matmul_all_to_all'"):
        offer("mine", op="matmul_all_to_all")
    with pytest.raises(ValueError, match="unknown op 'conv'"):
        dispatch.implementations("conv")


def test_chunked_says_why_it_refuses() -> None:
    for changes, reason in (({"world_size": 1}, "one rank"), ({"backend": "mpi"}, "'mpi'")):
        with pytest.raises(UnsupportedProblem, match=reason):
            dispatch.select(problem(**changes), "chunked", Costs())


def test_the_explanation_is_a_table_of_what_was_weighed() -> None:
    _, explanation = dispatch.select(problem(), "auto", Costs(measured=True))
    text = str(explanation)
    assert "all_gather_matmul  m=4096 k=2048 n=8192 bfloat16  world_size=2" in text
    assert f"-> {explanation.chosen}: " in text
    for name in ("unfused", "chunked"):
        assert f"   {name}" in text
    assert "estimate" in text and "chunk(s) per shard" in text and "measured on this group" in text
    _, explanation = dispatch.select(problem(), "auto", Costs())
    assert "built-in costs, not measured" in str(explanation)


def test_chunks_on_a_gpu_are_large_enough_to_fill_it() -> None:
    from tpkernels.backends.point_to_point import chunked

    for device, rows, expected in (
        ("cpu", (64, 1024, 8192), [8, 8, 8]),
        ("cuda", (0, 1024, 2500, 16384), [1, 1, 2, 8]),
    ):
        found = [chunked._num_chunks(problem(device=device), Costs(), shard_rows, 8) for shard_rows in rows]
        assert found == expected, device


def test_a_cut_that_costs_more_than_it_hides_is_not_made() -> None:
    """The transfer takes half as long as the GEMM of a rank's own rows, or four times as long; a cut little or 4 s."""
    from tpkernels.backends.point_to_point import chunked

    gather = problem()  # 4096 x 8192 x 2048 on two ranks: 687 ms, 343 of them for the rank's own rows; 8 MB to send
    for gbytes, relay_gbytes, expected in ((0.049, 4.0, 1), (0.0061, 4.0, 8), (0.0061, 0.004, 1)):
        costs = Costs(gemm_gflops=100.0, link_gbytes=gbytes, link_cpu=0.0, relay_gbytes=relay_gbytes, measured=True)
        assert chunked._num_chunks(gather, costs, 2048, 8) == expected, (gbytes, relay_gbytes)


def test_further_gemms_over_a_weight_cost_what_was_measured() -> None:
    few, many = problem(m=2), problem(m=65536)
    hides, exposes = Costs(relay_gbytes=1e3), Costs(relay_gbytes=1.0)
    assert hides.gemm_us(few, 2) > 1.9 * hides.gemm_us(few), "each streams the weight"
    for costs, low, high in ((hides, 0.0, 0.01), (exposes, 0.95, 1.0)):
        cut_us = costs.gemm_us(many, 2) - costs.gemm_us(many)
        assert low * 16777 <= cut_us - costs.gemm_overhead_us <= high * 16777, costs  # 16.8 MB at 1 GB/s
    meet = Costs(weight_gbytes=4.0)
    balance = int(16.777216 / 4.0 * 100.0 / 16.777216)  # rows whose arithmetic takes as long as the weight
    assert meet.gemm_us(problem(m=balance)) == pytest.approx(meet.gemm_us(problem(m=balance + 1)), rel=0.02)


def test_fp8_sends_a_byte_per_element_with_a_scale_per_row_and_results_in_their_own_dtype() -> None:
    whole = {"m": 512, "n": 1024, "k": 4092, "dtype": torch.float8_e4m3fn, "world_size": 4}
    gather = Problem("all_gather_matmul", **whole, out_dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert gather.row_bytes == 4096 and gather.wire_bytes == 512 * 4096 * 3 // 4
    for out_dtype, itemsize in ((torch.bfloat16, 2), (torch.float32, 4)):
        scatter = Problem("matmul_reduce_scatter", **whole, out_dtype=out_dtype)  # type: ignore[arg-type]
        assert scatter.row_bytes == 1024 * itemsize and scatter.wire_bytes == 512 * 1024 * itemsize * 3 // 4


def test_few_rows_are_estimated_by_the_kernel_for_them_where_it_was_measured() -> None:
    few = problem("matmul_all_reduce", m=1, co_located=True, resources=(Standing(SharedMemory.name),))
    plain = Costs(measured=True)
    assert plain.few_rows_us(few) == plain.gemm_us(few)
    measured = replace(plain, few_rows_gbytes=16.0, sixteen_rows_gbytes=8.0)
    one, sixteen = measured.few_rows_us(few), measured.few_rows_us(replace(few, m=16))
    assert one == pytest.approx(8192 * 1024 * 2 / 16e3)
    assert sixteen == pytest.approx(2 * one)
    assert one < measured.few_rows_us(replace(few, m=8)) < sixteen

    def estimates(costs: Costs, **changes: object) -> dict[str, float | None]:
        _, explanation = dispatch.select(replace(few, **changes), "auto", costs)  # type: ignore[arg-type]
        return {candidate.name: candidate.estimate_us for candidate in explanation.candidates}

    if native() is None:
        pytest.skip("the rest needs the compiled core")
    faster, slower = estimates(measured), estimates(plain)
    assert slower["shared_memory"] - faster["shared_memory"] == pytest.approx(plain.gemm_us(few) - one)
    assert faster["unfused"] == slower["unfused"], "the baseline stays torch's"
    for others in ({"m": 33}, {"dtype": torch.float64}, {"n": 8, "k": 8}):
        assert estimates(measured, **others) == estimates(plain, **others)
