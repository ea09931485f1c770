"""One feed-forward block three ways, equal bit for bit: ops by hand, modules, and ``parallelize`` from a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.nn import ColumnParallelLinear, LayerNorm, RowParallelLinear
from tpkernels.partition import array_split_sizes, chunk_sizes, offsets
from tpkernels.sharding import Column, Replicate, Row
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HIDDEN, LENGTH = 8, 13, 7


class Block(nn.Module):
    """What a user has: y = x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x), **options)), **options)
        return y


Result = tuple[Tensor, Tensor, dict[str, Tensor]]
"""y, dx and the gradients of this rank's parts of the parameters."""


def by_hand(plain: Block, x: Tensor, g: Tensor, sequence_parallel: bool) -> Result:
    """Slices of the weights, three ops, and the one sum that a norm on a shard of the sequence needs."""
    mesh = tp_mesh()
    sizes, rank = chunk_sizes(HIDDEN, mesh.size()), mesh.get_local_rank()
    part = slice(offsets(sizes)[rank], offsets(sizes)[rank] + sizes[rank])
    leaves = {
        "norm.weight": plain.norm.weight,
        "norm.bias": plain.norm.bias,
        "up.weight": plain.up.weight[part],
        "up.bias": plain.up.bias[part],
        "down.weight": plain.down.weight[:, part],
        "down.bias": plain.down.bias,
    }
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    scale, shift = leaves["norm.weight"], leaves["norm.bias"]
    if sequence_parallel:
        scale, shift = tpk.copy_to_group(torch.stack([scale, shift]), mesh).unbind()
    h = F.layer_norm(x, (WIDTH,), scale, shift)
    up, down = (leaves["up.weight"], leaves["up.bias"]), (leaves["down.weight"], leaves["down.bias"])
    if sequence_parallel:
        cut: dict[str, Any] = {"shard_sizes": array_split_sizes(LENGTH, mesh.size())}
        hidden = F.gelu(tpk.all_gather_matmul(h, up[0], mesh, bias=up[1], gather_dim=-2, **cut))
        y = x + tpk.matmul_reduce_scatter(hidden, down[0], mesh, bias=down[1], scatter_dim=-2, **cut)
    else:
        hidden = F.gelu(tpk.copy_matmul(h, up[0], mesh, bias=up[1]))
        y = x + tpk.matmul_all_reduce(hidden, down[0], mesh, bias=down[1])
    y.backward(g)
    return y, cast(Tensor, x.grad), {name: cast(Tensor, leaf.grad) for name, leaf in leaves.items()}


def run(block: nn.Module, x: Tensor, g: Tensor, sequence_parallel: bool) -> Result:
    sizes = array_split_sizes(LENGTH, tp_mesh().size())
    y = block(x, **({"shard_sizes": sizes} if sequence_parallel else {}))
    y.backward(g)
    grads = {name: cast(DTensor, parameter.grad).to_local() for name, parameter in block.named_parameters()}
    return y, cast(Tensor, x.grad), grads


def by_modules(plain: Block, x: Tensor, g: Tensor, sequence_parallel: bool) -> Result:
    mesh = tp_mesh()
    block: Any = copy.deepcopy(plain)
    block.norm = LayerNorm.from_norm(plain.norm, mesh, sequence_parallel=sequence_parallel)
    block.up = ColumnParallelLinear.from_linear(plain.up, mesh, sequence_parallel=sequence_parallel)
    block.down = RowParallelLinear.from_linear(plain.down, mesh, sequence_parallel=sequence_parallel)
    return run(block, x, g, sequence_parallel)


def by_plan(plain: Block, x: Tensor, g: Tensor, sequence_parallel: bool) -> Result:
    block = copy.deepcopy(plain)
    plan: dict[str, Any] = {"up": "column", "down": "row"}
    if sequence_parallel:
        plan = {"up": Column(sequence_parallel=True), "down": Row(sequence_parallel=True)}
        plan["norm"] = Replicate(sequence_parallel=True)
    return run(tpk.parallelize(block, tp_mesh(), plan=plan), x, g, sequence_parallel)


def three_ways() -> None:
    ways: dict[str, Callable[[Block, Tensor, Tensor, bool], Result]] = {"modules": by_modules, "a plan": by_plan}
    for sequence_parallel in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            plain = Block().to(dtype)
            x, g = torch.randn(2, 2, LENGTH, WIDTH, dtype=dtype).unbind()
            if sequence_parallel:
                x, g = (tpk.array_split(one, tp_mesh().size(), 1)[tp_mesh().get_local_rank()] for one in (x, g))
            expected = by_hand(plain, x.clone().requires_grad_(), g, sequence_parallel)
            for name, way in ways.items():
                actual = way(plain, x.clone().requires_grad_(), g, sequence_parallel)
                what = f"{name}, sequence_parallel={sequence_parallel}, {dtype}"
                assert_bitwise_equal(actual[0], expected[0], f"y by {what}")
                assert_bitwise_equal(actual[1], expected[1], f"dx by {what}")
                assert actual[2].keys() == expected[2].keys()
                for parameter, gradient in expected[2].items():
                    assert_bitwise_equal(actual[2][parameter], gradient, f"gradient of {parameter} by {what}")


@pytest.mark.parametrize("world", [2, 3])
def test_ops_by_hand_modules_and_a_plan_give_the_same_bits(ranks: Pools, world: int) -> None:
    ranks(world).run(three_ways, timeout=LIMIT_S)
