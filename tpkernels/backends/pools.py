"""Memory that outlives a call must not come from the pool of a CUDA graph.

``torch.compile(mode="reduce-overhead")`` runs a function once before it captures it, eagerly, but with the graph's
private pool: what is allocated then and is no output of the function is taken for dead, and given to others while
somebody still reads it.  Nothing tells that such a pool is open, and one of ours inside it need not win; but torch
routes by thread (``_cuda_beginAllocateCurrentThreadToPool``, as of 2.13; ``torch.cuda.use_mem_pool`` documents it).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["outside_of_pools"]

_T = TypeVar("_T")


def outside_of_pools(make: Callable[[], _T]) -> _T:
    """What ``make`` returns or raises, in a thread that no pool is open in; waits for it.

    ``make`` chooses its device and its stream: a new thread has torch's defaults.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tpkernels-keeps") as thread:
        return thread.submit(make).result()
