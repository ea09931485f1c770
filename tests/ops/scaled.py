"""Cases of the fused ops on fp8 operands, run on real ranks and judged there; as tests/ops/support.py for other dtypes.

Owns `ScaledCase` (a `Case` whose `dtype` is the result's), its operands and scales, the call, and the judge: bits for
integers, whose scales are powers of two, the elementwise fp64 bound on the dequantised operands otherwise. And faults
of scales (`FAULTS`), which it must see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import tpkernels as tpk
from tests.ops.support import PLACE, new_group
from tpkernels.gemm import fp8
from tpkernels.gemm.fp8 import DTYPE
from tpkernels.ops.contract import GATED
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER, Case, operands
from tpkernels.testing.expected import (
    expected_all_gather_matmul,
    expected_gated_matmul,
    expected_matmul_all_reduce,
    expected_matmul_reduce_scatter,
)
from tpkernels.testing.numeric import FP8_SUM_LOSS, Bounded, assert_bitwise_equal
from tpkernels.testing.payload import exact_matmul, integer_payload

SCALED = (GATHER, SCATTER, REDUCE)
Fp8 = tuple[Tensor, Tensor]
"""Numbers and their scale."""


@dataclass(frozen=True)
class ScaledCase(Case):
    """`per_x`, `per_w`: kinds of scales, by rank and repeated, so that ranks may differ."""

    dtype: torch.dtype = torch.bfloat16
    per_x: tuple[str, ...] = ("row",)
    per_w: tuple[str, ...] = ("row",)


@dataclass
class Parts:
    """Of all ranks: `xs[rank]`, `ws[rank][i]`, `bs[rank][i]`."""

    xs: list[Fp8]
    ws: list[list[Fp8]]
    bs: list[list[Tensor | None]]


def parts_of(case: ScaledCase, world: int) -> Parts:
    made = operands(case.but(dtype=torch.float32 if not case.integers else case.dtype), world)
    per_x, per_w = case.per_x, case.per_w
    xs = [_fp8(case, x, per_x[r % len(per_x)], f"x{r}") for r, x in enumerate(made.xs)]
    ws = [
        [_fp8(case, w, per_w[r % len(per_w)], f"w{i}{r}") for i, w in enumerate(several)]
        for r, several in enumerate(made.ws)
    ]
    return Parts(xs, ws, [[None if b is None else b.to(case.dtype) for b in several] for several in made.bs])


def _fp8(case: ScaledCase, x: Tensor, per: str, name: str) -> Fp8:
    if not case.integers:
        return tpk.quantize_fp8(x, per=per)
    shape = (*x.shape[:-1], 1) if per == "row" else (1,)
    return x.to(DTYPE), integer_payload(shape, torch.float32, name=name, call=case.call, largest=1).abs() + 1


def call(case: ScaledCase, x: Fp8, ws: Sequence[Fp8], bs: Sequence[Tensor | None], group: Any) -> list[Tensor]:
    """Outputs, then with `return_gathered` the gathered numbers and scales."""
    single = len(ws) == 1
    weight = ws[0][0] if single else [w for w, _ in ws]
    settings: dict[str, Any] = {
        "scale_x": x[1],
        "scale_weight": ws[0][1] if single else [scale for _, scale in ws],
        "out_dtype": case.dtype,
        "implementation": case.implementation,
        "bias": (bs[0] if single else list(bs)) if case.bias else None,
    }
    if case.op == SCATTER:
        settings |= {"scatter_dim": case.dim, "shard_sizes": case.sizes}
        return [tpk.matmul_reduce_scatter(x[0], weight, group, **settings)]
    if case.op == REDUCE:
        return [tpk.matmul_all_reduce(x[0], weight, group, **settings)]
    settings |= {"gather_dim": case.dim, "shard_sizes": case.sizes, "activation": case.activation}
    result = tpk.all_gather_matmul(x[0], weight, group, return_gathered=case.return_gathered, **settings)
    y, *gathered = result if case.return_gathered else (result,)
    return [*([y] if isinstance(y, Tensor) else y), *gathered]


def run(case: ScaledCase, parts: Parts, group: Any) -> list[Tensor]:
    """The case on this rank, where it computes."""
    rank, device = dist.get_rank(group), PLACE.device
    x, ws = parts.xs[rank], parts.ws[rank]
    biases = [None if b is None else b.to(device) for b in parts.bs[rank]]
    return call(case, _on(x), [_on(w) for w in ws], biases, group)


def _on(x: Fp8) -> Fp8:
    return x[0].to(PLACE.device), x[1].to(PLACE.device)


def judge(case: ScaledCase, parts: Parts, outs: Sequence[Tensor], rank: int) -> None:
    what = f"rank {rank}, {case}"
    count = case.num_outputs
    assert all(out.is_contiguous() and out.dtype == case.dtype for out in outs[:count]), what
    xs, ws = [_exact(x) for x in parts.xs], [[_exact(w) for w in several] for several in parts.ws]
    if case.op == GATHER:
        whole = torch.cat(xs, case.axis)
        if case.return_gathered:
            _judge_gathered(case, parts, outs[count], outs[count + 1], what)
        if case.activation in GATED:
            expected_gated_matmul(
                _once_rounded(whole, sum_loss()), [_once_rounded(w) for w in ws[rank]], dtype=case.dtype,
                biases=parts.bs[rank], activation=case.activation, input_rounded=False,
            ).check(outs[0], what)  # fmt: skip
            return
        for i, out in enumerate(outs[:count]):
            bias = parts.bs[rank][i]
            if case.integers:
                exact = exact_matmul([whole], [ws[rank][i]], bias=bias, dtype=case.dtype)
                exact = F.relu(exact) if case.activation == "relu" else exact
                assert_bitwise_equal(out, exact, what, either_zero=True)
            else:
                expected_all_gather_matmul(
                    _once_rounded(whole, sum_loss()), _once_rounded(ws[rank][i]), dtype=case.dtype, bias=bias,
                    activation=case.activation, input_rounded=False,
                ).check(out, what)  # fmt: skip
        return
    firsts, bias = [several[0] for several in ws], parts.bs[rank][0]
    if case.integers:
        exact = exact_matmul(xs, firsts, bias=bias, dtype=case.dtype)
        exact = exact.split(list(case.cut(len(xs))), case.axis)[rank] if case.op == SCATTER else exact
        assert_bitwise_equal(outs[0], exact, what, either_zero=True)
        return
    rounded_xs, rounded_ws = [_once_rounded(x, sum_loss()) for x in xs], [_once_rounded(w) for w in firsts]
    if case.op == REDUCE:
        expected_matmul_all_reduce(rounded_xs, rounded_ws, dtype=case.dtype, bias=bias).check(outs[0], what)
        return
    expected_matmul_reduce_scatter(
        rounded_xs, rounded_ws, rank=rank, dtype=case.dtype, bias=bias, scatter_dim=case.dim, shard_sizes=case.sizes
    ).check(outs[0], what)


def _exact(x: Fp8) -> Tensor:
    return x[0].double() * x[1].double()


def _once_rounded(x: Tensor, sums_lose: float = 0.0) -> Bounded:
    return Bounded.scaled(x, torch.ones(()), sums_lose=sums_lose)


def sum_loss() -> float:
    """Of the sums of fp8 products where these ranks compute."""
    return FP8_SUM_LOSS if PLACE.device.type == "cuda" else 0.0


def _judge_gathered(case: ScaledCase, parts: Parts, numbers: Tensor, scales: Tensor, what: str) -> None:
    whole = torch.cat([x.view(torch.uint8) for x, _ in parts.xs], case.axis).view(DTYPE)
    by_row = [scale.expand(*x.shape[:-1], 1) for x, scale in parts.xs]
    assert_bitwise_equal(numbers, whole, f"{what}: gathered")
    assert_bitwise_equal(scales, torch.cat(by_row, case.axis), f"{what}: gathered scales")


def judge_cases(cases: Sequence[ScaledCase], group: Any) -> int:
    """Run and judge each case; inputs must be left alone."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for case in cases:
        parts = parts_of(case, world)
        kept = [t.clone() for t in (*parts.xs[rank], *parts.ws[rank][0])]
        outs = run(case, parts, group)
        for now, before in zip((*parts.xs[rank], *parts.ws[rank][0]), kept, strict=True):
            assert_bitwise_equal(now, before, f"{case}: an input after the call")
        judge(case, parts, [out.cpu() for out in outs], rank)
    return len(cases)


