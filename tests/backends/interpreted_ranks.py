"""Ranks in which Triton interprets, forked from a server of their own: other ranks must not have read its environment.

Triton and OpenBLAS read the environment when they are loaded, so a fork of the server of all other ranks is too late;
new interpreters cost each rank seconds of imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest import mock

from tpkernels.testing import spawn
from tpkernels.testing.spawn import Pools, WorkerPool

__all__ = ["InterpretedPools"]

# The product of a row with a matrix must not depend on the row's place (tests/kernels/interpreter.py).
# Its threads would spin while they wait for work, of which such small products give them none.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Prescott", "OPENBLAS_NUM_THREADS": "1"}
PRELOADED = [
    *("torch", "torch.distributed", "tpkernels", "tpkernels.sharding", "tpkernels.kernels", spawn.__name__),
    *("pytest", "tpkernels.testing.cases", "tpkernels.testing.references", "torch.distributed.tensor.debug"),
]
_server = forkserver.ForkServer()


class _Popen(popen_forkserver.Popen):
    def _launch(self, process: object) -> None:
        _server.set_forkserver_preload(PRELOADED)
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            super()._launch(process)


class InterpretedProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process: object) -> _Popen:
        return _Popen(process)


class InterpretedContext(ForkServerContext):
    Process = InterpretedProcess


class InterpretedPool(WorkerPool):
    def __init__(self, nproc: int, *, forked: bool, environment: Mapping[str, str] | None) -> None:
        super().__init__(
            nproc, environment={**(environment or {}), **ENVIRONMENT}
        )  # which the server and the ranks inherit
        self._context = InterpretedContext()


class InterpretedPools(Pools):
    """Pools of such ranks."""

    def __call__(self, nproc: int) -> WorkerPool:
        with mock.patch.object(spawn, "WorkerPool", InterpretedPool):
            return super().__call__(nproc)
