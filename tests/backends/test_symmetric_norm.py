"""What follows a sum of `symmetric`, residual and norm: in the kernel that sums, or behind it; emulated GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends.emulated import Emulation
from tests.backends.test_symmetric import DTYPES, FORCED
from tests.backends.test_symmetric_self_check import one_more
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.comm.groups import resolve
from tpkernels.gemm import residual_norm
from tpkernels.partition import array_split_sizes
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import integer_payload, payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 180.0
MUCH = 10**7
EPS = 1e-5
WAYS: dict[str, dict[str, int]] = {
    "one step": {"one_shot_bytes": MUCH},
    "one kernel of two steps": {"two_shot_bytes": MUCH},
    "two steps": {},
}
SHAPES = ((1, 24), (5, 7), (37, 32), (3, 1))
"""Rows and columns; packs of 16 bytes, and rows that allow none."""


def values(emulation: Emulation, op: str) -> list[torch.Tensor]:
    found = []
    with emulation.group() as group:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        for shape in SHAPES:
            for dtype in DTYPES:
                xs = [integer_payload((shape[0], 6), dtype, rank=r, name="x", largest=2) for r in range(world)]
                w = [integer_payload((shape[1], 6), dtype, rank=r, name="w", nonzeros=2) for r in range(world)]
                bias = integer_payload((shape[1],), dtype, name="bias")
                residual, weight = payload(shape, dtype, name="residual"), payload(shape[1:], dtype, name="norm")
                kept = residual.clone()
                sizes = array_split_sizes(shape[0], world)
                own = residual if op == "matmul_all_reduce" else residual.split(sizes)[rank].contiguous()
                normed, sums = getattr(tpk, op)(
                    xs[rank], w[rank], group, bias=bias, residual=own, norm_weight=weight, eps=EPS, **FORCED
                )
                what = f"{op} {shape} {dtype}, rank {rank}"
                total = sum(x.double() @ m.double().t() for x, m in zip(xs, w, strict=True)) + bias.double()
                expected = (
                    (total.to(dtype) + residual).split(sizes)[rank]
                    if own is not residual
                    else total.to(dtype) + residual
                )
                assert_bitwise_equal(sums, expected.contiguous(), f"{what}: sums")
                exact = F.rms_norm(sums.double(), shape[1:], weight.double(), EPS)
                limit = torch.finfo(dtype).eps + (shape[1] + 8) * torch.finfo(residual_norm.of_scales(dtype)).eps
                assert ((normed.double() - exact).abs() <= limit * exact.abs()).all(), f"{what}: normed"
                assert_bitwise_equal(residual, kept, f"{what}: the residual after the call")
                found += [normed, sums]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_exact_and_rows_are_normalised_alike_on_every_rank(
    pools: Pools, emulation: Emulation, world: int, way: str
) -> None:
    settings = replace(emulation, fuse_from_rows=10**6, multicast=world == 3, **WAYS[way])
    first, *others = pools(world).run(values, settings, "matmul_all_reduce", timeout=PATIENCE_S)
    for rank, tensors in enumerate(others):
        for now, before in zip(tensors, first, strict=True):
            assert_bitwise_equal(now, before, f"{way}, rank {rank + 1}")


@pytest.mark.full("interpreted ranks; sums of an all-reduce are normalised in the quick run")
def test_shards_of_a_scattered_sum_are_normalised(pools: Pools, emulation: Emulation) -> None:
    pools(3).run(values, emulation, "matmul_reduce_scatter", timeout=PATIENCE_S)


def gradients(emulation: Emulation) -> None:
    """Those of the kernel's own scales are those of unfused autograd."""
    with emulation.group() as group:
        rank = dist.get_rank(group)
        x, w = payload((5, 6), torch.float32, rank=rank, name="x"), payload((24, 6), torch.float32, rank=rank, name="w")
        residual, weight = payload((5, 24), torch.float32, name="residual"), payload((24,), torch.float32, name="norm")
        found = []
        for options in (FORCED, {"implementation": "unfused"}):
            own = [tensor.clone().requires_grad_() for tensor in (x, w, residual, weight)]
            normed, sums = tpk.matmul_all_reduce(
                own[0], own[1], group, residual=own[2], norm_weight=own[3], eps=EPS, **options
            )
            (normed.sin() + sums.cos()).sum().backward()
            found.append([tensor.grad for tensor in own])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_go_by_the_scales_of_the_kernel(pools: Pools, emulation: Emulation) -> None:
    pools(2).run(gradients, replace(emulation, one_shot_bytes=MUCH), timeout=PATIENCE_S)


# --- what is not right is not trusted ---------------------------------------------------------------------------------


def first_use(emulation: Emulation, spoiled: str) -> str:
    """What the first call says, or "fine"; on rank 1 the kernel's sums, or its normed rows, are wrong by one."""
    original = symmetric.one_shot_norm

    def wrong_rows(*arguments: Any) -> Any:
        result = original(*arguments)
        arguments[-1].normed[0, 0] += 1
        return result

    fault: Any = mock.patch.dict({})
    with emulation.group() as group:
        if spoiled and dist.get_rank(group) == 1:
            fault = one_more("one_shot_norm", -1) if spoiled == "sums" else mock.patch.object(
                symmetric, "one_shot_norm", wrong_rows
            )  # fmt: skip
        x, w = torch.ones(3, 8), torch.ones(16, 8)
        with fault:
            try:
                tpk.matmul_all_reduce(x, w, group, residual=torch.ones(3, 16), norm_weight=torch.ones(16), **FORCED)
            except tpk.errors.UnsupportedProblem as error:
                return str(error)
        channels = channels_of(resolve(group))
        assert set(channels.first_uses.values()) == {None}
    return "fine"


def test_the_kernel_is_tried_before_it_is_trusted(pools: Pools, emulation: Emulation) -> None:
    settings = replace(emulation, checks=True, one_shot_bytes=MUCH)
    assert pools(2).run(first_use, settings, "") == ["fine"] * 2
    for spoiled in ("sums", "normed"):
        for said in pools(2).run(first_use, settings, spoiled):
            assert re.search(r"rank 1: 1 of \d+ elements are wrong, the first at \[0, 0\]", said), (spoiled, said)
