"""NCCL as the host sees it, without a GPU: a process group whose waits hold nobody up, and whose works a thread ends.

That thread is the device: it takes one operation after the other, and moves its bytes with gloo.  Messages find each
other by their order.  A peer that is gone is not noticed: the operation stays, as on GPUs that reach each other's
memory.  An abort ends everything, and what was stuck then looks as if it had succeeded, as it may on a real one.

`registered()` makes `dist.new_group(backend=NAME)` know it, and the package take it for NCCL.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tpkernels.comm import device_backends

NAME = "fake_nccl"
SUCCESS, TIMEOUT, COMM_ERROR = 0, 1, 2  # c10d's WorkResult
PATIENCE = timedelta(hours=1)


class FakeWork:
    """As much of WorkNCCL as is used; `words`: what torch would have to say of a failure."""

    def __init__(self) -> None:
        self.result: torch.futures.Future[int] = torch.futures.Future()
        self.words: Exception | None = None

    def wait(self) -> bool:
        return True  # the device's streams would wait; the host goes on

    def is_completed(self) -> bool:
        return self.result.done()

    def exception(self) -> Exception | None:
        return self.words

    def get_future_result(self) -> Any:
        return self.result

    def end(self, result: int = SUCCESS) -> None:
        if not self.result.done():
            self.result.set_result(result)


class FakeNccl(dist.ProcessGroup):
    def __init__(self, options: Any, _: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._store, self._timeout, self._name = options.store, options.timeout, options.group_id
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("device", self._store), rank, size, PATIENCE)  # type: ignore
        self._batch: list[Any] = []
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._under_way = 0
        self.works: list[weakref.ref[FakeWork]] = []
        self.aborts: list[float] = []
        self.stuck = False  # from now on operations stay
        self.fails_with: str | None = None  # from now on operations fail, and say this
        threading.Thread(target=self._run, daemon=True).start()

    # what the package calls

    @property
    def group_name(self) -> str:
        return self._name

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=self._timeout))

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._batch.append((self._gloo.send, tensors, peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._batch.append((self._gloo.recv, tensors, peer))

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        if self.aborts:
            raise RuntimeError("NCCL communicator was aborted")
        work = FakeWork()
        self.works.append(weakref.ref(work))
        with self._idle:
            self._under_way += 1
        self._queue.put((work, self._batch))
        return work

    def abort(self) -> None:
        self.aborts.append(time.monotonic())
        with self._idle:
            self._under_way = 0
            self._idle.notify_all()
        for work in filter(None, (reference() for reference in self.works)):
            work.end()

    # the device

    def synchronize(self, seconds: float) -> bool:
        """Wait for the device as `torch.cuda.synchronize` does, but not longer than this; whether it has ended."""
        with self._idle:
            return self._idle.wait_for(lambda: self._under_way == 0, seconds)

    def _run(self) -> None:
        number = 0
        while True:
            work, batch = self._queue.get()
            number += 1
            if self.fails_with is not None:
                work.words = RuntimeError(self.fails_with)
                work.end(COMM_ERROR)
            elif self.stuck or not self._move(batch, number):
                return  # and all that comes behind it stays, too
            else:
                work.end()
            del work
            with self._idle:
                self._under_way = max(0, self._under_way - 1)
                self._idle.notify_all()

    @staticmethod
    def _move(batch: list[Any], number: int) -> bool:
        try:
            for transfer in [start(tensors, peer, number) for start, tensors, peer in batch]:
                transfer.wait()
        except RuntimeError:
            return False
        return True


@contextmanager
def registered() -> Iterator[None]:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, FakeNccl, extended_api=True, devices=["cpu"])
    with mock.patch.object(device_backends, "_IN_STREAM_ORDER", frozenset({"nccl", NAME})):
        yield


@contextmanager
def new_group(timeout: float) -> Iterator[FakeNccl]:
    with registered():
        group = dist.new_group(backend=NAME, timeout=timedelta(seconds=timeout))
        assert isinstance(group, FakeNccl)
        try:
            yield group
        finally:
            dist.destroy_process_group(group)
