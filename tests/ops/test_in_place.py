"""What an op returns can be written to, in training and after inference: it is no view, and nobody else's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS
from tpkernels.comm.groups import group_name
from tpkernels.ops.mesh_matmul import Cut
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

ROWS, K, N = 4, 6, 6
Op = Callable[[Tensor, list[Tensor], list[Tensor], str], Any]
"""(x, weights, biases, implementation) -> y, or several."""


def world() -> Any:
    return dist.group.WORLD


def on_mesh(op: str) -> Op:
    """Without peers on Y."""

    def run(x: Tensor, ws: list[Tensor], bs: list[Tensor], implementation: str) -> Tensor:
        size, alone = dist.get_world_size(), alone_groups[dist.get_rank()]
        weight = ws[0].repeat(1, size) if op == "gather_both_matmul" else ws[0].repeat(size, 1)
        dim, sizes = (1, [K] * size) if op == "gather_both_matmul" else (0, [N] * size)
        bias = bs[0]
        cut = Cut(group_name(world()), alone, dim, sizes, [weight.shape[dim]], 1, implementation)
        y: Tensor = getattr(torch.ops.tpkernels, op)(x, weight, bias, *cut)
        return y

    return run


alone_groups: dict[int, str] = {}


def raw_gather(x: Tensor, ws: list[Tensor], bs: list[Tensor], implementation: str) -> list[Tensor]:
    name = group_name(world())
    found: list[Tensor] = torch.ops.tpkernels.all_gather_matmul(
        x, ws, bs, name, "silu", 0, None, True, True, implementation
    )
    return found[:2]  # the others are kept for the backward pass


def collective(implementation: str) -> str:
    return "unfused" if implementation == "chunked" else implementation


def cross_entropy(x: Tensor, ws: list[Tensor], bs: list[Tensor], implementation: str) -> Tensor:
    labels = torch.zeros(x.shape[:-1], dtype=torch.int64)
    return tpk.nn.vocab_parallel_cross_entropy(x, labels, world(), reduction="none")


OPS: dict[str, Op] = {
    "all_gather_matmul": lambda x, w, b, i: tpk.all_gather_matmul(x, w[0], world(), bias=b[0], implementation=i),
    "all_gather_matmul of several": lambda x, w, b, i: tpk.all_gather_matmul(
        x, w, world(), bias=b, activation="silu", save_gathered=True, implementation=i
    ),
    "all_gather_matmul, gated": lambda x, w, b, i: tpk.all_gather_matmul(
        x, w, world(), bias=b, activation="swiglu", implementation=i
    ),
    "all_gather_matmul of features": lambda x, w, b, i: tpk.all_gather_matmul(
        x, w[0].repeat(1, dist.get_world_size()), world(), gather_dim=-1, implementation=i
    ),
    "torch.ops all_gather_matmul": raw_gather,
    "matmul_reduce_scatter": lambda x, w, b, i: tpk.matmul_reduce_scatter(
        x, w[0], world(), bias=b[0], implementation=i
    ),
    "matmul_reduce_scatter of features": lambda x, w, b, i: tpk.matmul_reduce_scatter(
        x, w[0], world(), bias=b[0], scatter_dim=-1, implementation=i
    ),
    "matmul_all_reduce": lambda x, w, b, i: tpk.matmul_all_reduce(x, w[0], world(), bias=b[0], implementation=i),
    "torch.ops matmul_all_reduce": lambda x, w, b, i: torch.ops.tpkernels.matmul_all_reduce(
        x, w[0], b[0], group_name(world()), i
    ),
    "copy_matmul": lambda x, w, b, i: tpk.copy_matmul(x, w, world(), bias=b, implementation=i),
    "copy_matmul, x without a gradient": lambda x, w, b, i: tpk.copy_matmul(
        x.detach(), w, world(), bias=b, activation="silu", implementation=i
    ),
    "copy_matmul, gated": lambda x, w, b, i: tpk.copy_matmul(
        x, w, world(), bias=b, activation="geglu", implementation=i
    ),
    "all_gather": lambda x, w, b, i: tpk.all_gather(x, world(), dim=-1, implementation=collective(i)),
    "reduce_scatter": lambda x, w, b, i: tpk.reduce_scatter(x, world(), implementation=collective(i)),
    "all_reduce": lambda x, w, b, i: tpk.all_reduce(x, world(), implementation=collective(i)),
    "copy_to_group": lambda x, w, b, i: tpk.copy_to_group(x, world()),
    "shard": lambda x, w, b, i: tpk.shard(x, world(), dim=-1),
    "gather_both_matmul": on_mesh("gather_both_matmul"),
    "gather_matmul_scatter": on_mesh("gather_matmul_scatter"),
    "vocab_parallel_cross_entropy": cross_entropy,
}
RETURNS_WHAT_TORCH_DOES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
"""On one rank these are F.linear, whose result for an x of rows of rows is a view (of a product, not of our ops)."""


def leaves(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(dist.get_rank())
    x, ws = torch.randn(shape).double(), [torch.randn(N, K).double() for _ in range(2)]
    torch.manual_seed(7)  # a bias is equal on all ranks
    bs = [torch.randn(N).double() for _ in range(2)]
    for leaf in (x, *ws, *bs):
        leaf.requires_grad_()
    return x, ws, bs


def as_list(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)


def trained(op: Op, shape: tuple[int, ...], implementation: str, in_place: bool) -> list[Tensor | None]:
    x, ws, bs = leaves(shape)
    outputs = as_list(op(x, ws, bs, implementation))
    total = torch.zeros((), dtype=torch.float64)
    for number, y in enumerate(outputs):
        if in_place:
            y.add_(1)
            y *= number + 2
            y[..., 0] = 0
        else:
            y = (y + 1) * (number + 2)
            y = torch.cat([torch.zeros_like(y[..., :1]), y[..., 1:]], -1)
        total = total + y.square().sum()
    total.backward()
    return [leaf.grad for leaf in (x, *ws, *bs)]


def shared_memory_of(op: Op, shape: tuple[int, ...], implementation: str) -> list[str]:
    """Pairs of outputs, or of an output and an input, in one storage."""
    x, ws, bs = leaves(shape)
    outputs = as_list(op(x, ws, bs, implementation))
    names = [f"output {i}" for i in range(len(outputs))] + ["x", "w0", "w1", "b0", "b1"]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*outputs, x, *ws, *bs)]
    return [
        f"{names[i]} and {other}"
        for i in range(len(outputs))
        for j, other in enumerate(names)
        if j != i and places[i] == places[j]
    ]


def written_after_inference(op: Op, shape: tuple[int, ...], implementation: str) -> list[str]:
    x, ws, bs = leaves(shape)
    with torch.no_grad():
        outputs = as_list(op(x, ws, bs, implementation))
    factors = [torch.full((), 2.0, dtype=torch.float64, requires_grad=True) for _ in outputs]
    wrong = []
    for number, (y, factor) in enumerate(zip(outputs, factors, strict=True)):
        before = y.sum()
        if y._is_view():
            wrong.append(f"output {number} of inference is a view")
            continue
        y.mul_(factor)
        y.sum().backward()
        if not torch.allclose(factor.grad, before):  # type: ignore[arg-type]
            wrong.append(f"output {number} of inference: gradient {factor.grad}, expected {before}")
    return wrong


def problems(implementation: str) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [dist.new_group([other]) for other in range(size)][rank]
    alone_groups[rank] = group_name(own)
    wrong = []
    for name, op in OPS.items():
        for shape in ((ROWS, K), (ROWS, 3, K)):
            what = f"{name} of {shape}: "
            try:
                written = trained(op, shape, implementation, in_place=True)
                expected = trained(op, shape, implementation, in_place=False)
            except RuntimeError as error:
                wrong.append(what + str(error).partition(".")[0])
                continue
            for leaf, one, other in zip(("x", "w0", "w1", "b0", "b1"), written, expected, strict=True):
                if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):  # type: ignore[arg-type]
                    wrong.append(what + f"gradient of {leaf} differs")
            wrong += [what + pair for pair in shared_memory_of(op, shape, implementation)]
            if size > 1 or not name.startswith(RETURNS_WHAT_TORCH_DOES):
                wrong += [what + text for text in written_after_inference(op, shape, implementation)]
    dist.destroy_process_group(own)
    return wrong


CASES = [(1, "auto"), (1, "unfused"), (2, "auto"), *((2, implementation) for implementation in IMPLEMENTATIONS)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size, implementation", CASES)
def test_outputs_can_be_written_to(ranks: Pools, world_size: int, implementation: str) -> None:
    assert ranks(world_size).run(problems, implementation) == [[]] * world_size
