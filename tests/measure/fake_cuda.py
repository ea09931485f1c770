"""Streams and graphs of `torch.cuda` on a machine without CUDA, for code that runs on an emulated GPU.

A stream is done with what it is given at once. A graph is what `Group.all_reduce` was asked while it was captured, and
each replay asks it again on a thread of its own, so that graphs of several ranks wait for each other as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tpkernels.backends.symmetric.cuda_group import Group

PROPERTIES = SimpleNamespace(multi_processor_count=4, total_memory=1 << 30, L2_cache_size=1 << 20)


class Stream:
    cuda_stream = 0

    def __init__(self, **options: object) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Graph:
    capturing: ClassVar[Graph | None] = None
    running: ClassVar[list[threading.Thread]] = []
    errors: ClassVar[list[BaseException]] = []

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        assert self.calls, "nothing was captured"
        thread = threading.Thread(target=self._run)
        Graph.running.append(thread)
        thread.start()

    def _run(self) -> None:
        try:
            for call in self.calls:
                call()
        except BaseException as error:  # noqa: BLE001 - raised by synchronize, as CUDA does
            Graph.errors.append(error)


@contextlib.contextmanager
def capture(graph: Graph, stream: Stream) -> Iterator[None]:
    assert isinstance(stream, Stream)
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


def synchronize(device: object = None) -> None:
    while Graph.running:
        thread = Graph.running.pop()
        thread.join(timeout=60)
        if thread.is_alive():
            raise TimeoutError("a replay has not ended after 60 s")
    if Graph.errors:
        raise Graph.errors[0]


def install() -> None:
    """For the rest of this process."""
    all_reduce = Group.all_reduce

    def captured(self: Group, *args: Any, **kwargs: Any) -> None:
        if Graph.capturing is None:
            all_reduce(self, *args, **kwargs)
        else:
            Graph.capturing.calls.append(partial(all_reduce, self, *args, **kwargs))

    Group.all_reduce = captured  # type: ignore[method-assign]
    cuda: Any = torch.cuda
    cuda.Stream, cuda.CUDAGraph, cuda.graph, cuda.synchronize = Stream, Graph, capture, synchronize
    cuda.current_stream = lambda device=None: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_device_properties = lambda device: PROPERTIES
    cuda._sleep = lambda cycles: None
