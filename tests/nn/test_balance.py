"""Losses and the bias that balance experts: ranks with parts of the tokens find what one with all of them finds."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, mine, sequence_sizes, tp_mesh
from tpkernels.nn import ExpertBias, ParallelExperts, ParallelMLP, load_balancing_loss, router_z_loss
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

EXPERTS, H, TOP_K, TOKENS = 5, 6, 2, 7


def plain_losses(logits: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """By their definitions, token by token."""
    probabilities, shares = logits.softmax(-1), torch.zeros(EXPERTS, dtype=logits.dtype)
    for token in experts.tolist():
        for expert in token:
            shares[expert] += 1 / experts.numel()
    balance = EXPERTS * sum(shares[e] * probabilities[:, e].mean() for e in range(EXPERTS))
    return cast(Tensor, balance), torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean()


def losses_of_parts() -> None:
    """Values on every rank, and each rank's part of the gradient."""
    torch.manual_seed(1)
    mesh = tp_mesh()
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, requires_grad=True)
    experts = logits.detach().topk(TOP_K).indices
    own, own_experts = mine(logits, 0), mine(experts, 0)
    for number, expected in enumerate(plain_losses(logits, experts)):
        of_ranks = (
            load_balancing_loss(own.softmax(-1), own_experts, mesh) if number == 0 else router_z_loss(own, [mesh])
        )
        close(of_ranks, expected.detach(), f"loss {number}")
        (gradient,) = torch.autograd.grad(expected, logits)
        (of_own,) = torch.autograd.grad(of_ranks, own)
        close(of_own, mine(gradient, 0), f"gradient of loss {number}")
    alone = load_balancing_loss(logits.softmax(-1), experts)
    close(alone, plain_losses(logits, experts)[0].detach(), "without a group")
    with pytest.raises(ValueError, match=r"experts \(\(3, 2\)\) must have the tokens"):
        load_balancing_loss(logits, experts[:3])


def bias_of_parts() -> None:
    """Ten steps; counts of all ranks move the bias, which is the same everywhere, and part of the state."""
    torch.manual_seed(2)
    mesh, rank = tp_mesh(), dist.get_rank()
    whole, parts = ExpertBias(EXPERTS, TOP_K, rate=0.25), ExpertBias(EXPERTS, TOP_K, rate=0.25)
    for _ in range(10):
        scores = torch.rand(2, TOKENS, EXPERTS) + torch.arange(EXPERTS) / 4
        chosen = [(whole(one), parts(mine(one, 0))) for one in scores]  # two micro-batches
        for (everything, own), one in zip(chosen, scores, strict=True):
            assert torch.equal(own.experts, mine(everything.experts, 0))
            assert_bitwise_equal(own.weights, mine(one, 0).gather(1, own.experts), "weights are the scores")
        whole.update()
        parts.update(mesh)
        assert_bitwise_equal(parts.bias, whole.bias, f"rank {rank}")
    assert whole.bias[0] > whole.bias[-1] and not whole.counts.any()
    assert list(parts.state_dict()) == ["bias"]
    parts.eval()(scores[0])
    assert not parts.counts.any()
    with pytest.raises(ValueError, match=r"top_k must be from 1 to num_experts \(5\), got 6"):
        ExpertBias(EXPERTS, 6)


def shared_beside_routed() -> None:
    """A layer with a sigmoid router, a shared expert and both losses: outputs and gradients of the plain one."""
    torch.manual_seed(3)
    mesh, double = tp_mesh(), torch.float64
    router = nn.Linear(H, EXPERTS, bias=False).double()
    up, down = (torch.randn(EXPERTS, *shape, dtype=double, requires_grad=True) for shape in ((10, H), (H, 10)))
    first, last = nn.Linear(H, 9).double(), nn.Linear(9, H).double()
    x, dy = torch.randn(2, TOKENS, H, dtype=double)
    choice = ExpertBias(EXPERTS, TOP_K)

    logits = router(x)
    experts, weights = choice(logits.sigmoid())
    routed = torch.stack(
        [
            sum(w * (F.gelu(token @ up[e].T) @ down[e].T) for e, w in zip(es.tolist(), ws, strict=True))
            for token, es, ws in zip(x, experts, weights, strict=True)
        ]  # type: ignore[misc]
    )
    y = routed + last(F.gelu(first(x)))
    balance, z = plain_losses(logits, experts)
    ((y * dy).sum() + 0.1 * balance + 0.01 * z).backward()

    for layout in ("features", "experts"):
        cut = ParallelExperts.from_parameters(up, down, mesh, activation="gelu", layout=layout, sequence_parallel=True)
        shared = ParallelMLP.from_linears(first, last, mesh, activation="gelu", sequence_parallel=True)
        own_router = nn.Linear(H, EXPERTS, bias=False).double()
        own_router.load_state_dict(router.state_dict())
        tpk.nn.replicate_parameters(own_router, mesh, sequence_parallel=True)
        sizes, own = sequence_sizes(TOKENS), mine(x, 0)
        logits = own_router(own)
        routing = choice(logits.sigmoid())
        found = cut(own, routing, shard_sizes=sizes) + shared(own, shard_sizes=sizes)
        close(found, mine(y, 0).detach(), f"y, {layout}")
        balance = load_balancing_loss(logits.softmax(-1), routing.experts, mesh)
        ((found * mine(dy, 0)).sum() + 0.1 * balance + 0.01 * router_z_loss(logits, mesh)).backward()
        (weight,) = own_router.parameters()
        got = weight.grad
        close(cast(DTensor, got).to_local(), cast(Tensor, router.weight.grad), f"router, {layout}")


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("what", [losses_of_parts, bias_of_parts, shared_beside_routed])
def test_parts_of_the_tokens_give_what_all_of_them_give(ranks: Pools, world: int, what: object) -> None:
    ranks(world).run(what, timeout=LIMIT_S)  # type: ignore[arg-type]
