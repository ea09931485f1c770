"""What the ranks must have in common in a call: its :class:`Signature`, and what may differ from call to call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tpkernels import dispatch
from tpkernels.partition import Layout

__all__ = ["Compared", "Signature"]


class Signature(NamedTuple):
    """What all ranks must have in common in one call; printed in errors."""

    op: str
    dtype: torch.dtype
    device: str
    layout: Layout
    columns: int
    implementation: str
    detail: str = ""
    out_dtype: torch.dtype | None = None
    activation: str | None = None
    experts: int = 1
    top_k: int = 1
    bias: bool = False
    """Whether one is added after the sum over the ranks, and so on all of them."""

    def __str__(self) -> str:
        kind = "feature" if self.layout.feature else "row"
        text = (
            f"{self.op}(dtype={dispatch.dtype_text(self.dtype, self.out_dtype)}, device={self.device}, "
            f"{kind} shards={list(self.layout.sizes)}, outer={self.layout.outer}, inner={self.layout.inner}, "
            f"columns={self.columns}, implementation={self.implementation!r}"
        )
        text += f", activation={self.activation!r}" if self.activation else ""
        text += ", with a bias" if self.bias else ""
        if dispatch.FACTS[self.op].grouped:
            text += f", experts={self.experts}, top_k={self.top_k}"
        return text + (f", {self.detail})" if self.detail else ")")


class Compared(NamedTuple):
    """A call in which the ranks must have more in common than what is the same in each call of its signature.

    ``digest`` stands for it, in :attr:`Context.fingerprint` whole and in the tags of messages in 12 bits: ranks whose
    digests differ are stopped as those are that make different calls.
    """

    signature: Signature
    what: str
    digest: int

    def __str__(self) -> str:
        return f"{self.signature} with {self.what} #{self.digest:016x}"
