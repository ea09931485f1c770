"""What test_compile.py shows the compiler of the ops with experts: their arguments as `torch.ops.tpkernels` takes them,
and both blocks that are made of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.gemm.dealt import DealtRows
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload


def grouped_op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Ops with experts: 3 of them, 2 for each token."""
    rank, world = dist.get_rank(), dist.get_world_size()
    uneven = list(range(1, world + 1))
    own, whole = uneven[rank], sum(uneven)

    def t(*shape: int, label: str = "x", grad: bool = True, r: int = rank) -> Tensor:
        return payload(shape, rank=r, name=label).requires_grad_(grad)

    experts, of_own = torch.arange(2 * whole).view(whole, 2) % 3, torch.arange(2 * own).view(own, 2) % 3
    routing, own_routing = (experts, t(whole, 2, r=0)), (of_own, t(own, 2, label="routing"))
    plain = (experts, t(whole, 2, r=0, grad=False))
    w, w2, b, none = t(3, 5, 8, label="w"), t(3, 4, 8, label="w2"), t(3, 5, label="b"), torch.empty(0, 0)
    h, down, bias = t(2 * whole, 5), t(3, 8, 5, label="down"), t(3, 8, label="bias", r=0)
    dz, dy = t(2 * whole, 5, grad=False), t(whole, 8, grad=False, r=0)
    saved = (h.detach(), down.detach(), bias.detach(), *plain)
    none_scaled: tuple[Any, ...] = (None, [], None)
    return [
        ("all_gather_grouped_matmul", (
            t(own, 8), [w, w2], [b, none], *own_routing, *none_scaled, name, None, uneven, True, False, "chunked",
        )),
        ("all_gather_grouped_matmul", (
            t(own, 8), [w, w], [b, none], *own_routing, *none_scaled, name, "swiglu", uneven, False, True, "unfused",
        )),
        ("all_gather_grouped_matmul_backward", (
            [dz], t(own, 8, grad=False), [w.detach()], experts, None, name, uneven, False, [True] * 3, "chunked",
        )),
        ("all_gather_grouped_matmul_backward", (
            [dz, dz], t(whole, 8, grad=False), [w.detach(), w.detach()], experts, t(whole, 8, grad=False), name,
            uneven, True, [True, True, False], "unfused",
        )),
        ("grouped_matmul_reduce_scatter", (h, down, bias, *routing, *none_scaled, name, uneven, "chunked")),
        ("grouped_matmul_reduce_scatter", (h, down, None, *routing, *none_scaled, name, None, "unfused")),
        ("grouped_matmul_reduce_scatter_backward", (
            t(own, 8, grad=False), *saved, name, uneven, "chunked", [True, True, True, True],
        )),
        ("grouped_matmul_reduce_scatter_backward", (
            t(own, 8, grad=False), *saved, name, uneven, "unfused", [False, True, False, False],
        )),
        ("grouped_matmul_all_reduce", (h, down, bias, *routing, *none_scaled, name, "chunked")),
        ("grouped_matmul_all_reduce_backward", (dy, *saved, name, "chunked", [True, True, True, True])),
        *dealt_op_arguments(name),
        ("copy_grouped_matmul", (t(whole, 8, r=0), [w, w2], [b, none], experts, *none_scaled, name, "chunked")),
        ("copy_grouped_matmul_backward", (
            [dz], t(whole, 8, r=0, grad=False), [w.detach()], experts, name, "chunked", [True, True, True],
        )),
        *fp8_op_arguments(name),
    ]  # fmt: skip


def dealt_op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Experts dealt out: rank r has r + 1 of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    uneven = list(range(1, world + 1))
    own, whole, number = uneven[rank], sum(uneven), rank + 1

    def t(*shape: int, label: str = "x", grad: bool = True, r: int = rank) -> Tensor:
        return payload(shape, rank=r, name=label).requires_grad_(grad)

    experts = torch.arange(2 * whole).view(whole, 2) % whole
    start = sum(uneven[:rank])
    routing = (experts[start : start + own], t(own, 2, label="routing"))
    rows = DealtRows(experts, uneven, uneven, rank)
    w, b = t(number, 5, 8, label="w"), t(number, 5, label="b")
    h, down, bias = t(rows.count, 5), t(number, 8, 5, label="down"), t(number, 8, label="bias")
    dz, received = t(rows.count, 5, grad=False), t(rows.num_tokens, 8, grad=False)
    of_all = (experts, t(whole, 2, r=0, grad=False))
    return [
        ("dispatch_grouped_matmul", (
            t(own, 8), [w, w], [b, b], *routing, None, [], None, name, "swiglu", uneven, uneven, True, True, "chunked",
        )),
        ("dispatch_grouped_matmul_backward", (
            [dz], received, [w.detach()], experts, name, uneven, uneven, [True] * 3, "chunked",
        )),
        ("grouped_matmul_combine", (
            h, down, bias, experts, t(whole, 2, r=0), None, [], None, name, uneven, uneven, "unfused",
        )),
        ("grouped_matmul_combine_backward", (
            t(own, 8, grad=False), h.detach(), down.detach(), bias.detach(), *of_all, name, uneven, uneven, "unfused",
            [True] * 4,
        )),
    ]  # fmt: skip


