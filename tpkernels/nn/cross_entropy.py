"""Cross entropy of logits whose vocabulary is cut over the ranks; the full logits exist nowhere.

::

    m_r = max_v l_v,  s_r = sum_v exp(l_v - m_r),  t_r = l_target where this rank has it, else 0     local, in chunks
    m, Z = max_r m_r, sum_r s_r exp(m_r - m),  t = sum_r t_r                                         one all-gather
    loss = log Z + m - t,    dl_v = dloss (exp(l_v - m) / Z - [v = target])                          local, in chunks

Owns the sums of single tokens and how they meet: one all-gather of four or five numbers per token and rank in the
forward pass, whatever the number of chunks; none in the backward pass, because every rank knows the loss.  Sums are in
fp32 (fp64 for fp64), in rank order, so that the loss is equal bit for bit on all ranks.

Beside its inputs, its gradient (the size of the logits' shard) and a few numbers per token, a call keeps one fp32
buffer of ``chunk_tokens`` rows of the shard at a time.

Every rank's labels travel with the sums: labels outside the vocabulary, and labels that are not the same on all ranks,
are refused on every rank with one message.

With ``same_bits`` each block of columns has sums of its own, as many at every degree, and "rank" above means "block".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, group_name, process_group, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm import canonical
from tpkernels.ops.checks import DTYPES, check_local, check_shard_sizes
from tpkernels.ops.collectives import start_gather
from tpkernels.ops.registration import call, define
from tpkernels.ops.shapes import fresh
from tpkernels.partition import Layout, halves, offsets

__all__ = ["Settings", "TokenSums", "auto_chunk", "combine", "local_sums", "reduce", "vocab_parallel_cross_entropy"]

CHUNK_BYTES = 64 << 20
"""fp32 bytes of one chunk; at 32k columns 512 tokens, enough rows for the full rate of a GEMM."""

REDUCTIONS = ("none", "mean", "sum")


class Settings(NamedTuple):
    """The options of the loss; equal on all ranks."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    group: GroupLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    shard_sizes: Sequence[int] | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross entropy of this rank's columns of the logits; the loss is equal on all ranks.

    Unfused equation, with l the logits of all ranks side by side and V their number::

        loss = F.cross_entropy(l, target, ignore_index=, label_smoothing=, reduction=) + z_loss * reduce(logsumexp(l)^2)

    ================  ====================  ==========================================================================
    argument          shape                 notes
    ================  ====================  ==========================================================================
    ``logits_shard``  ``[..., V_r]``        fp32, bf16, fp16 or fp64; any strides; what a column layer gives
    ``target``        ``[...]``             int64 or int32, equal on all ranks
    result            ``[]`` or ``[...]``   fp32 (fp64 for fp64), also for lower precision
    ================  ====================  ==========================================================================

    Args:
        ignore_index: tokens of this label add nothing to the sum or to the count of the mean.
        label_smoothing: share of the target that is spread evenly over the vocabulary, 0 to 1.
        z_loss: weight of the squared log of the softmax's denominator, which keeps logits near zero (PaLM uses 1e-4).
        reduction: "mean" (over the tokens that are not ignored; NaN if there are none), "sum" or "none".
        shard_sizes: every rank's columns (``head.shard_sizes``); needed, on every rank, when they are not all equal.
        chunk_tokens: tokens that are worked on at a time; default: as many as make a chunk of 64 MiB.

    Examples:
        >>> head = tpk.nn.ColumnParallelLinear(8, 100, mesh["tp"], bias=False)
        >>> tpk.nn.vocab_parallel_cross_entropy(head(torch.ones(3, 8)), torch.tensor([1, 2, 99]), mesh["tp"]).shape
        torch.Size([])

    Raises:
        ValueError: bad arguments; labels that are neither ``ignore_index`` nor within the vocabulary, or that differ
            between ranks (on every rank; the group works on).
        GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.

    The gradient that arrives must be equal on all ranks.  To predict the next token, shift the labels, not the logits:
    ``target = tokens.roll(-1, 1)`` with ``ignore_index`` in the last place copies nothing.
    """
    settings = Settings(ignore_index, label_smoothing, z_loss)
    check_local(group, logits_shard=[logits_shard], target=[target])
    pg = process_group(group)
    try:
        sizes = _check(logits_shard, target, pg.size(), pg.rank(), settings, reduction, shard_sizes, chunk_tokens)
        Vocabulary.of(pg, sizes)
    except ValueError as error:
        if pg.size() > 1:
            agreement.refuse(resolve(pg), "vocab_parallel_cross_entropy", str(error))
        raise
    chunk = chunk_tokens or auto_chunk([sum(sizes)] if same_bits_of(group) else sizes)
    losses = call("cross_entropy", logits_shard, target, group_name(pg), sizes, settings, chunk)[0]
    return reduce(losses, target, reduction, ignore_index)


def auto_chunk(sizes: Sequence[int]) -> int:
    """Tokens per chunk, the same on all ranks."""
    return max(1, CHUNK_BYTES // (4 * max(1, *sizes)))


def reduce(losses: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """Losses of single tokens as the caller wants them; those of ignored tokens are zero already."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def check_options(settings: Settings, reduction: str, chunk_tokens: int | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {list(REDUCTIONS)}, got {reduction!r}")
    if not 0 <= settings.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {settings.label_smoothing}")
    if not (math.isfinite(settings.z_loss) and settings.z_loss >= 0):
        raise ValueError(f"z_loss must be a finite number, at least 0, got {settings.z_loss}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")


