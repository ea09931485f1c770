"""The head and its loss in one equal the two apart, gradients too, and no logits of all tokens exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nn.reference import LIMIT_S, close, close_parameters, close_replicas, mine, sequence_sizes, tp_mesh
from tests.nn.test_vocabulary import bounds
from tpkernels.measure.memory import peak_bytes
from tpkernels.nn import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from tpkernels.testing.numeric import assert_within_bound
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, LENGTH = 6, 7


def reduced(losses: Tensor, reduction: str, count: int) -> Tensor:
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}[reduction]


def equals_torch(
    total: int, sequence_dim: int | None, chunk: int, reduction: str, bias: bool, dtype: torch.dtype, **options: float
) -> None:
    mesh = tp_mesh()
    plain = nn.Linear(WIDTH, total, bias, dtype=dtype)
    sharded = sequence_dim is not None
    dim = sequence_dim if sequence_dim is not None else 1
    head = ColumnParallelLinear.from_linear(plain, mesh, sequence_parallel=sharded, sequence_dim=dim)
    x = torch.randn((2, LENGTH, WIDTH) if dim == 1 else (LENGTH, 2, WIDTH), dtype=dtype, requires_grad=True)
    target = torch.randint(total, x.shape[:-1])
    target[0, 0], target[1, 1] = total - 1, -100
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    logits = plain(x)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing)
    losses = losses.view_as(target) + (z_loss * logits.logsumexp(-1).square()).masked_fill(target == -100, 0)
    expected = reduced(losses, reduction, target.numel() - 1)
    g = torch.randn_like(expected)
    expected.backward(g)
    assert x.grad is not None
    x_r = mine(x, dim) if sharded else x.detach().clone().requires_grad_()
    actual = vocab_parallel_linear_cross_entropy(
        x_r, head, target, reduction=reduction, chunk_tokens=chunk,
        shard_sizes=sequence_sizes(LENGTH) if sharded else None, **options,
    )  # fmt: skip
    actual.backward(g)
    assert x_r.grad is not None
    what = f"V={total} sequence_dim={sequence_dim} chunk={chunk} {reduction} {options}"
    close(actual, expected, f"loss, {what}")
    close(x_r.grad, mine(x.grad, dim) if sharded else x.grad, f"dx, {what}")
    close_parameters(head, plain)
    close_replicas(head)


def losses_of_heads_equal_torch() -> None:
    for total in (11, 1):
        for sequence_dim in (None, 1, 0):
            equals_torch(total, sequence_dim, 3, "mean", True, torch.float64, label_smoothing=0.1)
            equals_torch(total, sequence_dim, 1, "none", False, torch.float64, z_loss=0.01)
            equals_torch(total, sequence_dim, 1000, "sum", True, torch.float32)
    a_bf16_loss_is_within_the_bound()
    autocast_casts_as_a_linear_layer_does()
    frozen_parts_get_no_gradient()
    a_tied_weight_gets_both_gradients()


def a_bf16_loss_is_within_the_bound() -> None:
    """Of small integers bf16 logits are exact, so the loss has no error but its own, which is fp32's."""
    mesh = tp_mesh()
    plain = nn.Linear(WIDTH, 11, dtype=torch.bfloat16)
    x = torch.randint(-2, 3, (5, WIDTH)).bfloat16()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    target = torch.arange(5)
    logits = plain(x).double()
    losses = vocab_parallel_linear_cross_entropy(
        x, ColumnParallelLinear.from_linear(plain, mesh), target, chunk_tokens=2, label_smoothing=0.1, reduction="none"
    )
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    bound = bounds(logits, target, 0.1, 0.0, torch.finfo(torch.float32).eps)[0]
    assert_within_bound(losses, expected, bound + torch.finfo(torch.float32).eps * expected.abs(), "bf16 loss")


def autocast_casts_as_a_linear_layer_does() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    head = ColumnParallelLinear(WIDTH, 11, mesh)
    low = ColumnParallelLinear(WIDTH, 11, mesh, dtype=torch.bfloat16)
    low.load_state_dict(head.state_dict())
    x, target = torch.randn(5, WIDTH, requires_grad=True), torch.arange(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = vocab_parallel_linear_cross_entropy(x, head, target)
    loss.backward()
    assert torch.equal(loss, vocab_parallel_linear_cross_entropy(x.bfloat16(), low, target))
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.float32


def frozen_parts_get_no_gradient() -> None:
    mesh = tp_mesh()
    target = torch.tensor([0, 3, 2])
    for frozen in ("x", "weight", "both"):
        plain = nn.Linear(WIDTH, 5)
        plain.weight.requires_grad_(frozen == "x")
        head = ColumnParallelLinear.from_linear(plain, mesh)
        x = torch.randn(3, WIDTH, requires_grad=frozen == "weight")
        expected = F.cross_entropy(plain(x), target)
        expected.backward()
        expected_dx, x.grad = x.grad, None
        vocab_parallel_linear_cross_entropy(x, head, target, chunk_tokens=2).backward()
        close_parameters(head, plain)
        assert (x.grad is None) == (expected_dx is None)
        if x.grad is not None and expected_dx is not None:
            close(x.grad, expected_dx, "dx")


def a_tied_weight_gets_both_gradients() -> None:
    mesh = tp_mesh()
    plain = nn.Embedding(11, WIDTH, dtype=torch.float64)
    table = VocabParallelEmbedding.from_embedding(plain, mesh)
    head = table.tie(ColumnParallelLinear(WIDTH, 11, mesh, bias=False, dtype=torch.float64))
    ids, target = torch.randint(11, (2, 4, 3)).unbind()
    F.cross_entropy(F.linear(plain(ids), plain.weight).flatten(0, 1), target.flatten()).backward()
    vocab_parallel_linear_cross_entropy(table(ids), head, target, chunk_tokens=5).backward()
    close_parameters(table, plain)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [3, 1, 2])