def fp8_op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls on fp8 operands, of 3 experts on each rank; scales per row, per expert and for all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w, h, down = (
        payload(shape, rank=rank).to(torch.float8_e4m3fn) for shape in ((2, 8), (3, 5, 8), (4 * world, 5), (3, 8, 5))
    )
    experts, weights = torch.arange(4 * world).view(-1, 2) % 3, payload((2 * world, 2))
    bias, one, per_token = payload((3, 5), torch.float16), torch.ones(()), torch.full((2, 1), 0.5)
    own, per_expert = (experts[:2], weights[:2]), torch.full((3, 1, 1), 2.0)
    rows = DealtRows(experts, [3] * world, [2] * world, rank)
    return [
        ("all_gather_grouped_matmul", (
            x, [w, w], [bias, bias], *own, per_token, [per_expert, one], torch.float16, name, "swiglu", None, True,
            False, "chunked",
        )),
        ("dispatch_grouped_matmul", (
            x, [w], [], *own, one, [torch.full((3, 5, 1), 0.5)], torch.float32, name, None, None, None, False, False,
            "unfused",
        )),
        ("copy_grouped_matmul", (x, [w], [bias], own[0], per_token, [one], torch.float16, name, "chunked")),
        ("grouped_matmul_reduce_scatter", (
            h, down, None, experts, weights, one, [per_expert], torch.bfloat16, name, None, "chunked",
        )),
        ("grouped_matmul_combine", (
            h[: rows.count], down, None, experts, weights, one, [per_expert], torch.bfloat16, name, None, None,
            "unfused",
        )),
    ]  # fmt: skip


def dealt(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """On this rank's tokens, with three experts on each of the ranks."""
    scores = x @ router.T
    weights, experts = torch.cat([scores, scores.flip(1).sin()], 1).float().softmax(-1).topk(2)
    h, whole = tpk.dispatch_grouped_matmul(
        x, (gate, up), tpk.Routing(experts, weights), group, activation="swiglu", implementation="chunked"
    )
    return tpk.grouped_matmul_combine(h, down, whole, group, implementation="chunked")


def scattered(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """On this rank's tokens."""
    weights, experts = (x @ router.T).float().softmax(-1).topk(2)
    h, whole = tpk.all_gather_grouped_matmul(
        x, (gate, up), tpk.Routing(experts, weights), group, activation="swiglu", implementation="chunked"
    )
    return tpk.grouped_matmul_reduce_scatter(h, down, whole, group, implementation="chunked")


def everywhere(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """On tokens that all ranks have."""
    weights, experts = (x @ router.T).float().softmax(-1).topk(2)
    routing = tpk.Routing(experts, weights)
    h = tpk.copy_grouped_matmul(x, (gate, up), routing, group, activation="geglu", implementation="unfused")
    return tpk.grouped_matmul_all_reduce(h, down, routing, group, implementation="unfused")


def grouped_blocks_compiled(backend: str, full: bool) -> int:
    """Values, gradients and strides of whole graphs against eager; each with or, in full, with and without autocast."""
    rank, compared = dist.get_rank(), 0
    with new_group(2) as group:
        for block in (scattered, everywhere, dealt):
            for autocast in (False, True) if full else (block is dealt,):
                of_x = 0 if block is everywhere else rank

                def run(f: Any, autocast: bool = autocast, of_x: int = of_x) -> list[Tensor]:
                    shapes = {"x": (6, 8), "router": (3, 8), "gate": (3, 5, 8), "up": (3, 5, 8), "down": (3, 8, 5)}
                    shared = {"x": of_x, "router": 0}
                    leaves = [
                        payload(shape, rank=shared.get(name, rank), name=name).requires_grad_()
                        for name, shape in shapes.items()
                    ]
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                        y = f(*leaves, group)
                    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
                    return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

                torch._dynamo.reset()
                compiled = torch.compile(block, fullgraph=True, backend=backend)
                with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=block is dealt):
                    found = run(compiled)
                for now, before in zip(found, run(block), strict=True):
                    assert now.stride() == before.stride()
                    assert_bitwise_equal(now.detach(), before.detach(), f"{block.__name__}, {autocast=}")
                    compared += 1
    return compared