def judge_all(cases: Sequence[ScaledCase], num_chunks: int | None = None) -> int:
    """Run on every rank: all cases on one new group; how many there were."""
    with new_group(num_chunks) as group:
        return judge_cases(cases, group)


def exact_cases(name: str, world: int) -> list[ScaledCase]:
    """Every op, kind of scale and result dtype; uneven, empty and missing rows; all dims."""
    base = ScaledCase(GATHER, (13, 24), ns=(10,), bias=True, integers=True, implementation=name)
    kinds = [
        (("row",), ("row",)),
        (("tensor",), ("tensor",)),
        (("row", "tensor"), ("tensor",)),
        (("tensor",), ("row",)),
    ]
    cuts = [(*[0] * (world - 1), 13), (5, *[0] * (world - 2), 8)] if world > 1 else [(13,)]
    found = []
    for op in SCALED:
        sizes = {} if op == REDUCE else {"sizes": cuts[0]}
        found += [base.but(op=op, per_x=x, per_w=w, **sizes) for x, w in kinds]
        if op != REDUCE:
            found += [base.but(op=op, sizes=cuts[-1], dtype=dtype) for dtype in (torch.float16, torch.float32)]
            zero = (0,) * world
            found += [base.but(op=op, shape=(0, 24), sizes=zero), base.but(op=op, shape=(2, 0, 8), sizes=zero, dim=1)]
            found.append(base.but(op=op, shape=(7, 3, 8), sizes=(7 - world + 1, *[1] * (world - 1))))
            found.append(base.but(op=op, shape=(6, 5 * world, 8), dim=1, sizes=(5,) * world))
        else:
            found += [base.but(op=op, shape=(rows, 24)) for rows in (0, 1, world + 1)]
            found.append(base.but(op=op, shape=(2, 5, 16), dtype=torch.float32, bias=False))
    found.append(base.but(op=SCATTER, dim=-1, ns=(11,), sizes=(11 - world + 1, *[1] * (world - 1))))
    features = (20 - 3 * (world - 1), *[3] * (world - 1))
    found.append(base.but(shape=(7, 20), dim=-1, sizes=features, return_gathered=True, per_x=("row", "tensor")))
    several = base.but(ns=(7, 3), bias=(True, False), activation="relu", return_gathered=True, own_ns=True)
    found += [several.but(sizes=cuts[-1]), several.but(shape=(2, 3 * world, 8), dim=1)]
    if world > 1:
        found.append(base.but(op=REDUCE, k_sizes=(3, *[0] * (world - 2), 21)))
    return [case.but(call=number) for number, case in enumerate(found)]


