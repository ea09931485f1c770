"""With `same_bits`, losses of a vocabulary that is cut, uneven too, have the same bits at every degree, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tests.kept_mesh import once_per_pool
from tests.nn import uneven_layers
from tests.ops.same_bits import assert_same
from tpkernels.comm.groups import resolve
from tpkernels.nn import block_copies, cross_entropy
from tpkernels.partition import halves
from tpkernels.selftest.same_bits import degrees_of, groups_of_degrees
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

SAME_BITS, TOKENS, VOCABULARY, WIDTH = 8, 37, 8 * 29 - 3, 48
SETTINGS: dict[torch.dtype, dict[str, Any]] = {
    torch.bfloat16: {},
    torch.float32: {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum", "chunk_tokens": 5},
}


@once_per_pool
def groups() -> dict[int, dist.ProcessGroup]:
    found = groups_of_degrees(degrees_of(dist.get_world_size(), SAME_BITS), 60.0)
    for group in found.values():
        resolve(group).keep_same_bits(SAME_BITS)
    return found


def losses(degree: int, dtype: torch.dtype, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Of logits that are given, and of a head; with gradients, whole."""
    group, generator = groups()[degree], torch.Generator().manual_seed(3)
    rank = dist.get_rank(group)
    logits, weight, x = (
        torch.randn(*shape, generator=generator).mul(3).to(dtype)
        for shape in ((TOKENS, VOCABULARY), (VOCABULARY, WIDTH), (TOKENS, WIDTH))
    )
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    target[4] = -100
    sizes = halves(VOCABULARY, degree)
    shard = logits.split(sizes, 1)[rank].clone().requires_grad_()  # dense at no degree but the last without the clone
    loss = tpk.nn.vocab_parallel_cross_entropy(shard, target, group, shard_sizes=sizes, **settings)
    (dlogits,) = torch.autograd.grad(loss, shard)
    linear = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    head = tpk.nn.ColumnParallelLinear.from_linear(linear, group)
    of_head = tpk.nn.vocab_parallel_linear_cross_entropy(x.requires_grad_(), head, target, **settings)
    dx, dweight = torch.autograd.grad(of_head, [x, head.weight])
    found = {"loss": loss.detach(), "loss of head": of_head.detach(), "dx": dx}
    found["dlogits"] = tpk.all_gather(dlogits, group, dim=1, shard_sizes=sizes)
    found["dweight"] = tpk.all_gather(dweight.to_local(), group)
    reference = logits.double().requires_grad_()
    named = {name: one for name, one in settings.items() if name not in ("z_loss", "chunk_tokens")}
    exact = F.cross_entropy(reference, target, **named)
    kept = (target != -100).double()
    squares = reference.logsumexp(-1).square() * kept
    exact = exact + settings.get("z_loss", 0.0) * (squares.sum() if settings else squares.sum() / kept.sum())
    exact.backward()
    eps = torch.finfo(dtype).eps
    assert abs(loss.item() - exact.item()) <= 1e-5 * abs(exact.item()), (loss, exact)
    off = (found["dlogits"].double() - reference.grad).abs()
    assert bool((off <= eps * reference.grad.abs() + 1e-6).all()), off.max()
    return found


def differing(fault: str | None) -> list[str]:
    """What is not the same at every degree on this rank."""
    wrong = []
    with seeded(fault):
        for dtype, settings in SETTINGS.items():
            expected = losses(1, dtype, settings)
            for degree in groups():
                for name, value in losses(degree, dtype, settings).items():
                    try:
                        assert_same(value, expected[name], f"{name}, {dtype} on {degree} ranks")
                    except AssertionError as error:
                        wrong.append(str(error))
    return wrong


@contextmanager
def seeded(fault: str | None) -> Iterator[None]:
    """ "whole shards": sums of all columns that a rank has at once, as without the mode."""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            vocabulary = cross_entropy.Vocabulary

            class Whole(vocabulary):  # type: ignore[misc, valid-type]
                @classmethod
                def of(cls, pg: Any, shard_sizes: Any) -> Any:
                    start = sum(shard_sizes[: pg.rank()])
                    return vocabulary(list(shard_sizes), [(start, slice(None))])

            patch.setattr(cross_entropy, "Vocabulary", Whole)
        yield


def test_losses_of_a_cut_vocabulary_are_the_same_at_every_degree(ranks: Pools) -> None:
    for wrong in ranks(4).run(differing, None, timeout=120.0):
        assert not wrong


def test_sums_over_whole_shards_are_found(ranks: Pools) -> None:
    found = ranks(2).run(differing, "whole shards", timeout=120.0)
    assert all(any("dlogits" in one for one in wrong) for wrong in found), found


def uneven(seeds: range, in_order: bool = False) -> list[str]:
    """``in_order``: shares of the gradient of copied heads are added one after the other, not in a tree."""
    with pytest.MonkeyPatch.context() as patch:
        if in_order:
            added = SimpleNamespace(wide=lambda dtype: dtype, of_products=lambda parts, out: out.copy_(sum(parts)))
            patch.setattr(block_copies, "tree_sum", added)
        return uneven_layers.differing([uneven_layers.draw(seed) for seed in seeds])


def test_layers_of_any_sizes_give_the_same_bits_at_every_degree(ranks: Pools, full: bool) -> None:
    """Heads, features and vocabularies that do not divide into blocks, and copied heads; values of integers exactly."""
    count, world = (2000, 8) if full else (7, 4)
    for wrong in ranks(world).run(uneven, range(count), timeout=60.0 + 2 * count):
        assert not wrong, wrong[:3]


def test_another_order_of_the_shares_of_copied_heads_is_found(ranks: Pools) -> None:
    for wrong in ranks(4).run(uneven, range(5, 28, 7), True, timeout=60.0):
        assert wrong and all("gradient of" in one for one in wrong), wrong
