"""What autograd can be asked for around an op: gradcheck, no gradients, double backward, autocast, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.ops.support import new_group, own_part
from tpkernels.testing.cases import COPY, FUSED, GATHER, REDUCE, SCATTER, Case, call, operands
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


# ---------------------------------------------------------------- gradcheck


def analytic(case: Case, group: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of the whole job at every operand of every rank, from each rank's own backward pass."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    counts = (1 if case.op == COPY else world, world * len(case.ns))
    shared_b = case.op in (SCATTER, REDUCE)
    x = leaves[0 if case.op == COPY else rank]
    ws = leaves[counts[0] + rank * len(case.ns) :][: len(case.ns)]
    bs = leaves[sum(counts) + (0 if shared_b else rank * len(case.ns)) :][: len(case.ns)]
    outs, gathered = call(case, (x, list(ws), list(bs)), group)
    outs = outs if gathered is None else [*outs, gathered]
    weight = 1 if case.op == REDUCE else 1 + rank
    torch.stack([(out.sin() * weight).sum() for out in outs]).sum().backward()
    shared = {0} if case.op == COPY else set()
    shared |= {sum(counts)} if shared_b else set()
    gradients = []
    for position, leaf in enumerate(leaves):
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if position not in shared:  # a shared operand's gradient is the full one on every rank
            dist.all_reduce(grad, group=group)
        gradients.append(grad)
    return gradients


def loss_of(case: Case, group: Any, inputs: list[Tensor]) -> float:
    """The job's loss, by the op under test, without gradients."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    counts = (1 if case.op == COPY else world, world * len(case.ns))
    with torch.no_grad():
        x = inputs[0 if case.op == COPY else rank]
        ws = inputs[counts[0] + rank * len(case.ns) :][: len(case.ns)]
        bs = inputs[sum(counts) + (0 if case.op in (SCATTER, REDUCE) else rank * len(case.ns)) :][: len(case.ns)]
        outs, gathered = call(case, (x, list(ws), list(bs)), group)
        outs = outs if gathered is None else [*outs, gathered]
        loss = torch.stack([(out.sin() * (1 if case.op == REDUCE else 1 + rank)).sum() for out in outs]).sum()
        if case.op != REDUCE:
            dist.all_reduce(loss, group=group)
    return loss.item()