def real_cases(name: str) -> list[ScaledCase]:
    """Activations, result dtypes, and rows enough for several chunks; numbers at random."""
    base = ScaledCase(GATHER, (48, 96), ns=(40,), bias=True, implementation=name)
    found = [base.but(op=op, dtype=dtype) for op in SCALED for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    found += [base.but(activation=name, dtype=torch.float32) for name in ("relu", "gelu", "gelu_tanh", "silu")]
    found.append(base.but(shape=(20, 96), dim=1, activation="silu", per_x=("tensor",), per_w=("tensor",)))
    found.append(base.but(ns=(40, 40), activation="swiglu", return_gathered=True, per_x=("tensor", "row")))
    return [case.but(call=number) for number, case in enumerate(found)]


# --- faults that the judge must see: what is changed, and how ---------------------------------------------------------


def one_scale_for_all(split: Callable[..., list[fp8.Scaled]]) -> Callable[..., list[fp8.Scaled]]:
    """Every row gets the scale of the first one that this rank sees."""

    def changed(packed: Tensor, sizes: Any) -> list[fp8.Scaled]:
        parts = split(packed, sizes)
        return [fp8.Scaled(part.numbers, part.scale[:1].expand_as(part.scale)) for part in parts]

    return changed


def scales_of_rank_0(pack: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What rank 0 would send, from every rank."""

    def changed(x: Tensor, scale: Tensor) -> Tensor:
        theirs = scale.clone()
        dist.broadcast(theirs, 0)
        return pack(x, theirs)

    return changed


FAULTS = {
    "scales of rank 0 for all": (fp8, "pack", scales_of_rank_0),
    "one scale for all rows": (fp8, "split", one_scale_for_all),
    "no scale of the weight": (fp8, "scale_rows", lambda good: lambda s, rows: good(torch.ones_like(s), rows)),
}
