"""Collectives on Keras tensors, for user code beside the model: all-reduce, all-gather, broadcast, scatter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.comm.groups import resolve
from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import array_split
from tpkernels.integrations.keras.start import check_backend_name, check_world_size, join
from tpkernels.ops import all_gather, all_reduce
from tpkernels.ops.agreed_call import exchange
from tpkernels.ops.mesh_exchange import broadcast

__all__ = ["Communicator"]


class Communicator:
    """The ranks that run; every rank makes the same calls in the same order.

    Examples:
        >>> tpk.keras.Communicator().all_reduce(keras.ops.ones((2,)))  # of one rank
        tensor([1., 1.])

    Raises:
        ValueError: Keras runs on another backend than torch; JAX communicates by itself, by the layouts of arrays.
    """

    def __init__(self, world_size: int | None = None, distributed_backend: str = "auto") -> None:
        backend.check_backend("torch")
        check_backend_name(distributed_backend)
        self._pg = join(distributed_backend)
        check_world_size(world_size)
        self._group = resolve(self._pg)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.size

    def all_reduce(self, x: Any, op: str = "sum") -> Tensor:
        """The sum or the mean over the ranks, on every rank, differentiable."""
        if op not in ("sum", "mean"):
            raise ValueError(f"op must be 'sum' or 'mean', got {op!r}")
        total = all_reduce(self._tensor(x), self._pg)
        return total if op == "sum" else total / self.world_size

    def all_gather(self, x: Any, dim: int = 0) -> Tensor:
        """The ranks' tensors one after another along ``dim``, whose sizes may differ."""
        part = self._tensor(x)
        sizes = [one["size"] for one in exchange(self._group, "all_gather", {"size": part.shape[dim]})]
        return all_gather(part, self._pg, dim=dim, shard_sizes=sizes)

    def broadcast(self, x: Any, root: int = 0) -> Tensor:
        """What ``root`` passes; the others pass a tensor of that shape and dtype."""
        self._check_root(root)
        mine = self._tensor(x)
        said = exchange(self._group, "broadcast", {"shape": list(mine.shape), "dtype": str(mine.dtype), "root": root})
        for rank, one in enumerate(said):
            if one != said[0]:
                raise ValueError(f"ranks 0 and {rank} pass different tensors to broadcast: {said[0]} and {one}")
        if root == 0:
            found = mine.detach().clone()
            broadcast([self._group], "broadcast", found.reshape(-1).view(torch.uint8))
            return found
        everyone = mine.detach() if self.rank == root else torch.full_like(mine.detach(), -0.0)
        return all_reduce(everyone.contiguous(), self._pg)

    def scatter(self, x: Any, root: int = 0, dim: int = 0) -> Tensor:
        """This rank's part of what ``root`` passes, cut as ``array_split`` cuts; all of it travels to each rank."""
        part: Tensor = array_split(self.broadcast(x, root), self.world_size, dim)[self.rank]
        return part.contiguous()

    def _tensor(self, x: Any) -> Tensor:
        found: Tensor = backend.keras_module().ops.convert_to_tensor(x)
        return found.contiguous()

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root must be a rank from 0 to {self.world_size - 1}, got {root}")
