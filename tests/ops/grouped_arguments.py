"""Arguments of the ops with experts as `torch.ops.tpkernels` takes them, for the checks of test_compile.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    return [
        ("all_gather_grouped_matmul", (
            t(own, 8), [w, w2], [b, none], *own_routing, name, None, uneven, True, False, "chunked",
        )),
        ("all_gather_grouped_matmul", (
            t(own, 8), [w, w], [b, none], *own_routing, name, "swiglu", uneven, False, True, "unfused",
        )),
        ("all_gather_grouped_matmul_backward", (
            [dz], t(own, 8, grad=False), [w.detach()], experts, None, name, uneven, False, [True] * 3, "chunked",
        )),
        ("all_gather_grouped_matmul_backward", (
            [dz, dz], t(whole, 8, grad=False), [w.detach(), w.detach()], experts, t(whole, 8, grad=False), name,
            uneven, True, [True, True, False], "unfused",
        )),
        ("grouped_matmul_reduce_scatter", (h, down, bias, *routing, name, uneven, "chunked")),
        ("grouped_matmul_reduce_scatter", (h, down, None, *routing, name, None, "unfused")),
        ("grouped_matmul_reduce_scatter_backward", (
            t(own, 8, grad=False), *saved, name, uneven, "chunked", [True, True, True, True],
        )),
        ("grouped_matmul_reduce_scatter_backward", (
            t(own, 8, grad=False), *saved, name, uneven, "unfused", [False, True, False, False],
        )),
        ("grouped_matmul_all_reduce", (h, down, bias, *routing, name, "chunked")),
        ("grouped_matmul_all_reduce_backward", (dy, *saved, name, "chunked", [True, True, True, True])),
        ("copy_grouped_matmul", (t(whole, 8, r=0), [w, w2], [b, none], experts, name, "chunked")),
        ("copy_grouped_matmul_backward", (
            [dz], t(whole, 8, r=0, grad=False), [w.detach()], experts, name, "chunked", [True, True, True],
        )),
    ]  # fmt: skip
