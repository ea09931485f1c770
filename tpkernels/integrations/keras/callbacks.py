"""Callbacks that own files or swap weights, on models of which each rank has a part.

It owns what becomes of them before they run: rank 0 writes and removes the files of ``BackupAndRestore``, while the
others take part in gathering alone; ``SwapEMAWeights``, which assigns the variables that the optimizer knows, has the
slices of whole variables gathered behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpkernels.integrations.keras import backend, optimizers
from tpkernels.integrations.keras.variables import Shards

__all__ = ["prepared"]


def prepared(callbacks: Any, model: Any, shards: Shards) -> None:
    """Make callbacks ready for ``model``: one, several, or Keras's list of them."""
    if callbacks is None or shards.world_size == 1:
        return
    keras = backend.keras_module().callbacks
    callbacks = getattr(callbacks, "callbacks", callbacks)
    for callback in callbacks if isinstance(callbacks, Iterable) else [callbacks]:
        if shards.rank and isinstance(callback, keras.BackupAndRestore):
            backend.gather_only(callback)
        if isinstance(callback, keras.SwapEMAWeights):
            backend.after_swaps(callback, lambda: optimizers.gather(model.optimizer))
