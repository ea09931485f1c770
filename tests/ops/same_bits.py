"""Random calls of the ops, cut for any degree, whose results are put together again to be compared bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.comm.groups import resolve
from tpkernels.gemm import canonical, fp8, gaps
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import COPY, FUSED, GATHER, REDUCE, SCATTER, strided

SAME_BITS = 8

Cut = int | Literal["same"]
"""The dimension along which ranks hold parts, or that all hold the whole."""
Result = tuple[str, Cut, Tensor]
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64, fp8.DTYPE)


@dataclass(frozen=True)
class Draw:
    """One call in terms of the whole tensors; its widths are those of one of the blocks of N and of K."""

    op: str
    lead: tuple[int, ...]
    """Dimensions of x before the features."""
    columns: tuple[int, ...]
    """Of one block, by weight; where N is not cut, of all blocks together it is 8 times that."""
    contraction: int
    """Of one block; where K is not cut it is 8 times that."""
    dim: int
    dtype: torch.dtype
    bias: bool
    activation: str | None
    strided: bool
    seed: int

    @property
    def is_fp8(self) -> bool:
        """Whether it has scales, one for all in every third draw, else one per row; and no gradient."""
        return self.dtype == fp8.DTYPE

    @property
    def out_dtype(self) -> torch.dtype:
        return (torch.float32, torch.bfloat16, torch.float16)[self.seed % 3] if self.is_fp8 else self.dtype

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype if name[0] in "xw" else torch.float32 if name[0] == "s" else self.out_dtype


def draw(seed: int) -> Draw:
    pick = random.Random(seed)
    op = pick.choice(FUSED)
    lead = pick.choice(
        [(pick.choice([1, 2, 7, 8, 31, 64, 130, 300, 513, 1030]),), (pick.randint(1, 3), pick.randint(1, 90))]
    )
    column = op in (GATHER, COPY)
    activation = pick.choice([None, None, "gelu", "silu", "relu", "gelu_tanh", "swiglu", "geglu"]) if column else None
    count = 2 if activation in ("swiglu", "geglu") else pick.choice([1, 1, 2, 3]) if column else 1
    widths = [1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 48, 64, 80]
    columns = [pick.choice(widths)] * count if activation else [pick.choice(widths) for _ in range(count)]
    dims = list(range(len(lead))) + ([len(lead)] if op in (GATHER, SCATTER) else [])
    dtypes = DTYPES[:-1] if op == COPY else DTYPES
    return Draw(
        op, lead, tuple(columns), pick.choice(widths), pick.choice(dims), pick.choice(dtypes),
        pick.random() < 0.5, activation, pick.random() < 0.2, seed,
    )  # fmt: skip


def whole(of: Draw, name: str, shape: Sequence[int]) -> Tensor:
    """Equal on all ranks."""
    generator = torch.Generator().manual_seed(of.seed * 1000 + sum(map(ord, name)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of.dtype_of(name))


def scales_of(of: Draw, rank: int, world: int) -> tuple[Tensor, list[Tensor]]:
    """Of this rank's x and weights; over a contraction that is cut they are equal."""
    shapes = [(*of.lead, 1), *[(SAME_BITS * width, 1) for width in of.columns]]
    cuts: list[Cut] = ["same"] * len(shapes)
    if of.seed % 3 == 2:
        shapes = [(1,)] * len(shapes)
    elif of.op == GATHER:
        cuts = [of.dim if of.dim < len(of.lead) else "same", *[0] * len(of.columns)]
    x, *weights = (
        part(whole(of, f"scale {i}", shape).abs() + 0.1, cut, rank, world)
        for i, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))
    )
    return x, weights


def part(x: Tensor, cut: Cut, rank: int, world: int) -> Tensor:
    if cut == "same":
        return x
    start = array_split_sizes(x.shape[cut], world)
    return x.narrow(cut, sum(start[:rank]), start[rank]).contiguous()


