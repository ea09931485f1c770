"""`same_bits=8` of experts whose features are cut, or that are dealt out: one, two, four and eight ranks give the same
bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import tpkernels as tpk
from tests.ops.same_bits import SAME_BITS, Cut, Result, left_to_right, part
from tests.ops.support import IMPLEMENTATIONS, new_group
from tests.ops.test_same_bits import CHUNKS, compare
from tpkernels.backends import canonical_experts
from tpkernels.comm.groups import resolve
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import canonical, fp8
from tpkernels.partition import array_split_sizes
from tpkernels.testing import dealt, grouped
from tpkernels.testing.dealt import COMBINE, DISPATCH, DealtCase
from tpkernels.testing.grouped import COPY, GATHER, REDUCE, SCATTER, GroupedCase
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Mixture:
    """One layer of experts, forward and backward, in terms of the whole tensors."""

    tokens: int
    d_model: int
    block: int
    """Features of an expert in each of the 8 blocks."""
    num_experts: int = 4
    top_k: int = 2
    activation: str | None = "swiglu"
    bias: bool = False
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    """Of what is computed; fp8 operands, which have no gradient, give bf16."""
    layout: str = "features"


MIXTURES = [
    Mixture(37, 24, 17, bias=True),
    Mixture(24, 40, 5, sequence_parallel=True, num_experts=3, bias=True),
    Mixture(16, 24, 9, activation="gelu", top_k=3, sequence_parallel=True, dtype=torch.bfloat16),
    Mixture(9, 12, 3, activation="geglu", num_experts=20, dtype=torch.float64),
    Mixture(37, 24, 17, bias=True, dtype=fp8.DTYPE),
    Mixture(24, 40, 5, sequence_parallel=True, num_experts=3, dtype=fp8.DTYPE),
    Mixture(37, 24, 17, bias=True, layout="experts"),
    Mixture(24, 40, 5, sequence_parallel=True, num_experts=3, bias=True, layout="experts", dtype=torch.bfloat16),
    Mixture(9, 12, 3, activation="gelu", num_experts=20, top_k=3, layout="experts", dtype=torch.float64),
    Mixture(23, 24, 6, sequence_parallel=True, bias=True, layout="experts", dtype=fp8.DTYPE),
]


def run(of: Mixture, group: Any, implementation: str) -> list[Result]:
    """What the layer gives on this rank, by all four ops that the two kinds of it call."""
    if of.dtype == fp8.DTYPE:
        return (run_dealt_fp8 if of.layout == "experts" else run_fp8)(of, group, implementation)
    rank, world, features = dist.get_rank(group), dist.get_world_size(group), SAME_BITS * of.block
    generator = torch.Generator().manual_seed(of.tokens)

    def whole(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of.dtype)

    count = 1 if of.activation == "gelu" else 2
    up, down = whole(of.num_experts, count * features, of.d_model), whole(of.num_experts, of.d_model, features)
    up_bias, down_bias = whole(of.num_experts, count * features), whole(of.num_experts, of.d_model)
    x, dy = whole(of.tokens, of.d_model), whole(of.tokens, of.d_model)
    scores = torch.rand(of.tokens, of.num_experts, generator=generator).softmax(-1)
    weights, chosen = scores.topk(of.top_k)
    experts = tpk.nn.ParallelExperts.from_parameters(
        up.requires_grad_(), down, group, up_bias=up_bias if of.bias else None,
        down_bias=down_bias if of.bias else None, activation=of.activation, sequence_parallel=of.sequence_parallel,
        layout=of.layout, implementation=implementation,
    )  # fmt: skip
    cut: Cut = 0 if of.sequence_parallel else "same"
    x, dy, weights, chosen = (part(one, cut, rank, world) for one in (x, dy, weights.to(of.dtype), chosen))
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, tpk.Routing(chosen, weights))
    y.backward(dy)
    assert x.grad is not None and weights.grad is not None
    results: list[Result] = [("y", cut, y.detach()), ("dx", cut, x.grad), ("d routing", cut, weights.grad)]
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        (placement,) = parameter.grad.placements
        dim: Cut = placement.dim if isinstance(placement, Shard) else "same"
        results.append((f"d {name}", dim, parameter.grad.to_local()))
    return results


def run_dealt_fp8(of: Mixture, group: Any, implementation: str) -> list[Result]:
    """What both ops for whole experts give on this rank."""
    rank, world, features = dist.get_rank(group), dist.get_world_size(group), SAME_BITS * of.block
    generator = torch.Generator().manual_seed(of.tokens)

    def scaled(*shape: int) -> list[Tensor]:
        made = tpk.quantize_fp8(torch.randn(*shape, generator=generator), per="row")
        return [part(one, 0, rank, world) for one in made]

    x, scale_x = scaled(of.tokens, of.d_model)
    up, scale_up = scaled(of.num_experts, features, of.d_model)
    down, scale_down = scaled(of.num_experts, of.d_model, features)
    biases = [torch.randn(of.num_experts, size, generator=generator).bfloat16() for size in (features, of.d_model)]
    up_bias, down_bias = (part(bias, 0, rank, world) if of.bias else None for bias in biases)
    weights, chosen = torch.rand(of.tokens, of.num_experts, generator=generator).softmax(-1).topk(of.top_k)
    routing = tpk.Routing(*(part(one, 0, rank, world) for one in (chosen, weights.bfloat16())))
    options: Any = {
        "shard_sizes": array_split_sizes(of.tokens, world), "implementation": implementation,
        "expert_sizes": array_split_sizes(of.num_experts, world),
    }  # fmt: skip
    found, whole = tpk.dispatch_grouped_matmul(
        x, up, routing, group, scale_x=scale_x, scale_weight=scale_up, bias=up_bias, activation="gelu", **options
    )
    h, scale_h = tpk.quantize_fp8(found, per="row")
    y = tpk.grouped_matmul_combine(
        h, down, whole, group, scale_x=scale_h, scale_weight=scale_down, bias=down_bias, **options
    )
    return [("h", 0, found), ("y", 0, y)]


def run_fp8(of: Mixture, group: Any, implementation: str) -> list[Result]:
    """What the two ops of the layer give on this rank; the second one has an h of its own, scaled by whole rows."""
    rank, world, features = dist.get_rank(group), dist.get_world_size(group), SAME_BITS * of.block
    generator = torch.Generator().manual_seed(of.tokens)

    def scaled(*shape: int, cut: Cut) -> tuple[Tensor, Tensor]:
        numbers, scale = tpk.quantize_fp8(torch.randn(*shape, generator=generator), per="row")
        of_part = "same" if cut == len(shape) - 1 else cut
        return part(numbers, cut, rank, world), part(scale, of_part, rank, world)

    cut: Cut = 0 if of.sequence_parallel else "same"
    x = scaled(of.tokens, of.d_model, cut=cut)
    ups = [scaled(of.num_experts, features, of.d_model, cut=1) for _ in range(2)]
    down, h = (
        scaled(*lead, features, cut=len(lead)) for lead in ((of.num_experts, of.d_model), (of.tokens * of.top_k,))
    )
    bias = torch.randn(of.num_experts, features, generator=generator).bfloat16() if of.bias else None
    own_bias = None if bias is None else [part(bias, 1, rank, world)] * 2
    scores = torch.rand(of.tokens, of.num_experts, generator=generator).softmax(-1)
    weights, chosen = scores.topk(of.top_k)
    routing = tpk.Routing(chosen, weights.bfloat16())
    numbers, scales = [w for w, _ in ups], [scale for _, scale in ups]
    first: Any = {
        "scale_x": x[1], "scale_weight": scales, "bias": own_bias, "activation": of.activation,
        "implementation": implementation,
    }  # fmt: skip
    second: Any = {"scale_x": h[1], "scale_weight": down[1], "implementation": implementation}
    if of.sequence_parallel:
        own = tpk.Routing(*(part(one, cut, rank, world) for one in routing))
        found, _ = tpk.all_gather_grouped_matmul(x[0], numbers, own, group, **first)
        y = tpk.grouped_matmul_reduce_scatter(h[0], down[0], routing, group, **second)
    else:
        found = tpk.copy_grouped_matmul(x[0], numbers, routing, group, **first)
        y = tpk.grouped_matmul_all_reduce(h[0], down[0], routing, group, **second)
    return [("h", 1, found), ("y", cut, y)]


def one_block(context: Any) -> int:
    return 1


FAULTS: dict[str, tuple[object, str, object]] = {
    "a rank multiplies its part in one call": (canonical_experts, "own_blocks", one_block),
    "tree order": (canonical, "top_of_tree", left_to_right),
}


def run_all(
    of: Sequence[Mixture], implementation: str, num_chunks: int | None, fault: str | None = None
) -> list[list[Result]]:
    with new_group(num_chunks) as group, pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            owner, name, wrong = FAULTS[fault]
            patch.setattr(owner, name, wrong)
        resolve(group).keep_same_bits(SAME_BITS)
        return [run(one, group, implementation) for one in of]


def compare_all(
    ranks: Pools, world: int, implementation: str, expected: Sequence[Sequence[Result]], chosen: slice = slice(None)
) -> None:
    mixtures = MIXTURES[chosen]
    found = ranks(world).run(run_all, mixtures, implementation, CHUNKS[implementation], timeout=120.0)
    for i, (of, of_one) in enumerate(zip(mixtures, expected[chosen], strict=True)):
        compare(of_one, [results[i] for results in found], f"{of}, {implementation} on {world} ranks")


@pytest.fixture(scope="module")
def alone(ranks: Pools) -> list[list[Result]]:
    (results,) = ranks(1).run(run_all, MIXTURES, "unfused", None)
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_experts_give_the_bits_of_one_rank(ranks: Pools, alone: list[list[Result]], world: int, full: bool) -> None:
    """On four ranks each mixture by one of the implementations, which share their arithmetic, unless ``full``."""
    for i, implementation in enumerate(IMPLEMENTATIONS):
        chosen = slice(None) if full or world == 2 else slice(i, None, len(IMPLEMENTATIONS))
        compare_all(ranks, world, implementation, alone, chosen)


@pytest.mark.full("eight processes take ten CPU seconds to start; four ranks stand for them")
def test_eight_ranks_give_the_bits_of_one(ranks: Pools, alone: list[list[Result]]) -> None:
    for implementation in IMPLEMENTATIONS:
        compare_all(ranks, SAME_BITS, implementation, alone)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_changes_bits(ranks: Pools, alone: list[list[Result]], fault: str) -> None:
    found = ranks(4).run(run_all, MIXTURES[:1], "chunked", 3, fault)
    with pytest.raises(AssertionError, match="elements differ"):
        compare(alone[0], [results[0] for results in found], fault)


def test_values_of_grouped_ops_are_right(ranks: Pools) -> None:
    ranks(2).run(check_values)


def check_values() -> None:
    """Forward and backward against fp64; what is refused is told on every rank, and the group goes on."""
    base = GroupedCase(GATHER, (9, 4), shape=(16, 16))
    cases = [base.but(op=op, bias=True, call=i) for i, op in enumerate((GATHER, SCATTER, REDUCE))]
    # Products of 16 bits are rounded block by block, as 8 ranks round theirs: more often than the bound of 2 allows.
    cases += [case.but(dtype=torch.bfloat16, integers=True, load="few", strided=True, call=7) for case in cases]
    cases.append(base.but(op=COPY, activation="swiglu", bias=True))
    # The scales of integers are equal on all ranks, as those of a contraction that is cut have to be.
    of_fp8 = base.but(fp8=("row", "row"), dtype=torch.bfloat16, integers=True, bias=True)
    cases += [of_fp8.but(op=op, call=i) for i, op in enumerate((GATHER, SCATTER, REDUCE, COPY))]
    cases.append(of_fp8.but(integers=False, activation="swiglu", return_gathered=True, fp8=("mixed", "matrix")))
    whole = DealtCase(DISPATCH, (9, 4), shape=(16, 24), bias=True)
    of_whole_experts = [
        whole.but(activation="swiglu"), whole.but(op=COMBINE, top_k=3, dtype=torch.bfloat16, load="few", strided=True),
        whole.but(op=COMBINE, fp8=("row", "matrix"), dtype=torch.bfloat16),
    ]  # fmt: skip
    with new_group(3) as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for name in IMPLEMENTATIONS:
            for case in cases:
                grouped.judge(case.but(implementation=name), group)
            for one in of_whole_experts:
                dealt.judge(one.but(implementation=name), group)
        for why, case in {
            "into 4 blocks of one size, and this one has 6 features": base.but(shape=(6, 16)),
            "return_gathered=True": base.but(return_gathered=True),
        }.items():
            with pytest.raises((ValueError, UnsupportedProblem), match=why):
                grouped.judge(case, group)
        grouped.judge(base, group)


def refused_when_compiled() -> None:
    x, weights = torch.ones(4, 16), torch.ones(2, 16, 16)
    routing = tpk.Routing(torch.zeros(4, 1).long(), torch.ones(4, 1))
    with new_group(1) as group:
        resolve(group).keep_same_bits(SAME_BITS)
        for op in (
            tpk.all_gather_grouped_matmul, tpk.copy_grouped_matmul, tpk.grouped_matmul_reduce_scatter,
            tpk.grouped_matmul_all_reduce, tpk.dispatch_grouped_matmul, tpk.grouped_matmul_combine,
        ):  # fmt: skip
            compiled = torch.compile(lambda x, op=op: op(x, weights, routing, group), backend="eager", fullgraph=True)
            with pytest.raises(torch._dynamo.exc.Unsupported, match="not proven in compiled code"):
                compiled(x)


def test_compiled_code_is_refused(ranks: Pools) -> None:
    ranks(1).run(refused_when_compiled)
