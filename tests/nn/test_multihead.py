"""``ParallelMultiheadAttention`` against torch's: masks of every kind, shown weights, layouts, gradients, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.reference import LIMIT_S, close, tp_mesh, whole
from tpkernels.nn import ParallelMultiheadAttention
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HEADS, BATCH, QUERIES, KEYS = 20, 5, 3, 4, 7
"""5 heads are 3 and 2 on two ranks, 2, 2 and 1 on three: weights have a dimension for heads there."""


def pair(**options: Any) -> tuple[nn.MultiheadAttention, ParallelMultiheadAttention]:
    torch.manual_seed(2)
    plain = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return plain, ParallelMultiheadAttention.from_attention(plain, tp_mesh())


def calls() -> list[tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]]]:
    """Options, inputs, arguments."""
    torch.manual_seed(3)
    q, k = torch.randn(BATCH, QUERIES, WIDTH).double(), torch.randn(BATCH, KEYS, WIDTH).double()
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, -2:] = True
    square, causal = torch.randn(QUERIES, KEYS).double(), torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    per_head = torch.randn(BATCH * HEADS, QUERIES, KEYS).double()
    first = {"batch_first": True}
    return [
        (first, (q, q, q), {}),
        (first, (q, k, k), {"key_padding_mask": padding, "attn_mask": square, "need_weights": False}),
        (first, (q, k, k), {"attn_mask": per_head, "average_attn_weights": False}),
        (first, (q, q, q), {"attn_mask": causal, "is_causal": True}),
        ({"bias": False}, tuple(x.transpose(0, 1) for x in (q, k, k)), {"key_padding_mask": padding}),
        ({}, (q[0], k[0], k[0]), {"key_padding_mask": padding[0]}),
    ]


def equals_torchs() -> None:
    for number, (options, inputs, arguments) in enumerate(calls()):
        plain, parallel = pair(**options)
        leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
        (expected, shown), (y, shown_too) = (
            module(*xs, **arguments) for module, xs in zip((plain, parallel), leaves, strict=True)
        )
        close(y, expected, f"y of call {number}")
        assert (shown is None) == (shown_too is None)
        if shown is not None and shown_too is not None:
            close(shown_too, shown, f"weights of call {number}")
        for out in (expected, y):
            out.square().sum().backward()
        for mine, reference in zip(leaves[1], leaves[0], strict=True):
            close(whole(mine.grad), whole(reference.grad), f"gradient of an input of call {number}")
        parts = [parallel.query, parallel.key, parallel.value]
        grads = torch.cat([whole(part.weight.grad).reshape(WIDTH, WIDTH) for part in parts])
        close(grads, whole(plain.in_proj_weight.grad), f"gradient of the projections of call {number}")
        output = whole(parallel.out_proj.weight.grad).reshape(WIDTH, WIDTH)
        close(output, whole(plain.out_proj.weight.grad), f"output of call {number}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [3, 1, 2])
def test_attention_with_cut_heads_equals_torchs(ranks: Pools, world: int) -> None:
    ranks(world).run(equals_torchs, timeout=LIMIT_S)


def drops() -> tuple[Tensor, Tensor, Tensor]:
    _, parallel = pair(batch_first=True, dropout=0.5)
    x = torch.randn(BATCH, QUERIES, WIDTH).double()
    y, weights = parallel.train()(x, x, x, average_attn_weights=False)
    assert weights is not None
    return y.detach(), weights.detach() == 0, torch.rand(())


def test_dropout_differs_between_the_heads_of_two_ranks(ranks: Pools) -> None:
    (y, zeros, number), other = ranks(2).run(drops, timeout=LIMIT_S)
    assert torch.equal(y, other[0]) and torch.equal(zeros, other[1]) and torch.equal(number, other[2])
    assert not torch.equal(zeros[:, :2], zeros[:, 3:])
    assert 0.3 < zeros.double().mean() < 0.7


def refusals() -> list[str]:
    found = []
    for attention in (
        nn.MultiheadAttention(6, 1),
        nn.MultiheadAttention(4, 2, kdim=3),
        nn.MultiheadAttention(4, 2, add_zero_attn=True),
    ):
        try:
            ParallelMultiheadAttention.from_attention(attention, tp_mesh())
        except ValueError as error:
            found.append(str(error))
    return found


def test_attention_that_cannot_be_cut_is_refused(ranks: Pools) -> None:
    heads, width, own = ranks(2).run(refusals, timeout=LIMIT_S)[0]
    assert "has 1 heads, fewer than there are ranks (2)" in heads
    assert "another width" in width and "keys and values of its own" in own


def kept_for_backward(need_weights: bool) -> int:
    """The most elements that a tensor has which the attention itself keeps for its backward pass."""
    _, parallel = pair(batch_first=True)
    x = torch.randn(BATCH, 50, WIDTH).double().requires_grad_()
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    mask = torch.ones(50, 50, dtype=torch.bool).triu(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        parallel(x, x, x, attn_mask=mask, need_weights=need_weights)
    return max(sizes)


def test_scores_are_kept_only_where_weights_are_asked_for(ranks: Pools) -> None:
    """Otherwise torch's fused attention runs, which also rounds once where the steps by themselves round each."""
    scores = [BATCH * heads * 50 * 50 for heads in (3, 2)]
    assert ranks(2).run(kept_for_backward, True, timeout=LIMIT_S) == scores
    for kept in ranks(2).run(kept_for_backward, False, timeout=LIMIT_S):
        assert kept < min(scores) / 2, kept