def test_a_head_with_its_loss_equals_torch(ranks: Pools, world: int) -> None:
    ranks(world).run(losses_of_heads_equal_torch, timeout=LIMIT_S)


def memory_of_a_head(tokens: int, columns: int, chunk: int) -> dict[str, int]:
    """Peak bytes of forward and backward: head and loss apart, in one by chunks, and with main_grad."""
    mesh = tp_mesh()
    torch.manual_seed(0)
    head = ColumnParallelLinear(16, columns * mesh.size(), mesh, bias=False)
    x = torch.randn(tokens, 16)
    target = torch.randint(columns * mesh.size(), (tokens,))

    def apart() -> None:
        vocab_parallel_cross_entropy(head(x.requires_grad_()), target, mesh, chunk_tokens=chunk).backward()

    def in_one() -> None:
        vocab_parallel_linear_cross_entropy(x.requires_grad_(), head, target, chunk_tokens=chunk).backward()

    found = {}
    for name, work in {"apart": apart, "in one": in_one}.items():
        work()  # the first call agrees and connects, and makes the gradients
        found[name] = peak_bytes(work)
    return found


@pytest.mark.slow("2 s")
def test_no_logits_of_all_tokens_exist(ranks: Pools) -> None:
    tokens, columns, chunk = 2048, 1024, 64
    shard, piece, gradients = tokens * columns * 4, chunk * columns * 4, (tokens + columns) * 16 * 4
    for found in ranks(2).run(memory_of_a_head, tokens, columns, chunk, timeout=LIMIT_S):
        assert found["apart"] > 1.9 * shard, "logits and their gradient"
        assert found["in one"] <= 3.5 * piece + 3 * gradients + 200 * tokens < 0.25 * shard, found


def bad_head(what: str) -> None:
    mesh = tp_mesh()
    options: dict[str, Any] = {}
    size, target = 6, torch.tensor([0, 1, 2, 0])
    layer: dict[str, Any] = {}
    if what == "gathered":
        layer["gather_output"] = True
    elif what == "activation":
        layer["activation"] = "relu"
    elif what == "label":
        target[3] = 11
    elif what == "target":
        target = target[:3]
    elif what == "sequence":
        options["shard_sizes"] = [2, 2]
    elif what == "features":
        size = 5
    elif what == "whole sequence":
        layer["sequence_parallel"] = True
    head = ColumnParallelLinear(6, 11, mesh, **layer)
    with pytest.raises(ValueError, match=BAD_HEADS[what]):
        vocab_parallel_linear_cross_entropy(torch.randn(4, size), head, target, **options)
    vocab_parallel_linear_cross_entropy(
        torch.randn(4, 6), ColumnParallelLinear(6, 11, mesh), torch.tensor([1, 2, 3, 4])
    )


BAD_HEADS = {
    "gathered": r"the head must give plain logits, cut over the ranks, got .*gather_output=True",
    "activation": r"the head must give plain logits.*activation='relu'",
    "label": r"target must be within \[0, 11\), the vocabulary.*number 3: 11",
    "target": r"target must have the shape of x without its last dimension \(\(4,\)\), got \(3,\)",
    "sequence": r"shard_sizes \(\[2, 2\]\) cuts a sequence: the head has sequence_parallel=False",
    "features": r"weight must be \[N, 5\] to match x, got shape",
    "whole sequence": r"target must have the shape of the gathered x .*\(\(8,\)\), got \(4,\)",
}


def bad_heads() -> None:
    for what in BAD_HEADS:
        bad_head(what)


def test_bad_input_of_a_head_is_refused_on_every_rank_and_the_group_goes_on(ranks: Pools) -> None:
    ranks(2).run(bad_heads, timeout=LIMIT_S)


def compiled_equals_eager() -> None:
    mesh = tp_mesh()
    torch.manual_seed(0)
    head = ColumnParallelLinear(WIDTH, 11, mesh)
    target = torch.arange(8) % 11

    def run(x: Tensor) -> Tensor:
        return vocab_parallel_linear_cross_entropy(x.sin(), head, target, chunk_tokens=3)

    x = torch.randn(8, WIDTH)
    gradients = []
    for fn in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        fn(leaf).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert dist.get_world_size() == 2


@pytest.mark.full("seconds of compiling")
def test_a_compiled_head_with_its_loss_equals_the_eager_one(ranks: Pools) -> None:
    ranks(2).run(compiled_equals_eager, timeout=LIMIT_S)