def check_target(target: Tensor, shape: Sequence[int], of: str) -> None:
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target must be int64 or int32 labels, got {target.dtype} of shape {tuple(target.shape)}")
    if tuple(target.shape) != tuple(shape):
        raise ValueError(f"target must have the shape of {of} without its last dimension ({tuple(shape)}), "
                         f"got {tuple(target.shape)}")  # fmt: skip


def _check(
    logits: Tensor,
    target: Tensor,
    world_size: int,
    rank: int,
    settings: Settings,
    reduction: str,
    shard_sizes: Sequence[int] | None,
    chunk_tokens: int | None,
) -> list[int]:
    check_options(settings, reduction, chunk_tokens)
    if logits.dim() < 1 or logits.dtype not in DTYPES:
        raise ValueError(f"logits_shard must be floating point, [..., V_r], got {logits.dtype} {tuple(logits.shape)}")
    check_target(target, logits.shape[:-1], "logits_shard")
    check_shard_sizes(shard_sizes, world_size, own=(rank, logits.shape[-1]))
    return [logits.shape[-1]] * world_size if shard_sizes is None else list(shard_sizes)


# --- sums of single tokens --------------------------------------------------------------------------------------------


class TokenSums(NamedTuple):
    """What all ranks know of every token after the all-gather: fp32 or fp64, ``[N]`` each."""

    losses: Tensor
    largest: Tensor
    """m, the largest logit."""
    log_z: Tensor
    """log of the softmax's denominator over exp(m)."""


