"""Variables in a weight file while it is loaded: each rank reads the slices of its own parts, and nothing else of them.

It owns :class:`Stored`, a variable that is still in the file.  It assumes that the file is open while it is read, as it
is for ``.weights.h5``.  From ``.keras`` archives and from files of several shards, Keras reads whole variables.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut

__all__ = ["Stored", "unread"]


class Stored:
    """A dataset of an open HDF5 file.  To NumPy, and so to whatever does not know this class, it is the whole array."""

    def __init__(self, dataset: Any, dtype: Any) -> None:
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self.dtype = np.dtype(dtype)
        self._dataset = dataset

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Any:
        return np.asarray(self)[where]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The whole array, read anew.

        Raises:
            ValueError: it is wanted without a copy.
        """
        if copy is False:
            raise ValueError("a variable of a weight file has to be read, which makes a copy")
        found = np.empty(self.shape, self.dtype)
        if found.size:
            self._dataset.read_direct(found)
        return found if dtype is None else found.astype(dtype, copy=False)

    def part(self, cut: Cut, rank: int) -> Tensor:
        """What ``rank`` holds of it; no other number is read."""
        found = np.empty(cut.shape_on(rank), self.dtype)
        before, at = (slice(None),) * cut.dim, 0
        for start, stop in cut.ranges[rank]:
            here = (*before, slice(at, at + stop - start))
            if found[here].size:
                self._dataset.read_direct(found, (*before, slice(start, stop)), here)
            at += stop - start
        if self.dtype.name == "bfloat16":  # which torch does not know of NumPy
            return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(found)


def unread() -> AbstractContextManager[None]:
    """Inside, Keras's ``load_weights`` assigns variables as :class:`Stored`."""
    return backend.datasets_as(Stored)