class JobLoss(torch.autograd.Function):
    """The whole job as one function, so that torch's gradcheck can perturb any operand of any rank on all ranks."""

    @staticmethod
    def forward(ctx: Any, case: Case, group: Any, *inputs: Tensor) -> Tensor:
        ctx.case, ctx.group = case, group
        ctx.save_for_backward(*inputs)
        return torch.tensor(loss_of(case, group, list(inputs)), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            gradients = analytic(ctx.case, ctx.group, list(ctx.saved_tensors))
        return None, None, *(grads[0] * gradient for gradient in gradients)


def gradcheck() -> int:
    world = dist.get_world_size()
    base = {"dtype": torch.float64, "bias": True}
    cases = [
        Case(GATHER, (2 * world, 3), ns=(2, 1), activation="gelu", return_gathered=True, **base),
        Case(GATHER, (2, world), dim=-1, ns=(2,), save_gathered=True, activation="gelu_tanh", **base),
        Case(GATHER, (2 * world, 2), ns=(2, 2), activation="swiglu", **base),
        Case(SCATTER, (world + 1, 2 * world), ns=(2,), implementation="unfused", **base),
        Case(SCATTER, (2, world), ns=(world + 1,), dim=-1, **base),
        Case(REDUCE, (2, 2 * world), ns=(2,), **base),
        Case(COPY, (2, 3), ns=(2, 1), activation="silu", **base),
    ]
    with new_group(2) as group:
        for case in cases:
            parts = operands(case, world)
            inputs = [parts.xs[0]] if case.op == COPY else list(parts.xs)
            inputs += [w for ws in parts.ws for w in ws]
            shared_b = case.op in (SCATTER, REDUCE)
            inputs += [b for bs in (parts.bs[:1] if shared_b else parts.bs) for b in bs if b is not None]
            leaves = [x.clone().requires_grad_() for x in inputs]
            assert torch.autograd.gradcheck(partial(JobLoss.apply, case, group), leaves), case
    return len(cases)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_gradients_are_the_derivatives_of_the_whole_jobs_loss(ranks: Pools, world: int) -> None:
    assert ranks(world).run(gradcheck, timeout=120) == [7] * world


# ---------------------------------------------------------------- no gradients, twice the gradient


def without_gradients() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(2) as group:
        for op in FUSED:
            case = Case(op, (12, 8), bias=True, activation="gelu" if op in (GATHER, COPY) else None)
            x, ws, bs = own_part(operands(case, world), rank)
            outs, _ = call(case, (x, ws, bs), group)
            for leaf in (x, *ws, *bs):
                assert leaf is not None
                leaf.requires_grad_()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    again, _ = call(case, (x, ws, bs), group)
                assert not again[0].requires_grad
                assert again[0].is_inference() == (mode is torch.inference_mode)
                assert_bitwise_equal(again[0], outs[0], f"{op} under {mode.__name__}")
            with torch.inference_mode():
                frozen = own_part(operands(case, world), rank)
                assert_bitwise_equal(call(case, frozen, group)[0][0], outs[0], f"{op} with inference tensors")
            assert_bitwise_equal(call(case, (x, ws, bs), group)[0][0].detach(), outs[0], f"{op} with gradients")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_no_grad_and_inference_mode_give_the_same_bits_without_a_graph(ranks: Pools, world: int) -> None:
    ranks(world).run(without_gradients)


def double_backward() -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    messages = []
    with new_group() as group:
        for op in FUSED:
            case = Case(op, (12, 8), ns=(4,))
            x, ws, bs = own_part(operands(case, world), rank)
            x.requires_grad_()
            ws[0].requires_grad_()
            outs, _ = call(case, (x, ws, bs), group)
            (dx,) = torch.autograd.grad(outs[0].square().sum(), x, create_graph=True)
            try:
                dx.sum().backward()
            except RuntimeError as error:
                messages.append(str(error))
    return messages


def test_double_backward_says_that_it_is_not_supported(ranks: Pools) -> None:
    for messages in ranks(2).run(double_backward):
        assert len(messages) == len(FUSED)
        assert all("double backward through fused ops is not supported" in message for message in messages)


def collectives_twice() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    x = payload((4, 3), torch.float64, rank=rank).requires_grad_()
    for f in (
        partial(tpk.all_gather, group=group),
        partial(tpk.reduce_scatter, group=group),
        partial(tpk.all_reduce, group=group),
        partial(tpk.copy_to_group, group=group),
    ):
        y = f(x)
        (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        assert ddx.shape == x.shape and bool((ddx != 0).any())


def test_collectives_without_a_gemm_can_be_differentiated_twice(ranks: Pools) -> None:
    ranks(2).run(collectives_twice)


# ---------------------------------------------------------------- autocast


def autocast_dtypes() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(2) as group:
        for op in FUSED:
            for dtype, expected in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
                case = Case(op, (12, 8), dtype=dtype, bias=True, activation="gelu" if op in (GATHER, COPY) else None)
                x, ws, bs = own_part(operands(case, world), rank)
                for leaf in (x, *ws, *bs):
                    assert leaf is not None
                    leaf.requires_grad_()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outs, _ = call(case, (x, ws, bs), group)
                assert outs[0].dtype == expected, (op, outs[0].dtype)
                outs[0].float().sum().backward()
                assert x.grad is not None and x.grad.dtype == dtype
                assert ws[0].grad is not None and ws[0].grad.dtype == dtype
                assert bs[0] is not None and bs[0].grad is not None and bs[0].grad.dtype == dtype
                cast = call(case, (x.to(expected), [ws[0].to(expected)], [bs[0].to(expected)]), group)[0]
                assert_bitwise_equal(outs[0].detach(), cast[0].detach(), f"{op} under autocast")
        mixed = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(3, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert tpk.all_gather_matmul(*mixed, group).dtype == torch.bfloat16


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_autocast_casts_gemms_like_a_linear_and_leaves_fp64_alone(ranks: Pools, world: int) -> None:
    ranks(world).run(autocast_dtypes)


def autocast_and_collectives() -> None:
    group = dist.group.WORLD
    x = torch.full((4, 2), 1 + 2**-12, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for f in (tpk.all_gather, tpk.reduce_scatter, tpk.all_reduce, tpk.copy_to_group, tpk.shard):
            assert f(x, group).dtype == torch.float32, f.__name__


def test_autocast_does_not_round_what_is_only_moved_or_summed(ranks: Pools) -> None:
    ranks(2).run(autocast_and_collectives)


def backward_inside_autocast() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with new_group(2) as group:
        for op in FUSED:
            case = Case(op, (12, 8), bias=True)
            gradients = []
            for inside in (False, True):
                x, ws, bs = own_part(operands(case, world), rank)
                for leaf in (x, *ws, *bs):
                    assert leaf is not None
                    leaf.requires_grad_()
                outs, _ = call(case, (x, ws, bs), group)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                    outs[0].sum().backward()
                gradients.append([x.grad, ws[0].grad, bs[0].grad])  # type: ignore[union-attr]
            for now, before in zip(*gradients, strict=True):
                assert_bitwise_equal(now, before, f"{op}: backward inside an autocast region")


def test_a_backward_pass_inside_autocast_is_not_cast_again(ranks: Pools) -> None:
    ranks(2).run(backward_inside_autocast)


# ---------------------------------------------------------------- checkpointing


def two_layers(group: Any, rows: int, world: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Column, activation, row: the block that sequence parallelism checkpoints."""
    rank = dist.get_rank(group)
    x = payload((rows // world, 16), torch.float32, rank=rank, name="x")
    up = payload((24, 16), torch.float32, rank=rank, name="up")
    down = payload((16, 24), torch.float32, rank=rank, name="down")

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = tpk.all_gather_matmul(x, up, group, activation="gelu", implementation="chunked")
        return tpk.matmul_reduce_scatter(hidden, down, group, implementation="chunked")

    return block, [x, up, down]


def checkpointed() -> None:
    world = dist.get_world_size()
    with new_group(2) as group:
        block, leaves = two_layers(group, 12, world)
        results = []
        for how in (None, True, False):
            inputs = [leaf.clone().requires_grad_() for leaf in leaves]
            y = block(*inputs) if how is None else checkpoint(block, *inputs, use_reentrant=how)
            assert isinstance(y, Tensor)
            y.square().sum().backward()
            results.append([y.detach(), *(leaf.grad for leaf in inputs)])
        for how, result in zip(("reentrant", "not reentrant"), results[1:], strict=True):
            for now, before in zip(result, results[0], strict=True):
                assert now is not None and before is not None
                assert_bitwise_equal(now, before, f"checkpoint, {how}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 2])
def test_activation_checkpointing_gives_the_same_bits(ranks: Pools, world: int) -> None:
    ranks(world).run(checkpointed)


def retained() -> None:
    world = dist.get_world_size()
    with new_group(2) as group:
        block, leaves = two_layers(group, 12, world)
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        y = block(*inputs)
        first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        second = torch.autograd.grad(y.sum(), inputs)
        for now, before in zip(second, first, strict=True):
            assert_bitwise_equal(now, before, "the second backward pass of a retained graph")


def test_a_retained_graph_can_be_run_twice(ranks: Pools) -> None:
    ranks(2).run(retained)


# ---------------------------------------------------------------- what memory and gradients do not show


def _calls(group: Any) -> dict[str, Callable[[Tensor], Any]]:
    weight = torch.ones(3, 16)
    made: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda x: tpk.all_reduce(x, group),
        "all_gather": lambda x: tpk.all_gather(x, group),
    }
    for op in (tpk.matmul_all_reduce, tpk.matmul_reduce_scatter, tpk.all_gather_matmul):
        made[op.__name__] = partial(op, weight=weight, group=group)
    return made


def negative_views() -> None:
    """``torch.imag(z.conj())`` and what autograd makes of it: the bits in memory have the other sign."""
    with new_group(2) as group:
        for name, op in _calls(group).items():
            for _ in range(3):  # checked, asked for a repetition, repeated
                y = op(torch._neg_view(torch.ones(2, 16)))
                assert_bitwise_equal(y, -op(torch.ones(2, 16)), name)
        weight, bias = torch._neg_view(torch.ones(3, 16)), torch._neg_view(torch.ones(3))
        for _ in range(3):
            tpk.matmul_all_reduce(torch.ones(2, 16), torch.ones(3, 16), group, bias=torch.ones(3))
            y = tpk.matmul_all_reduce(torch.ones(2, 16), weight, group, bias=bias)
            assert_bitwise_equal(y, torch.full((2, 3), -33.0), "a weight and a bias")


def test_views_with_a_negative_bit_have_their_values(ranks: Pools) -> None:
    ranks(2).run(negative_views)


def tangents() -> None:
    x = torch.ones(2, 16)
    with new_group(2) as group:
        for name, op in _calls(group).items():
            with pytest.raises(RuntimeError, match="has no forward-mode derivative"), forward_ad.dual_level():
                pytest.fail(f"{name}: {op(forward_ad.make_dual(x, torch.ones_like(x)))}")
            with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
                pytest.fail(f"{name}: {torch.func.jvp(op, (x,), (torch.ones_like(x),))}")
            with forward_ad.dual_level():
                assert torch.is_tensor(op(x)), "without a tangent it is a call like any other"


def test_a_tangent_is_refused_and_not_dropped(ranks: Pools) -> None:
    ranks(2).run(tangents)