class Vocabulary(NamedTuple):
    """Into which parts a vocabulary is cut, each with sums: one for each rank, or each block of ``same_bits``."""

    sizes: list[int]
    """Columns of the parts of all ranks."""
    own: list[tuple[int, slice]]
    """Of each part of this rank: the number of its first column in the vocabulary, and its columns in the shard."""

    @classmethod
    def of(cls, pg: ProcessGroup, shard_sizes: Sequence[int]) -> Vocabulary:
        """``shard_sizes``: every rank's columns, which all ranks know.

        Raises:
            ValueError: with ``same_bits``, on every rank: they are not those of its blocks.
        """
        same_bits, start = same_bits_of(group_name(pg)), offsets(shard_sizes)[pg.rank()]
        if not same_bits:
            return cls(list(shard_sizes), [(start, slice(None))])
        due = halves(sum(shard_sizes), pg.size())
        if tuple(shard_sizes) != due:
            raise ValueError(
                f"a vocabulary of {sum(shard_sizes)} with same_bits={same_bits} is cut into shards of {list(due)} "
                f"columns, as output heads cut it, got {list(shard_sizes)}"
            )
        widths = halves(shard_sizes[pg.rank()], same_bits // pg.size())
        panels = [slice(low, low + width) for low, width in zip(offsets(widths), widths, strict=True)]
        return cls([*halves(sum(shard_sizes), same_bits)], [(start + panel.start, panel) for panel in panels])

    def columns(self, part: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """Of rows of the shard: first column, place and numbers of each part of this rank."""
        for start, panel in self.own:
            yield start, panel, part if panel == slice(None) else canonical.dense(part[:, panel])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def local_sums(logits: Tensor, target: Tensor, start: int, smoothing: bool) -> Tensor:
    """This rank's part of the sums of a chunk: m_r, s_r, t_r, the label, with ``smoothing`` also sum(l - m_r).

    ``logits`` is ``[tokens, V_r]``, whose first column is number ``start`` of the vocabulary.
    """
    columns = logits.shape[1]
    dtype = accumulation_dtype(logits.dtype)
    sums = torch.zeros(logits.shape[0], 5 if smoothing else 4, dtype=dtype, device=logits.device)
    sums[:, 3] = target
    if columns == 0:
        sums[:, 0] = -torch.inf
        return sums
    largest = logits.amax(-1).to(dtype)
    sums[:, 0] = largest
    shifted = logits - largest.masked_fill(largest == -torch.inf, 0).unsqueeze(-1)
    if smoothing:
        sums[:, 4] = shifted.sum(-1)
    sums[:, 1] = shifted.exp_().sum(-1)
    index, own = _own(target, start, columns)
    sums[:, 2] = logits.gather(1, index).squeeze(1).to(dtype).masked_fill(~own, 0)
    return sums


def _own(target: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Columns of the labels in this shard as an index ``[tokens, 1]``, and which of them are this rank's."""
    column = target.long() - start
    return column.clamp(0, columns - 1).unsqueeze(-1), (column >= 0) & (column < columns)


def combine(sums: Tensor, target: Tensor, name: str, sizes: Sequence[int], settings: Settings, what: str) -> TokenSums:
    """Gather and check all ranks' sums ``[parts, N, 4 or 5]`` of N tokens; their losses.  Raises alike on all ranks.

    ``sizes``: the columns of all ranks' parts.
    """
    group, parts = resolve(name), sums.shape[0]
    table = sums
    if group.size > 1:
        rows = sums.flatten(0, 1)
        layout = Layout.of(rows.shape, 0, [rows.shape[0]] * group.size)
        detail = f"{what}, vocabulary shards={list(sizes)}, {settings}"
        table = start_gather(group, rows, layout, "auto", detail, at_once=True)().view(len(sizes), *sums.shape[1:])
    total = sum(sizes)
    ignored = target == settings.ignore_index
    check_labels(table[::parts, :, 3], target, ignored, total, group.rank)
    largest = table[..., 0].amax(0)
    finite = largest.masked_fill(largest == -torch.inf, 0)
    z = (table[..., 1] * torch.exp(table[..., 0] - finite)).sum(0)
    log_z = z.log()
    losses = log_z - (1 - settings.label_smoothing) * (table[..., 2].sum(0) - finite)
    if settings.label_smoothing:
        # - smoothing / V * sum_v (l_v - m); a rank without columns has no largest one
        shifts = sum(table[r, :, 4] + size * (table[r, :, 0] - finite) for r, size in enumerate(sizes) if size)
        losses -= settings.label_smoothing * (cast(Tensor, shifts) / total)
    if settings.z_loss:
        losses += settings.z_loss * (largest + log_z).square()
    return TokenSums(losses.masked_fill_(ignored, 0), largest, log_z)


def check_labels(labels: Tensor, target: Tensor, ignored: Tensor, total: int, rank: int) -> None:
    """``labels`` are those of all ranks, ``[W, N]``: what is raised here is raised everywhere."""
    differ = (labels != labels[0]).any(0)
    outside = ~ignored & ((target < 0) | (target >= total))
    if not bool((differ | outside).any()):
        return
    if bool(differ.any()):
        token = int(differ.nonzero()[0])
        values = [int(value) for value in labels[:, token]]
        raise ValueError(
            f"target must be equal on all ranks of the group: {int(differ.sum())} of {len(target)} labels differ, the "
            f"first is number {token}, by rank {values} (seed the data by the data-parallel rank alone)"
        )
    token = int(outside.nonzero()[0])
    raise ValueError(
        f"target must be within [0, {total}), the vocabulary, or ignore_index: {int(outside.sum())} of {len(target)} "
        f"labels are not, the first is number {token}: {int(target[token])} (rank {rank} and all others)"
    )


def checked_labels(labels: Tensor, target: Tensor, ignored: Tensor, total: int, rank: int) -> Tensor:
    """``target``, after :func:`check_labels`: an op, because a compiler cannot trace that its values decide."""
    checked: Tensor = call("checked_labels", labels, target, ignored, total, rank)
    return checked


def _checked_labels(labels: Tensor, target: Tensor, ignored: Tensor, total: int, rank: int) -> Tensor:
    check_labels(labels, target, ignored, total, rank)
    return target.clone()  # as what an op returns shares no memory with what it takes


def _checked_labels_fake(labels: Tensor, target: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(target)


def logits_gradient(
    logits: Tensor, target: Tensor, grads: Tensor, sums: TokenSums, start: int, total: int, settings: Settings
) -> Tensor:
    """dl of a chunk ``[tokens, V_r]`` in the accumulation dtype; ``grads`` are zero for ignored tokens."""
    columns = logits.shape[1]
    dl = (logits - sums.largest.unsqueeze(-1)).sub_(sums.log_z.unsqueeze(-1)).exp_()
    if columns == 0:
        return dl
    scale = grads
    if settings.z_loss:
        scale = grads * (1 + 2 * settings.z_loss * (sums.largest + sums.log_z))
    dl.mul_(scale.unsqueeze(-1))
    if settings.label_smoothing:
        dl.sub_((grads * (settings.label_smoothing / total)).unsqueeze(-1))
    index, own = _own(target, start, columns)
    hit = (grads * (settings.label_smoothing - 1)).masked_fill(~own, 0)
    return dl.scatter_add_(1, index, hit.unsqueeze(-1))


# --- the op -----------------------------------------------------------------------------------------------------------


def _chunks(x: Tensor, tokens: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """``x`` as 2-D views of at most ``tokens`` rows, with their places among all rows; nothing is copied."""
    if x.dim() > 2 and not x.is_contiguous():
        rows = math.prod(x.shape[1:-1])
        for i, part in enumerate(x.unbind(0)):
            yield from _chunks(part, tokens, first + i * rows)
        return
    flat = x.view(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if x.dim() == 2:
        flat = x
    for low in range(0, flat.shape[0], tokens):
        part = flat[low : low + tokens]
        yield slice(first + low, first + low + part.shape[0]), part


def _kernel(
    logits: Tensor,
    target: Tensor,
    group_name: str,
    shard_sizes: list[int],
    settings: Settings,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    vocabulary, smoothing = Vocabulary.of(process_group(group_name), shard_sizes), settings.label_smoothing > 0
    labels = target.reshape(-1)
    shape = len(vocabulary.own), labels.shape[0], 5 if smoothing else 4
    sums = torch.empty(shape, dtype=accumulation_dtype(logits.dtype), device=logits.device)
    for place, rows in _chunks(logits, chunk_tokens):
        for of_part, (start, _, part) in zip(sums, vocabulary.columns(rows), strict=True):
            of_part[place] = local_sums(part, labels[place], start, smoothing)
    losses, largest, log_z = combine(sums, labels, group_name, vocabulary.sizes, settings, "cross entropy")
    return fresh(losses, target.shape), fresh(largest, largest.shape), fresh(log_z, log_z.shape)


def _fake(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(logits.dtype)
    losses = torch.empty_like(target, dtype=dtype, memory_format=torch.contiguous_format)
    return losses, losses.new_empty(target.numel()), losses.new_empty(target.numel())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, *output[1:])


def _backward(ctx: Any, grads: Tensor, *_: Any) -> tuple[Any, ...]:
    return (torch.ops.tpkernels.cross_entropy_backward(grads, *ctx.saved_tensors, *ctx.options),)


def _backward_kernel(
    grads: Tensor,
    logits: Tensor,
    target: Tensor,
    largest: Tensor,
    log_z: Tensor,
    group_name: str,
    shard_sizes: list[int],
    settings: Settings,
    chunk_tokens: int,
) -> Tensor:
    labels = target.reshape(-1)
    scale = grads.reshape(-1).masked_fill(labels == settings.ignore_index, 0)
    dl = torch.empty_like(logits, memory_format=torch.contiguous_format)
    flat = dl.view(labels.shape[0], -1) if dl.numel() else dl.reshape(labels.shape[0], dl.shape[-1])
    vocabulary, total = Vocabulary.of(process_group(group_name), shard_sizes), sum(shard_sizes)
    for place, rows in _chunks(logits, chunk_tokens):
        sums = TokenSums(scale[place], largest[place], log_z[place])
        for start, panel, part in vocabulary.columns(rows):
            flat[place, panel] = logits_gradient(part, labels[place], scale[place], sums, start, total, settings)
    return dl


def _backward_fake(grads: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


define(
    "cross_entropy",
    kernel=_kernel,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
define("cross_entropy_backward", kernel=_backward_kernel, fake=_backward_fake)
define("checked_labels", kernel=_checked_labels, fake=_checked_labels_fake)