@dataclass(frozen=True)
class Call:
    """The operands of one draw on this rank, and how its results are cut."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    upstream: list[Tensor]
    cuts: dict[str, Cut]
    options: dict[str, Any]


def cut_call(of: Draw, rank: int, world: int) -> Call:
    column = of.op in (GATHER, COPY)
    k = SAME_BITS * of.contraction
    ns = [SAME_BITS * width for width in of.columns]
    x_shape = (*of.lead, k)
    x_cut: Cut = of.dim if of.op == GATHER else "same" if of.op == COPY else len(of.lead)
    y_cut: Cut = len(of.lead) if column else of.dim if of.op == SCATTER else "same"
    w_cut: Cut = 0 if column else 1
    b_cut: Cut = 0 if column else "same"
    x = part(whole(of, "x", x_shape), x_cut, rank, world)
    outputs = ns[:1] if of.activation in ("swiglu", "geglu") else ns
    options: dict[str, Any] = {"activation": of.activation} if column else {}
    if of.op == GATHER:
        options |= {"gather_dim": of.dim, "shard_sizes": list(array_split_sizes(x_shape[of.dim], world))}
    if of.op == SCATTER:
        options["scatter_dim"] = of.dim
    if of.is_fp8:
        scale_x, scales = scales_of(of, rank, world)
        options |= {"scale_x": scale_x, "scale_weight": scales if len(scales) > 1 else scales[0]}
        options["out_dtype"] = of.out_dtype
    return Call(
        strided(x) if of.strided else x,
        [part(whole(of, f"w{i}", (n, k)), w_cut, rank, world) for i, n in enumerate(ns)],
        [part(whole(of, f"b{i}", (n,)), b_cut, rank, world) if of.bias else None for i, n in enumerate(ns)],
        [part(whole(of, f"dy{i}", (*of.lead, n)), y_cut, rank, world) for i, n in enumerate(outputs)],
        {"y": y_cut, "dx": x_cut, "dw": w_cut, "db": b_cut},
        options,
    )


def run(of: Draw, group: Any, implementation: str) -> list[Result]:
    """What the call gives on this rank, forward and, where there is one, backward."""
    call = cut_call(of, dist.get_rank(group), dist.get_world_size(group))
    leaves = [call.x, *call.weights, *[bias for bias in call.biases if bias is not None]]
    for leaf in () if of.is_fp8 else leaves:
        leaf.requires_grad_()
    single = len(call.weights) == 1
    functions: dict[str, Any] = {
        GATHER: tpk.all_gather_matmul,
        SCATTER: tpk.matmul_reduce_scatter,
        REDUCE: tpk.matmul_all_reduce,
        COPY: tpk.copy_matmul,
    }
    weight: Any = call.weights[0] if single else call.weights
    bias: Any = None if not of.bias else call.biases[0] if single else call.biases
    y: Any = functions[of.op](call.x, weight, group, bias=bias, implementation=implementation, **call.options)
    ys = [y] if isinstance(y, Tensor) else list(y)
    if not of.is_fp8:
        torch.autograd.backward(ys, call.upstream)
    grads = [leaf.grad for leaf in leaves]
    names = ["dx", *["dw"] * len(call.weights), *["db"] * (len(leaves) - 1 - len(call.weights))]
    results = [("y", call.cuts["y"], one.detach()) for one in ys]
    return results + [
        (name, call.cuts[name], grad) for name, grad in zip(names, grads, strict=True) if grad is not None
    ]


def run_all(
    draws: Sequence[Draw], implementation: str, num_chunks: int | None, fault: str | None = None
) -> list[list[Result]]:
    """On every rank, on one new group; ``fault``: one of FAULTS, in the arithmetic of all ranks."""
    with new_group(num_chunks) as group, seeded(fault):
        resolve(group).keep_same_bits(SAME_BITS)
        return [run(of, group, implementation) for of in draws]


def left_to_right(parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
    total = sum(parts[1:], parts[0])
    out.copy_(total if bias is None else total + bias)


def _one_block(tree: Any, xs: Any, matrices: Any, blocks: int, sums: Any = None) -> None:
    _whole_subtree(tree, xs, matrices, 1, sums)


def _scaled_behind(tree: Any, xs: Any, matrices: Any, blocks: int, sums: Any = None) -> None:
    if not isinstance(xs[0], fp8.Scaled):
        _whole_subtree(tree, xs, matrices, blocks, sums)
        return
    (x,), (matrix,) = xs, matrices
    unscaled = [fp8.Scaled(one.numbers, torch.ones_like(one.scale)) for one in (x, matrix)]
    _whole_subtree(tree, unscaled[:1], unscaled[1:], blocks, sums)
    tree.complete().mul_(x.scale).mul_(matrix.scale)


def _wide_panels(x: Tensor, matrix: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
    return _by_blocks(x, matrix, bias, 1)


_whole_subtree, _by_blocks = canonical.Subtree.__init__, canonical.columns_of_product
FAULTS: dict[str, tuple[object, str, object]] = {
    "tree order": (canonical, "top_of_tree", left_to_right),
    "a rank sums its part of K in one call": (canonical.Subtree, "__init__", _one_block),
    "a rank scales the sum of its blocks": (canonical.Subtree, "__init__", _scaled_behind),
    "panel shape": (canonical, "columns_of_product", _wide_panels),
    "chunk rows": (canonical, "ROWS", 96),
    "rows of the operand not dense": (canonical, "dense", lambda x, place="": x),
}


@contextmanager
def seeded(fault: str | None) -> Iterator[None]:
    if fault is None:
        yield
        return
    owner, name, wrong = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrong)
        yield


def calls_of(draws: Sequence[Draw], implementation: str, fault: str | None = None) -> list[Counter[str]]:
    """The library's calls that each draw makes on this rank: sizes, strides and alignment of all operands.

    Those with dense operands, which the others have been compared with.
    """
    found: list[Counter[str]] = []

    def recorded(name: str, function: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            tensors = [one for one in args if isinstance(one, Tensor)]
            seen = [(tuple(one.shape), one.stride(), one.data_ptr() % 64) for one in tensors]
            found[-1][f"{name}{seen}"] += 1
            return function(*args, **options)

        return wrapper

    with new_group(None) as group, seeded(fault), pytest.MonkeyPatch.context() as patch:
        resolve(group).keep_same_bits(SAME_BITS)
        patch.setattr(gaps, "keeps_bits", lambda *_: False)
        for name in ("mm", "addmm"):
            patch.setattr(torch, name, recorded(name, getattr(torch, name)))
        for of in draws:
            found.append(Counter())
            run(of, group, implementation)
    return found


def together(of_ranks: Sequence[Result]) -> tuple[str, Tensor]:
    """The whole of one result; what all ranks have must be equal on all."""
    name, cut, first = of_ranks[0]
    if cut != "same":
        return name, torch.cat([tensor for _, _, tensor in of_ranks], cut)
    for rank, (_, _, tensor) in enumerate(of_ranks):
        assert_same(tensor, first, f"{name} on rank {rank} and on rank 0")
    return name, first


def bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    differ = actual.contiguous() != expected.contiguous()
    assert torch.equal(bits(actual), bits(expected)), f"{what}: {int(differ.sum())} of {differ.numel()} elements differ"
