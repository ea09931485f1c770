"""The sum over the ranks, the residual and the norm in one op: its values, its gradients, and what it refuses.

The sums are judged bit for bit, because the ops round where the single ones do; the normed rows and all gradients
against fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS, new_group
from tpkernels.errors import GroupMismatch
from tpkernels.gemm import residual_norm
from tpkernels.ops.contract import ResidualNorm
from tpkernels.partition import array_split_sizes
from tpkernels.testing.cases import DTYPES
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools, RanksFailed

pytestmark = pytest.mark.gloo

EPS = 1e-5
SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
# Rows, K of each rank, columns. The last has several blocks of rows (shared_memory.BLOCK_BYTES) on each rank.
SHAPES = ((7, 5, 24), (1, 8, 16), (150, 16, 1100))


class Operands:
    """Of all ranks, in fp64 for a reference, and this rank's in ``dtype``."""

    def __init__(self, op: str, shape: tuple[int, int, int], dtype: torch.dtype, batched: bool = False) -> None:
        self.op, self.world, self.rank = op, dist.get_world_size(), dist.get_rank()
        rows, k, columns = shape
        x_shape, y_shape = ([2, rows, k], [2, rows, columns]) if batched else ([rows, k], [rows, columns])
        self.dim = 1 if batched else 0
        self.xs = [payload(x_shape, dtype, rank=r, name="x") for r in range(self.world)]
        self.ws = [payload([columns, k], dtype, rank=r, name="w") for r in range(self.world)]
        self.bias = payload([columns], dtype, rank=0, name="b")
        self.residual = payload(y_shape, dtype, rank=0, name="residual")
        self.norm_weight = payload([columns], dtype, rank=0, name="norm")
        self.sizes = array_split_sizes(rows, self.world)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of what is like the result."""
        return whole if self.op == REDUCE else whole.split(self.sizes, self.dim)[self.rank].contiguous()

    def mine(self) -> list[Tensor]:
        return [self.xs[self.rank], self.ws[self.rank], self.bias, self.own(self.residual), self.norm_weight]


def run(op: str, own: list[Tensor], implementation: str, dim: int = 0, group: Any = None) -> tuple[Tensor, Tensor]:
    x, w, bias, residual, norm_weight = own
    options = {"scatter_dim": dim} if op == SCATTER else {}
    return getattr(tpk, op)(
        x, w, group or dist.group.WORLD, bias=bias, residual=residual, norm_weight=norm_weight, eps=EPS,
        implementation=implementation, **options,
    )  # fmt: skip


def check_values(op: str, shape: tuple[int, int, int], dtype: torch.dtype, implementation: str, batched: bool) -> None:
    given = Operands(op, shape, dtype, batched)
    own, what = given.mine(), f"{op} {shape} {dtype} {implementation}"
    kept = [tensor.clone() for tensor in own]
    options = {"scatter_dim": given.dim} if op == SCATTER else {}
    y = getattr(tpk, op)(own[0], own[1], dist.group.WORLD, bias=own[2], implementation=implementation, **options)
    for call in range(3):  # the first agrees, later ones of few rows take the short way
        normed, sums = run(op, own, implementation, given.dim)
        assert_bitwise_equal(sums, y + own[3], f"{what}: sums of call {call}")
        exact = F.rms_norm(sums.double(), (shape[2],), own[4].double(), EPS)
        roundings = torch.finfo(dtype).eps + (shape[2] / 16 + 8) * torch.finfo(residual_norm.of_scales(dtype)).eps
        assert ((normed.double() - exact).abs() <= roundings * exact.abs()).all(), f"{what}: normed, call {call}"
        assert normed.is_contiguous() and normed.shape == sums.shape == y.shape and normed.dtype == y.dtype
    for before, now in zip(kept, own, strict=True):
        assert_bitwise_equal(now, before, f"{what}: an input after the calls")


def values(implementation: str) -> None:
    for op in (REDUCE, SCATTER):
        for shape in SHAPES:
            for dtype in DTYPES if shape is SHAPES[0] else (torch.bfloat16,):
                check_values(op, shape, dtype, implementation, batched=False)
        check_values(op, SHAPES[0], torch.float32, implementation, batched=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("world", [2, 3])
def test_values_are_those_of_the_single_ops(ranks: Pools, world: int, implementation: str) -> None:
    ranks(world).run(values, implementation)


def a_block_is_left_out(implementation: str) -> None:
    fill = ResidualNorm.fill
    ResidualNorm.fill = lambda self, rows, start: fill(self, rows, start) if start == 0 else None  # type: ignore[method-assign]
    try:
        check_values(REDUCE, SHAPES[-1], torch.bfloat16, implementation, batched=False)
    finally:
        ResidualNorm.fill = fill  # type: ignore[method-assign]


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name == "shared_memory"])
def test_the_check_sees_rows_that_were_left_out(ranks: Pools, implementation: str) -> None:
    with pytest.raises(RanksFailed, match="sums of call 0"):
        ranks(2).run(a_block_is_left_out, implementation)


# ---------------------------------------------------------------- gradients


def check_gradients(op: str, implementation: str, used: str, needs: tuple[bool, ...] = (True,) * 5) -> None:
    given = Operands(op, SHAPES[0], torch.float64, batched=True)
    own = [tensor.clone().requires_grad_(need) for tensor, need in zip(given.mine(), needs, strict=True)]
    results = run(op, own, implementation, given.dim)
    whole = given.residual.shape
    upstream = {name: payload(whole, torch.float64, name=f"d{name}") for name in ("normed", "sums")}
    terms = [
        (result * given.own(upstream[name])).sum()
        for name, result in zip(upstream, results, strict=True)
        if used in (name, "both")
    ]
    torch.stack(terms).sum().backward()

    leaves = [tensor.clone().requires_grad_() for tensor in (*given.xs, *given.ws)]
    xs, ws = leaves[: given.world], leaves[given.world :]
    bias, residual, weight = (t.clone().requires_grad_() for t in (given.bias, given.residual, given.norm_weight))
    sums = torch.stack([F.linear(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0) + bias + residual
    normed = F.rms_norm(sums, (sums.shape[-1],), weight, EPS)
    expected = [(r * upstream[n]).sum() for n, r in (("normed", normed), ("sums", sums)) if used in (n, "both")]
    torch.stack(expected).sum().backward()
    references = [xs[given.rank].grad, ws[given.rank].grad, bias.grad, residual.grad, weight.grad]
    for name, tensor, reference, need in zip(
        ("x", "weight", "bias", "residual", "norm_weight"), own, references, needs, strict=True
    ):
        what = f"{op}, {implementation}, {used} used, needs {needs}: gradient of {name}"
        if not need:
            assert tensor.grad is None, what
            continue
        if reference is None:
            reference = torch.zeros_like(given.norm_weight)
        reference = given.own(reference) if name == "residual" else reference
        actual = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-11, msg=lambda m, w=what: f"{w}: {m}")


def gradients(implementation: str) -> None:
    for op in (REDUCE, SCATTER):
        for used in ("both", "normed", "sums"):
            check_gradients(op, implementation, used)
        check_gradients(op, implementation, "both", (False, False, False, False, True))
        check_gradients(op, implementation, "both", (True, False, False, False, False))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_those_of_unfused_autograd(ranks: Pools, implementation: str) -> None:
    ranks(3).run(gradients, implementation)


def nobody_sums_the_gradient_of_the_weight() -> None:
    backward = torch.ops.tpkernels.add_norm_backward

    class Alone:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.ops.tpkernels, name)

        def add_norm_backward(self, *args: Any) -> Any:
            return backward(*args[:-1], None)

    from tpkernels.ops import residual_norm as module

    class Torch:
        ops = type("Ops", (), {"tpkernels": Alone()})

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    module.torch = Torch()  # type: ignore[assignment]
    try:
        check_gradients(SCATTER, "unfused", "both")
    finally:
        module.torch = torch


def test_the_check_sees_a_gradient_that_nobody_sums(ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match="gradient of norm_weight"):
        ranks(2).run(nobody_sums_the_gradient_of_the_weight)


# ---------------------------------------------------------------- other ways to call it


def compiled(ops: Sequence[str]) -> None:
    for op in ops:
        given = Operands(op, SHAPES[0], torch.float64)

        def step(*own: Tensor, op: str = op) -> Tensor:
            normed, sums = run(op, list(own), "unfused")
            return (normed * normed).sum() + sums.sin().sum()

        grads = []
        for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            own = [tensor.clone().requires_grad_() for tensor in given.mine()]
            function(*own).backward()
            grads.append([tensor.grad for tensor in own])
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-13, atol=1e-13)


def test_it_compiles_without_graph_breaks(ranks: Pools, full: bool) -> None:
    ranks(2).run(compiled, (SCATTER, REDUCE) if full else (SCATTER,))


def in_fp8() -> None:
    given = Operands(REDUCE, (6, 32, 16), torch.bfloat16)
    x, w, _, residual, norm_weight = given.mine()
    (x8, scale_x), (w8, scale_w) = tpk.quantize_fp8(x), tpk.quantize_fp8(w)
    scales = {"scale_x": scale_x, "scale_weight": scale_w}
    for op in (REDUCE, SCATTER):
        rows = residual if op == REDUCE else residual.split(given.sizes)[given.rank].contiguous()
        y = getattr(tpk, op)(x8, w8, dist.group.WORLD, **scales)
        normed, sums = getattr(tpk, op)(
            x8, w8, dist.group.WORLD, residual=rows, norm_weight=norm_weight, eps=EPS, **scales
        )
        assert_bitwise_equal(sums, y + rows, f"{op} in fp8")
        assert_bitwise_equal(normed, torch.ops.tpkernels.add_norm(y, rows, norm_weight, EPS)[0], f"{op} in fp8")


def test_fp8_operands_are_summed_and_normalised_in_the_result_dtype(ranks: Pools) -> None:
    ranks(2).run(in_fp8)


def alone() -> None:
    given = Operands(REDUCE, SHAPES[0], torch.float64)
    for op in (REDUCE, SCATTER):
        check_gradients(op, "auto", "both")
        normed, sums = run(op, given.mine(), "auto")
        expected = F.linear(*given.mine()[:3]) + given.residual
        torch.testing.assert_close(sums, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(normed, F.rms_norm(expected, (24,), given.norm_weight, EPS), rtol=1e-12, atol=1e-12)


def test_one_rank_computes_the_same(ranks: Pools) -> None:
    ranks(1).run(alone)


# ---------------------------------------------------------------- what is refused


def refusals() -> None:
    with new_group() as group:
        check_refusals(group)


def check_refusals(group: Any) -> None:
    given = Operands(REDUCE, (4, 8, 16), torch.float32)
    x, w, _, residual, norm_weight = given.mine()

    def refused(match: str, call: Callable[..., Any], **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            call(x, w, group, **options)

    both = {"residual": residual, "norm_weight": norm_weight}
    for call in (tpk.matmul_all_reduce, tpk.matmul_reduce_scatter):
        refused("residual and norm_weight go together .* got no norm_weight", call, residual=residual)
        refused("residual and norm_weight go together .* got no residual", call, norm_weight=norm_weight)
        refused("residual and norm_weight go together .* got no residual", call, eps=EPS)
        refused(r"residual must have the shape of the result", call, residual=residual[:1], norm_weight=norm_weight)
    reduce = tpk.matmul_all_reduce
    refused(r"norm_weight must have shape \(16,\), got \(15,\)", reduce, **{**both, "norm_weight": norm_weight[:15]})
    refused(r"eps \(-1.0\) must be a finite number, at least 0", reduce, **both, eps=-1.0)
    refused(r"eps \(nan\) must be a finite number", reduce, **both, eps=float("nan"))
    refused("residual must have the dtype of the product", reduce, **{**both, "residual": residual.double()})
    with torch.autocast("cpu", torch.bfloat16):
        refused("under autocast the autocast dtype", reduce, **both)
    refused(
        r"scatter_dim \(-1\) must not be the features", tpk.matmul_reduce_scatter,
        scatter_dim=-1, residual=residual[:, :8], norm_weight=norm_weight,
    )  # fmt: skip
    normed, _ = reduce(x, w, group, **both)  # the group goes on
    assert normed.shape == residual.shape


def test_bad_arguments_are_refused_on_every_rank_and_the_group_goes_on(ranks: Pools) -> None:
    ranks(2).run(refusals)


def default_eps_under_autocast(op: str) -> None:
    """So small are the sums that the norm is that of eps, which is 65,536 times as large in bf16 as in fp32."""
    given = Operands(op, (4, 8, 16), torch.float32)
    x, w, _, residual, norm_weight = (tensor * 1e-4 for tensor in given.mine())
    with new_group() as group, torch.autocast("cpu", torch.bfloat16):
        options = {"residual": residual.bfloat16(), "norm_weight": torch.ones_like(norm_weight).bfloat16()}
        normed, sums = getattr(tpk, op)(x, w, group, **options)
    close = F.rms_norm(sums.double(), sums.shape[-1:], eps=torch.finfo(torch.bfloat16).eps)
    assert normed.dtype == torch.bfloat16
    assert (normed.double() - close).abs().max() <= 2**-7 * close.abs().max(), (normed, close)


@pytest.mark.parametrize("op", [SCATTER, REDUCE])
def test_the_default_eps_is_that_of_the_dtype_that_autocast_computes_in(ranks: Pools, op: str) -> None:
    ranks(2).run(default_eps_under_autocast, op)


def other_eps() -> None:
    x, w, _, residual, norm_weight = Operands(REDUCE, (4, 8, 16), torch.float32).mine()
    with new_group() as group, pytest.raises(GroupMismatch, match=r"residual and RMS norm, eps=0\.1"):
        tpk.matmul_all_reduce(
            x, w, group, residual=residual, norm_weight=norm_weight, eps=0.1 * (1 + dist.get_rank(group))
        )


def test_ranks_with_another_eps_are_a_mismatch(ranks: Pools) -> None:
    ranks(2).run(other_eps)
