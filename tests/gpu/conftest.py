"""Ranks that share one GPU, for the tests of this folder; and the compiled kernels, without which they test nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu import ranks as scenarios
from tpkernels.backends.symmetric import cuda_native
from tpkernels.testing.spawn import WorkerPool

Shared = Callable[[int], WorkerPool]


def pools(*settings: object) -> Iterator[Shared]:
    """One pool at a time: each rank has a context of several hundred MB on the GPU. settings: of `share_gpu`."""
    open_pool: dict[int, WorkerPool] = {}

    def of(world: int) -> WorkerPool:
        if world not in open_pool:
            for other in open_pool.values():
                other.close()
            open_pool.clear()
            open_pool[world] = WorkerPool(world, group_timeout=60.0)
        # Again for every test: a call that failed may have started the workers anew.
        open_pool[world].run(scenarios.share_gpu, world, *settings, timeout=120)
        return open_pool[world]

    yield of
    for pool in open_pool.values():
        pool.close()


@pytest.fixture(scope="session")
def library() -> cuda_native.Library:
    """Of this installation: what is measured and used is what is tested."""
    found = cuda_native.library()
    if found is None:
        pytest.fail(f"{cuda_native.why_not()}: TPKERNELS_CUDA=1 python setup.py build_ext --inplace")
    return found


@pytest.fixture(scope="module")
def symmetric_ranks(library: cuda_native.Library) -> Iterator[Shared]:
    """`symmetric_ranks(3).run(...)`: three processes on one GPU, on whose memory they can all have a view."""
    yield from pools()


@pytest.fixture(scope="module")
def symmetric_gpus(library: cuda_native.Library) -> Iterator[Shared]:
    """A GPU for each rank, with access to each other's memory."""
    yield from pools(None, True)


@pytest.fixture(scope="module")
def zero_cta_gpus() -> Iterator[Shared]:
    """A GPU for each rank, and NCCL groups that move chunks with copy engines."""
    yield from pools("nccl", True, True)


@pytest.fixture(scope="module")
def nccl_gpus() -> Iterator[Shared]:
    """A GPU for each rank, and NCCL groups."""
    yield from pools("nccl", True)


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Shared]:
    """Several ranks of an NCCL group on one GPU."""
    version = torch.cuda.nccl.version()
    if version < (2, 30):
        found = ".".join(map(str, version))
        pytest.skip(f"several ranks on one CUDA device need NCCL 2.30 or newer, this is {found} (LD_PRELOAD another)")
    yield from pools("nccl")


os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
