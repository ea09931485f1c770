"""``Parts``: what ops do to parts on real tensors, heads of which this rank has one among them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.planning.splits import Split
from tpkernels.sharding.part_tracking import UNKNOWN, Parts

pytestmark = pytest.mark.cpu


def features(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


def attention(parts: Parts, batch: int, heads: int, *, grad: bool) -> tuple[Tensor, Tensor]:
    """Weights and context of ``heads`` heads of 4 features that were cut out of a projection."""
    with parts:
        projected = features(batch, 5, 12 * heads, grad=grad) * 1
        parts.mark(projected, frozenset([Split(2, (4 * heads,) * 3)]))
        q, k, v = (x.view(batch, 5, heads, 4).transpose(1, 2) for x in projected.split(4 * heads, -1))
        weights = (q @ k.transpose(2, 3) * 0.5).softmax(-1)
        return weights, (F.dropout(weights, 0.1) @ v).transpose(1, 2).reshape(batch, 5, -1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(3, 2), (3, 1)])
def test_attention_weights_are_cut_by_heads(batch: int, heads: int, grad: bool) -> None:
    parts = Parts()
    weights, context = attention(parts, batch, heads, grad=grad)
    assert parts.of(weights) == {Split(1, (heads,))}
    assert Split(2, (4 * heads,)) in (parts.of(context) or ())


@pytest.mark.parametrize("heads", [1, 2])
def test_the_heads_of_one_sequence_may_be_the_batch(heads: int) -> None:
    parts = Parts()
    weights, context = attention(parts, 1, heads, grad=False)
    assert parts.of(weights) == {Split(0, (1,)), Split(1, (heads,))}
    assert Split(2, (4 * heads,)) in (parts.of(context) or ())


def test_inference_mode_is_followed_too() -> None:
    parts = Parts()
    with torch.inference_mode():
        weights, _ = attention(parts, 3, 2, grad=False)
    assert parts.of(weights) == {Split(1, (2,))}


def test_what_no_rule_knows_is_a_part_of_unknown_layout() -> None:
    parts = Parts()
    with parts:
        x = features(3, 8)
        parts.mark_last(x)
        results = [x.sum(), x.sum(-1), x.softmax(-1), x @ features(8, 2), x.sort(-1)[0], x[:, 1:3], x.squeeze()[0, 0]]
        assert [parts.of(y) for y in results] == [UNKNOWN] * len(results)
        assert parts.of(x.mean(0)) == {Split(0, (8,))}
        assert parts.of(x.new_zeros(3)) is None
        assert parts.of(features(3, 8) + 1) is None


def test_a_cut_dimension_of_one_element_is_not_squeezed_away() -> None:
    parts = Parts()
    with parts:
        x = features(3, 1, 8)
        parts.mark(x, frozenset([Split(1, (1,))]))
        assert parts.of(x.squeeze(1)) == parts.of(x.squeeze()) == UNKNOWN
        assert parts.of(x.unsqueeze(0).squeeze(0)) == {Split(1, (1,))}


def test_one_head_and_one_token_may_be_what_a_view_merged() -> None:
    parts = Parts()
    with parts:
        x = features(2, 1, 1, 4)
        parts.mark(x, frozenset([Split(2, (1,))]))
        assert parts.of(x.view(2, 1, 4)) == {Split(1, (1,)), Split(2, (4,))}


def test_what_is_repeated_for_each_head_is_written_into_parts() -> None:
    parts = Parts()
    with parts:
        shared, keys = features(2, 1, 5, 4), features(2, 3, 5, 8)
        parts.mark(keys, frozenset([Split(1, (3,))]))
        keys[..., 4:].copy_(shared.expand(-1, 3, -1, -1))
        assert parts.of(keys) == {Split(1, (3,))}
        keys[..., 4:].copy_(features(2, 3, 5, 4))  # other values for each
        assert parts.of(keys) == UNKNOWN


def test_a_constant_of_local_size_is_a_part_of_a_larger_one() -> None:
    parts = Parts()
    with parts:
        scores, bias = features(3, 2, 5, 5), torch.zeros(1, 2, 5, 5)
        parts.mark(scores, frozenset([Split(1, (2,))]))
        assert parts.of(scores + (bias + features(3, 1, 1, 5))) == {Split(1, (2,))}
        assert parts.of(scores + (bias + features(3, 2, 1, 5))) == UNKNOWN
        bias[:, 0] = 1
        assert parts.of(scores + bias) == UNKNOWN


def test_a_state_that_starts_at_zero_is_multiplied_as_a_part() -> None:
    """As in the chunks of a gated delta net; what a rank has whole is not taken for a part, whatever its size."""
    parts = Parts()
    with parts:
        keys = features(3, 2, 5, 4)
        parts.mark(keys, frozenset([Split(1, (2,))]))
        state, other = torch.zeros(3, 2, 4, 4), features(3, 2, 4, 4)
        assert parts.of(keys @ state) == {Split(1, (2,))} == parts.of(state.mT @ keys.mT)
        assert parts.of(keys @ other) == UNKNOWN == parts.of(keys[:1, :1] @ other[:1, :1])


def test_views_and_writes_share_the_mark_of_their_storage() -> None:
    parts = Parts()
    with parts:
        x, cache = features(3, 2, 5, 4), torch.zeros(3, 2, 9, 4)
        parts.mark(x, frozenset([Split(1, (2,))]))
        cache.index_copy_(2, torch.arange(5), x)
        assert parts.of(cache) == {Split(1, (2,))}
        buffer = torch.zeros(3, 2, 9, 4)
        buffer[:, :, :5] = x
        assert parts.of(buffer) == {Split(1, (2,))}
        buffer[:, :, 5:] = features(3, 2, 4, 4)
        assert parts.of(buffer) == UNKNOWN
        pooled = torch.zeros(3, 9)
        pooled[:, :5] += x[:, 0, :, 0]
        assert parts.of(pooled) == UNKNOWN
        whole = torch.zeros(3, 4)
        whole.add_(x.sum((1, 2)))
        assert parts.of(whole) == UNKNOWN
        grown = torch.cat([torch.tensor([]), x], dim=-2)
        assert parts.of(grown) == {Split(1, (2,))}


def test_a_constant_that_is_written_to_is_whole_beside_parts() -> None:
    parts = Parts()
    with parts:
        parts.mark_last(features(3, 4))
        chosen = F.one_hot(torch.tensor([0, 1, 1]), 2)
        assert parts.of(chosen) is None
        assert parts.of(features(3, 2) * chosen) is None


def test_a_storage_that_is_gone_leaves_no_mark_behind() -> None:
    parts = Parts()
    with parts:
        for _ in range(50):
            x = features(1000)
            assert parts.of(x) is None
            parts.mark_last(x)
            del x
