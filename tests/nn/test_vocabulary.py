"""The embedding and the loss of a vocabulary that is cut over the ranks equal torch's on the whole, gradients too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.nn.reference import LIMIT_S, close, close_parameters, mine, tp_mesh
from tpkernels.errors import GroupMismatch
from tpkernels.measure.memory import peak_bytes
from tpkernels.nn import ColumnParallelLinear, VocabParallelEmbedding, vocab_parallel_cross_entropy
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.testing.numeric import assert_bitwise_equal, assert_within_bound
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLDS = (3, 1, 2)
WIDTH = 6
COMPILED_WORLD = 2  # importing the compiler takes each rank seconds


# --- embedding --------------------------------------------------------------------------------------------------------


def embedding_equals_torch(vocabulary: int, sequence_parallel: bool, sequence_dim: int, **options: Any) -> None:
    mesh = tp_mesh()
    plain = nn.Embedding(vocabulary, WIDTH, **options)
    parallel = VocabParallelEmbedding.from_embedding(
        plain, mesh, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim
    )
    ids = torch.randint(vocabulary, (5, 3), dtype=torch.int32)
    ids[0, 0], ids[0, 1] = 0, vocabulary - 1
    expected = plain(ids)
    g = torch.randn_like(expected)
    expected.backward(g)
    y = parallel(ids)
    dim = sequence_dim % 3
    assert_bitwise_equal(y, mine(expected, dim) if sequence_parallel else expected, "y", either_zero=True)
    y.backward(mine(g, dim) if sequence_parallel else g)
    close_parameters(parallel, plain)


def embeddings_equal_torch() -> None:
    for vocabulary in (11, 8, 1):  # of 1, all ranks but the first have nothing
        for sequence_parallel in (False, True):
            embedding_equals_torch(vocabulary, sequence_parallel, -2)
            embedding_equals_torch(vocabulary, sequence_parallel, 0, padding_idx=-1, dtype=torch.float64)
            embedding_equals_torch(vocabulary, sequence_parallel, -2, padding_idx=0, max_norm=1.5)


def a_new_embedding_equals_torch_under_one_seed() -> str:
    mesh = tp_mesh()
    torch.manual_seed(1)
    plain = nn.Embedding(10, WIDTH, padding_idx=3)
    torch.manual_seed(1)
    parallel = VocabParallelEmbedding(10, WIDTH, mesh, padding_idx=3)
    close_parameters(parallel, plain)
    with torch.no_grad():
        parallel.weight.zero_()
    torch.manual_seed(1)
    parallel.reset_parameters()
    close_parameters(parallel, plain)
    assert isinstance(parallel.weight, DTensor) and parallel.weight.placements == (Shard(0),)
    local = parallel.weight.to_local()
    assert local.untyped_storage().nbytes() == local.numel() * 4, "more than this rank's part is kept"
    if mesh.size() == COMPILED_WORLD:
        compiled = torch.compile(parallel, fullgraph=True, backend="aot_eager")
        ids = torch.tensor([[0, 9, 3], [5, 5, 1]])
        assert torch.equal(compiled(ids), parallel(ids))
    assert not parallel.eval().training and VocabParallelEmbedding.from_embedding(plain.eval(), mesh).training is False
    return repr(parallel)


class PlainTied(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight


class ParallelTied(nn.Module):
    def __init__(self, plain: PlainTied, sequence_parallel: bool) -> None:
        super().__init__()
        mesh, options = tp_mesh(), {"sequence_parallel": sequence_parallel, "sequence_dim": -2}
        self.embedding = VocabParallelEmbedding.from_embedding(plain.embedding, mesh, **options)
        self.head = self.embedding.tie(ColumnParallelLinear.from_linear(plain.head, mesh, **options))


def a_tied_head_shares_one_parameter(vocabulary: int, sequence_parallel: bool) -> None:
    plain = PlainTied(vocabulary)
    tied = ParallelTied(plain, sequence_parallel)
    assert tied.head.weight is tied.embedding.weight
    assert [name for name, _ in tied.named_parameters()] == ["embedding.weight"]
    ids, labels = torch.randint(vocabulary, (2, 3, 2 * dist.get_world_size())).unbind()
    expected = F.cross_entropy(plain.head(plain.embedding(ids)).flatten(0, 1), labels.flatten())
    expected.backward()
    logits = tied.head(tied.embedding(ids))
    loss = vocab_parallel_cross_entropy(logits, labels, tied.head.mesh, shard_sizes=tied.head.shard_sizes)
    loss.backward()
    close(loss, expected, "loss")
    close_parameters(tied, plain)


def the_vocabulary_end_to_end() -> str:
    embeddings_equal_torch()
    for sequence_parallel in (False, True):
        a_tied_head_shares_one_parameter(11, sequence_parallel)
    return a_new_embedding_equals_torch_under_one_seed()


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", WORLDS)
def test_an_embedding_equals_torch_and_shares_its_weight_with_the_head(ranks: Pools, world: int) -> None:
    for text in ranks(world).run(the_vocabulary_end_to_end, timeout=LIMIT_S):
        sizes = "/".join(map(str, chunk_sizes(10, world)))
        assert text == f"VocabParallelEmbedding(10, 6, shards={sizes}, sequence_parallel=False, padding_idx=3)"


# --- loss -------------------------------------------------------------------------------------------------------------


def reference_loss(logits: Tensor, target: Tensor, smoothing: float, z_loss: float, ignore: int = -100) -> Tensor:
    """fp64 losses of single tokens."""
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none", label_smoothing=smoothing,
                             ignore_index=ignore).view(target.shape)  # fmt: skip
    return losses + (z_loss * logits.logsumexp(-1).square()).masked_fill(target == ignore, 0)


def bounds(logits: Tensor, target: Tensor, smoothing: float, z_loss: float, eps: float) -> tuple[Tensor, Tensor]:
    """Error bounds of the losses and of the logits' gradients for upstream gradients of one, from fp64 logits.

    Each step rounds once: the shift l - m by eps |l - m|, which exp makes relative; the sum of V terms by sqrt(V) eps;
    then the log, and every product and sum behind it.
    """
    total = logits.shape[-1]
    p, below = logits.softmax(-1), logits.amax(-1, keepdim=True) - logits
    lse = logits.logsumexp(-1)
    log_z = lse - logits.amax(-1)
    of_z = eps * (3 + math.sqrt(total) + 2 * (p * below).sum(-1))
    hit = F.one_hot(target.clamp(0), total)
    distance = (below * hit).sum(-1)
    losses = of_z + eps * (2 * log_z.abs() + 3 * distance + math.sqrt(total) * smoothing * below.mean(-1))
    of_lse = of_z + eps * (log_z.abs() + lse.abs())
    losses += z_loss * (2 * lse.abs() * of_lse + 3 * eps * lse.square()) + eps * (z_loss * lse.square())
    scale = 1 + 2 * z_loss * lse.abs()
    relative = eps * (below + log_z.abs().unsqueeze(-1) + 4) + of_z.unsqueeze(-1)
    grads = p * (relative * scale.unsqueeze(-1) + 2 * z_loss * of_lse.unsqueeze(-1))
    grads = grads + 4 * eps * (p * scale.unsqueeze(-1) + smoothing / total + (1 - smoothing) * hit)
    ignored = target == -100
    return losses.masked_fill(ignored, 0), grads.masked_fill(ignored.unsqueeze(-1), 0)


def loss_equals_torch(
    total: int, dtype: torch.dtype, smoothing: float, z_loss: float, reduction: str, chunk: int, scale: float
) -> None:
    mesh = tp_mesh()
    logits = torch.randn(2, 7, total, dtype=dtype) * scale
    target = torch.randint(total, (2, 7))
    target[0, 0], target[1, 6], target[1, 2] = 0, total - 1, -100
    reference = logits.double().clone().requires_grad_()
    losses = reference_loss(reference, target, smoothing, z_loss)
    count = int((target != -100).sum())
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}[reduction]
    upstream = torch.randn(expected.shape, dtype=torch.float32 if dtype != torch.float64 else dtype)
    expected.backward(upstream.double())
    assert reference.grad is not None

    sizes = chunk_sizes(total, mesh.size())
    start, own = offsets(sizes)[mesh.get_local_rank()], sizes[mesh.get_local_rank()]
    shard = logits.narrow(-1, start, own).requires_grad_()  # strided: nothing may need a copy of it
    actual = vocab_parallel_cross_entropy(
        shard, target, mesh, label_smoothing=smoothing, z_loss=z_loss, reduction=reduction, shard_sizes=sizes,
        chunk_tokens=chunk,
    )  # fmt: skip
    actual.backward(upstream)
    assert shard.grad is not None and shard.grad.dtype == dtype

    double = dtype == torch.float64
    eps = torch.finfo(actual.dtype).eps * (2 if double else 1)  # of fp64, the reference's own error comes on top
    of_losses, of_grads = bounds(logits.double(), target, smoothing, z_loss, eps)
    weights = {"none": upstream, "sum": upstream.expand(2, 7), "mean": upstream.expand(2, 7) / count}[reduction]
    grads_bound = of_grads * weights.double().abs().unsqueeze(-1) + 2 * eps * reference.grad.abs()
    unit = torch.finfo(dtype).eps / 2
    grads_bound += unit * (reference.grad.abs() + grads_bound) + torch.finfo(dtype).smallest_normal
    if reduction != "none":
        size = losses.detach().abs().sum()
        of_losses = (of_losses.sum() + math.sqrt(14) * eps * size) / (count if reduction == "mean" else 1)
    what = f"V={total} {dtype} smoothing={smoothing} z={z_loss} {reduction} chunk={chunk} scale={scale}"
    assert_within_bound(actual, expected.detach(), of_losses + eps * expected.detach().abs(), f"loss, {what}")
    part = (slice(None), slice(None), slice(start, start + own))
    assert_within_bound(shard.grad, reference.grad[part], grads_bound[part], f"gradient, {what}")
    everyone = [torch.empty_like(actual) for _ in range(mesh.size())]
    dist.all_gather(everyone, actual.detach())
    assert all(torch.equal(other, actual) for other in everyone), f"the loss differs between ranks, {what}"


def losses_equal_torch() -> int:
    count = 0
    for total in (13, 1):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)):
                for reduction, chunk, scale in (("none", 3, 1.0), ("mean", 1, 30.0), ("sum", 100, 5.0)):
                    loss_equals_torch(total, dtype, smoothing, z_loss, reduction, chunk, scale)
                    count += 1
    special_values()
    if dist.get_world_size() == COMPILED_WORLD:
        compiled_loss_equals_eager()
    return count


def special_values() -> None:
    """A shard that is masked out as a whole, ignored tokens only, and no token at all."""
    mesh = tp_mesh()
    width = 4
    rank, total = mesh.get_local_rank(), width * mesh.size()
    logits = torch.randn(3, total)
    logits[:, width:] = -torch.inf
    target = torch.tensor([1, 0, 3])
    shard = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(shard, target, mesh)
    close(loss, F.cross_entropy(logits, target), "loss with masked columns")
    loss.backward()
    assert shard.grad is not None
    assert bool(shard.grad.isfinite().all())
    assert rank == 0 or bool((shard.grad == 0).all())
    nothing = torch.full((3,), -100)
    assert vocab_parallel_cross_entropy(shard, nothing, mesh).isnan(), "the mean of nothing, as F.cross_entropy's"
    assert vocab_parallel_cross_entropy(shard, nothing, mesh, reduction="sum") == 0
    assert vocab_parallel_cross_entropy(shard[:0], target[:0], mesh, reduction="none").shape == (0,)
    moved = torch.tensor([1, 7, 3])
    close(
        vocab_parallel_cross_entropy(shard, moved, mesh, ignore_index=7),
        F.cross_entropy(logits, moved.masked_fill(moved == 7, -100)),
        "loss with an ignored label of its own",
    )


def compiled_loss_equals_eager() -> None:
    mesh = tp_mesh()

    def run(x: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x.sin(), target, mesh, label_smoothing=0.1)

    target = torch.arange(6) % (4 * mesh.size())
    results = []
    for fn in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        x = torch.randn(6, 4, requires_grad=True)
        fn(x, target).backward()
        assert x.grad is not None
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", WORLDS)
def test_the_loss_and_its_gradient_are_within_the_fp64_bound(ranks: Pools, world: int) -> None:
    assert ranks(world).run(losses_equal_torch, timeout=LIMIT_S) == [72] * world


def memory_of_the_loss(tokens: int, columns: int, chunk: int) -> tuple[int, int, int]:
    """Peak bytes of forward and backward beyond the logits: in chunks, in one chunk, and by F.cross_entropy."""
    mesh = tp_mesh()
    logits = torch.randn(tokens, columns)
    target = torch.randint(columns * mesh.size(), (tokens,))

    def ours(chunk_tokens: int) -> None:
        shard = logits.detach().requires_grad_()
        vocab_parallel_cross_entropy(shard, target, mesh, chunk_tokens=chunk_tokens).backward()

    def theirs() -> None:
        F.cross_entropy(logits.detach().requires_grad_(), target % columns).backward()

    ours(chunk)  # the first call agrees and connects
    return peak_bytes(lambda: ours(chunk)), peak_bytes(lambda: ours(tokens)), peak_bytes(theirs)


@pytest.mark.slow("2 s")
def test_the_peak_memory_of_the_loss_is_its_gradient_and_one_chunk(ranks: Pools) -> None:
    tokens, columns, chunk = 2048, 1024, 64
    shard, piece = tokens * columns * 4, chunk * columns * 4
    for chunked, whole_at_once, torchs in ranks(2).run(memory_of_the_loss, tokens, columns, chunk, timeout=LIMIT_S):
        assert shard <= chunked <= shard + 1.5 * piece + 200 * tokens, f"{chunked / shard:.2f} shards"
        assert whole_at_once > 1.9 * shard, "the measure must see what chunks save"
        assert torchs > 1.9 * shard


def bad_loss(what: str) -> None:
    mesh = tp_mesh()
    rank = mesh.get_local_rank()
    logits, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    options: dict[str, Any] = {}
    if what == "outside":
        target[2] = 3 * mesh.size()
    elif what == "negative":
        target[1] = -1
    elif what == "differ":
        target[3] = rank
    elif what == "shape":
        target = target[:2]
    elif what == "float":
        target = target.float()
    elif what == "reduction":
        options["reduction"] = "average"
    elif what == "smoothing":
        options["label_smoothing"] = 1.5
    elif what == "z":
        options["z_loss"] = -1.0
    elif what == "chunk":
        options["chunk_tokens"] = 0
    elif what == "sizes":
        options["shard_sizes"] = [3, 4]
    vocab_parallel_cross_entropy(logits, target, mesh, **options)


BAD_LOSSES = {
    "outside": r"target must be within \[0, 9\), the vocabulary.* 1 of 4 labels are not, the first is number 2: 9",
    "negative": r"labels are not, the first is number 1: -1",
    "differ": r"target must be equal on all ranks of the group: 1 of 4 labels differ.*number 3, by rank \[0, 1, 2\]",
    "shape": r"target must have the shape of logits_shard without its last dimension \(\(4,\)\), got \(2,\)",
    "float": r"target must be int64 or int32 labels, got torch.float32",
    "reduction": r"reduction must be one of \['none', 'mean', 'sum'\], got 'average'",
    "smoothing": r"label_smoothing must be between 0 and 1, got 1.5",
    "z": r"z_loss must be a finite number, at least 0, got -1.0",
    "chunk": r"chunk_tokens must be at least 1, got 0",
    "sizes": r"shard_sizes must have one entry per rank \(3\), got \[3, 4\]",
}


def refused(attempt: Callable[[str], None], expected: dict[str, str]) -> None:
    """Each of these is a ValueError with these words, and the group goes on."""
    for what, words in expected.items():
        with pytest.raises(ValueError, match=words):
            attempt(what)
        mesh = tp_mesh()
        loss = vocab_parallel_cross_entropy(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), mesh)
        close(loss, torch.tensor(math.log(3 * mesh.size())), f"the loss after {what}")


def test_bad_input_of_the_loss_is_refused_on_every_rank_and_the_group_goes_on(ranks: Pools) -> None:
    ranks(3).run(refused, bad_loss, BAD_LOSSES, timeout=LIMIT_S)


def uneven_shards_that_nobody_declared() -> None:
    mesh = tp_mesh()
    columns = 3 if mesh.get_local_rank() == 0 else 2
    vocab_parallel_cross_entropy(torch.randn(4, columns), torch.zeros(4, dtype=torch.int64), mesh)


def test_uneven_shards_without_their_sizes_are_refused_on_every_rank(ranks: Pools) -> None:
    for error in ranks(2).run(uneven_shards_that_nobody_declared, return_exceptions=True, timeout=LIMIT_S):
        with pytest.raises(GroupMismatch, match=r"vocabulary shards=\[3, 3\](.|\n)*pass shard_sizes on every rank"):
            raise error


def bad_embedding(what: str) -> None:
    mesh = tp_mesh()
    table = VocabParallelEmbedding(7, WIDTH, mesh)
    ids = torch.tensor([[1, 2], [3, 6]])
    if what == "large":
        ids[1, 0] = 7
    elif what == "negative":
        ids[0, 1] = -1
    elif what == "float":
        ids = ids.float()
    elif what == "sizes":
        table(ids, shard_sizes=[1, 1])
    elif what == "padding":
        VocabParallelEmbedding(7, WIDTH, mesh, padding_idx=7)
    elif what == "features":
        VocabParallelEmbedding(7, WIDTH, mesh, sequence_parallel=True, sequence_dim=-1)
    elif what in ("sparse", "scale_grad_by_freq"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(7, WIDTH, **{what: True}), mesh)
    elif what == "twice":
        plain = nn.Embedding(7, WIDTH)
        plain.weight = table.weight
        VocabParallelEmbedding.from_embedding(plain, mesh)
    elif what == "tie":
        table.tie(ColumnParallelLinear(WIDTH, 8, mesh))
    elif what == "one rank":
        ids[0, 0] += 7 * (mesh.get_local_rank() == 1)
    table(ids)


BAD_EMBEDDINGS = {
    "large": r"ids must be within \[0, 7\), the vocabulary: 1 of 4 are not, the first is ids\[1, 0\] = 7",
    "negative": r"the first is ids\[0, 1\] = -1",
    "float": r"ids must be int64 or int32, got torch.float32",
    "sizes": r"shard_sizes \(\[1, 1\]\) cuts a sequence: it needs sequence_parallel=True",
    "padding": r"padding_idx \(7\) must be within num_embeddings \(7\)",
    "features": r"sequence_dim \(-1\) is the features' dimension",
    "sparse": r"nn.Embedding\(sparse=True\) cannot be cut",
    "scale_grad_by_freq": r"nn.Embedding\(scale_grad_by_freq=True\) cannot be cut",
    "twice": r"is a DTensor already",
    "tie": r"cannot tie an embedding and a head of different shape: \(7, 6\) and \(8, 6\)",
}


def test_bad_input_of_an_embedding_is_refused_on_every_rank_and_the_group_goes_on(ranks: Pools) -> None:
    ranks(3).run(refused, bad_embedding, BAD_EMBEDDINGS, timeout=LIMIT_S)


def test_ids_that_only_one_rank_finds_wrong_end_in_an_error_on_all(ranks: Pools) -> None:
    errors = ranks(2).run(bad_embedding, "one rank", return_exceptions=True, timeout=LIMIT_S)
    assert isinstance(errors[1], ValueError)
    with pytest.raises(GroupMismatch, match=r"rank 1 refused its arguments: ids must be within \[0, 7\)"):
        raise errors[0]


def seeded_faults() -> None:
    """The comparison's reason: a shard's own softmax, as if the ranks had not met."""
    mesh = tp_mesh()
    assert mesh.size() == 2
    shard = torch.zeros(2, 4)
    close(vocab_parallel_cross_entropy(shard, torch.zeros(2, dtype=torch.int64), mesh), torch.tensor(math.log(8)), "ok")
    close(F.cross_entropy(shard, torch.zeros(2, dtype=torch.int64)), torch.tensor(math.log(8)), "the faulty loss")


def test_the_comparison_catches_a_softmax_of_one_shard_alone(ranks: Pools) -> None:
    error = ranks(2).run(seeded_faults, return_exceptions=True, timeout=LIMIT_S)[0]
    assert isinstance(error, AssertionError) and "the faulty loss: differs by" in str(error)
