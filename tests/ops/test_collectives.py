"""The collectives without a GEMM: exact moves, one rounding per sum, and gradients that match the unfused job's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import DTYPES, strided
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = [3, 2, 4]
KINDS = [*((dtype, lambda x: x) for dtype in DTYPES), (torch.bfloat16, strided)]


def summed_once(parts: list[Tensor]) -> Tensor:
    """Sum in rank order in fp32 (fp64 for fp64), rounded once."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def sizes_for(world: int, whole: int, even: bool) -> list[int]:
    """A cut of `whole`: as even as possible, or everything on the last rank but one row."""
    if even or whole < 1:
        return list(array_split_sizes(whole, world))
    return [1] + [0] * (world - 2) + [whole - 1]


def values(num_chunks: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [((12,), 0), ((7, 5), 0), ((7, 5), 1), ((2, 7, 3), 1), ((2, 3, 4, 5), -2), ((3, 6), -1), ((0, 4), 0)]
    with new_group(num_chunks) as group:
        for (shape, dim), even, (dtype, make) in product(shapes, (True, False), KINDS):
            whole = shape[dim]
            sizes = sizes_for(world, whole, even)
            full = payload(shape, dtype, name="whole")
            shards = list(full.split(sizes, dim))
            what = f"rank {rank}, {shape}, dim {dim}, {dtype}, sizes {sizes}"
            assert_bitwise_equal(tpk.all_gather(make(shards[rank]), group, dim=dim, shard_sizes=sizes), full, what)
            assert_bitwise_equal(tpk.shard(make(full), group, dim=dim, shard_sizes=sizes), shards[rank], what)
            parts = [payload(shape, dtype, rank=r, name="part") for r in range(world)]
            total = summed_once(parts)
            scattered = tpk.reduce_scatter(make(parts[rank]), group, dim=dim, shard_sizes=sizes)
            assert_bitwise_equal(scattered, total.split(sizes, dim)[rank], what)
            if even:
                default = tpk.reduce_scatter(make(parts[rank]), group, dim=dim)
                assert_bitwise_equal(default, scattered, f"{what}: default cut")
                assert_bitwise_equal(tpk.all_reduce(make(parts[rank]), group), total, what)
                assert_bitwise_equal(tpk.copy_to_group(make(full), group), full, what)
            if whole % world == 0 and even:
                assert_bitwise_equal(tpk.all_gather(make(shards[rank]), group, dim=dim), full, f"{what}: equal shards")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_collectives_move_and_sum_exactly_along_any_dimension(ranks: Pools, world: int) -> None:
    for num_chunks in (1, 3):
        ranks(world).run(values, num_chunks)


def gradients() -> None:
    """Each against autograd over the tensors of all ranks, in fp64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, dim = (2, world + 1, 3), 1
    sizes = sizes_for(world, shape[dim], even=False)
    Job = tuple[Callable[[Tensor, Any], Tensor], list[list[int]], Callable[[list[Tensor]], list[Tensor]]]
    shard_shapes = [[shape[0], size, shape[2]] for size in sizes]
    whole_shapes = [list(shape)] * world
    jobs: dict[str, Job] = {
        "all_gather": (
            lambda x, g: tpk.all_gather(x, g, dim=dim, shard_sizes=sizes),
            shard_shapes,
            lambda xs: [torch.cat(xs, dim)] * world,
        ),
        "reduce_scatter": (
            lambda x, g: tpk.reduce_scatter(x, g, dim=dim, shard_sizes=sizes),
            whole_shapes,
            lambda xs: list(torch.stack(xs).sum(0).split(sizes, dim)),
        ),
    }
    with new_group(2) as group:
        for name, (op, shapes, unfused) in jobs.items():
            xs = [payload(s, torch.float64, rank=r, name="x").requires_grad_() for r, s in enumerate(shapes)]
            mine = xs[rank].detach().clone().requires_grad_()
            y = op(mine, group)
            weights = [payload(out.shape, torch.float64, rank=r, name="dy") for r, out in enumerate(unfused(xs))]
            (y * weights[rank]).sum().backward()
            sum((out * w).sum() for out, w in zip(unfused(xs), weights, strict=True)).backward()  # type: ignore[union-attr]
            torch.testing.assert_close(mine.grad, xs[rank].grad, msg=lambda m, name=name: f"{name}: {m}")
        dys = [payload(shape, torch.float64, rank=r, name="dy") for r in range(world)]
        x = payload(shape, torch.float64, name="x").requires_grad_()
        # y is the same on all ranks, and so is its gradient
        (dx,) = torch.autograd.grad(tpk.all_reduce(x, group), x, dys[0])
        assert_bitwise_equal(dx, dys[0], "all_reduce")
        # x is the same on all ranks, its uses differ
        (dx,) = torch.autograd.grad(tpk.copy_to_group(x, group), x, dys[rank])
        assert_bitwise_equal(dx, summed_once(dys), "copy_to_group")
        (dx,) = torch.autograd.grad(tpk.shard(x, group, dim=dim, shard_sizes=sizes), x, dys[0].split(sizes, dim)[rank])
        assert_bitwise_equal(dx, dys[0], "shard")
        part = x.detach().split(sizes, dim)[rank].clone().requires_grad_()
        gathered = tpk.all_gather(part, group, dim=dim, shard_sizes=sizes, replicated_grad=True)
        (dx,) = torch.autograd.grad(gathered, part, dys[0])
        assert_bitwise_equal(dx, dys[0].split(sizes, dim)[rank], "all_gather with a replicated gradient")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_collectives_are_their_duals(ranks: Pools, world: int) -> None:
    ranks(world).run(gradients)


def outputs_are_fresh() -> None:
    """Writing into an output must not change an input, nor the other way round."""
    world = dist.get_world_size()
    with new_group() as group:
        for f in (tpk.all_gather, tpk.reduce_scatter, tpk.all_reduce, tpk.copy_to_group, tpk.shard):
            x = payload((world * 2, 3), torch.float32, name="x")
            before = x.clone()
            f(x, group).fill_(float("nan"))
            assert_bitwise_equal(x, before, f.__name__)


def test_outputs_share_no_memory_with_inputs(ranks: Pools) -> None:
    for world in (2, 3):
        ranks(world).run(outputs_are_fresh)
