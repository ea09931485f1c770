"""Callbacks that own files: rank 0 writes and removes them, and the others take part in gathering alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpkernels.integrations.keras import backend

__all__ = ["files_on_rank_0"]


def files_on_rank_0(callbacks: Any, rank: int) -> None:
    """Keep ``BackupAndRestore`` on other ranks from writing and removing the files of rank 0's."""
    kind = backend.keras_module().callbacks.BackupAndRestore
    for callback in callbacks if isinstance(callbacks, Iterable) else [callbacks]:
        if rank and isinstance(callback, kind):
            backend.gather_only(callback)
