"""Refuse batches that differ between the ranks of one model, before anything is computed with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpkernels.comm.groups import Group
from tpkernels.integrations.keras import backend
from tpkernels.nn.digests import digest_of
from tpkernels.ops.agreed_call import exchange
from tpkernels.ops.mesh_exchange import exchange_bytes

__all__ = ["check_same", "compared"]


def compared(function: Callable[[Any], Any], group: Group) -> Callable[[Any], Any]:
    """``function`` of a batch, which is compared over the ranks first.

    Raises:
        ValueError: on every rank, with the place in the batch that differs.
    """

    def step(data: Any) -> Any:
        if not isinstance(data, list):  # an iterator of batches, as Keras passes to several steps at once
            data = list(data)
        check_same(data, group, "batches")
        return function(data)

    return step


def check_same(data: Any, group: Group, what: str) -> None:
    """Raise ``ValueError`` on every rank if ``data`` is not the same on all."""
    mine = _digests(data)
    total = hashlib.sha256(repr(mine).encode()).digest()
    if len(set(exchange_bytes([group], "digests of a batch", total))) > 1:
        said = exchange(group, "a batch", mine)
        wrong = next(name for name in mine if len({one.get(name) for one in said}) > 1 or len(said[0]) != len(mine))
        texts = "; ".join(f"rank {rank}: {one.get(wrong, 'nothing')}" for rank, one in enumerate(said))
        raise ValueError(
            f"the ranks were given different {what}: {wrong} differs ({texts}). All ranks of a tensor-parallel "
            "model need the same data in the same order"
        )


def _digests(data: Any) -> dict[str, str]:
    leaves = backend.keras_module().tree.flatten(data)
    return {f"tensor {place}": _digest(leaf) for place, leaf in enumerate(leaves)}


def _digest(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(np.ascontiguousarray(leaf))
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {digest_of(leaf.detach(), [0] * leaf.dim()):016x}"
    return hashlib.sha256(repr(leaf).encode()).hexdigest()[:16]
