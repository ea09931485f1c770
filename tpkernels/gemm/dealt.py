"""Rows of tokens by expert where each rank has some of the experts: which rows a rank has, and who sends them.

The experts are numbered through: rank r has ``expert_sizes[r]`` of them, those after the experts of the ranks before.
Tokens are numbered through in the same way.  A token goes to every rank that has one of its experts, once, however many
of them are there.  The tokens that come to a rank are *received* in the order of their numbers, so those of one source
lie together; its own are among them.  Its rows are those of :class:`~tpkernels.gemm.grouped.TokenRows`, in the same
order, of its own experts.

All of it is a function of the routing of all tokens, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.gemm.grouped import TokenRows
from tpkernels.partition import offsets

__all__ = ["DealtRows"]


class DealtRows(TokenRows):
    """The rows of the experts of ``rank``; ``tokens[i]`` is the place among the received tokens of the token of row i.

    On a CUDA device this waits for the experts, as :class:`~tpkernels.gemm.grouped.TokenRows` does.
    """

    def __init__(self, experts: Tensor, expert_sizes: Sequence[int], token_sizes: Sequence[int], rank: int) -> None:
        """``experts``: ``[T, k]``, of all tokens, each in ``[0, sum(expert_sizes))``."""
        self._dealt = experts, expert_sizes, token_sizes, rank
        self.num_tokens_of_all, self.top_k = experts.shape
        self.num_own_tokens = token_sizes[rank]
        first = offsets(expert_sizes)[rank]
        last = first + expert_sizes[rank]
        sends = _destinations(experts, expert_sizes)
        by_source = sends.split(list(token_sizes))
        self.counts: list[list[int]] = torch.stack([part.sum(0) for part in by_source]).tolist()
        """``counts[s][d]``: how many tokens rank s sends to rank d."""
        self.picks = [column.nonzero().flatten() for column in by_source[rank].unbind(1)]
        """By destination, which of this rank's tokens it sends there."""
        arrives = sends[:, rank]
        self.received = arrives.nonzero().flatten()
        """Numbers of the received tokens."""
        self.num_tokens = len(self.received)
        starts = offsets([source[rank] for source in self.counts])
        self.sources = [(start, start + source[rank]) for start, source in zip(starts, self.counts, strict=True)]
        """By source, the range of the tokens that were received from there."""
        flat = experts.reshape(-1)
        here = ((flat >= first) & (flat < last)).nonzero().flatten()
        place = arrives.cumsum(0) - 1
        self._token_of_slot = place[here.div(self.top_k, rounding_mode="floor")]
        self._sort(flat[here] - first, last - first)
        self.slots, self.tokens = here[self._order], self._token_of_slot[self._order]

    def by_slot(self) -> DealtRows:
        """The same rows, where each of a token's experts is a token of its own."""
        experts, expert_sizes, token_sizes, rank = self._dealt
        return DealtRows(experts.reshape(-1, 1), expert_sizes, [size * self.top_k for size in token_sizes], rank)

    def _slots_before(self, tokens: Sequence[int]) -> Tensor:
        return torch.searchsorted(self._token_of_slot, torch.tensor(tokens, device=self._flat.device))

    def of_tokens(self) -> Tensor:
        order = self.tokens.argsort(stable=True)
        tokens = self.tokens[order]
        found = self.tokens.new_full((self.num_tokens, self.top_k), -1)
        found[tokens, torch.arange(len(tokens), device=tokens.device) - torch.searchsorted(tokens, tokens)] = order
        return found

    def to_slots(self, values: Tensor) -> Tensor:
        """``[T, k]`` of all tokens; 0 for the experts of other ranks."""
        found = values.new_zeros(self.num_tokens_of_all * self.top_k)
        return found.index_copy_(0, self.slots, values).view(self.num_tokens_of_all, self.top_k)


def _destinations(experts: Tensor, expert_sizes: Sequence[int]) -> Tensor:
    """``[T, W]``: whether a token goes to a rank."""
    ends = torch.tensor(expert_sizes, device=experts.device).cumsum(0)
    owners = torch.bucketize(experts, ends, right=True)  # the first rank whose experts end behind this one
    found = torch.zeros(experts.shape[0], len(expert_sizes), dtype=torch.bool, device=experts.device)
    return found.scatter_(1, owners, True)
