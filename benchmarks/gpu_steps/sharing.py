"""Which of the ways to have several ranks on one GPU this machine allows, each one tried."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from gpu_steps.outcome import Recorder
from tpkernels.launching.local_ranks import LaunchError

RANKS_S = 40.0
SHARING = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
}


def run(recorder: Recorder) -> None:
    for name, function in WAYS.items():
        recorder.fact(f"{name}, 2 processes on this GPU", _ranks(function))


def _ranks(function: Any) -> str:
    """What two ranks on this GPU say, or why they could not."""
    try:
        answers = tpk.launch(function, 2, timeout=RANKS_S)
    except LaunchError as error:
        first = error.failures[0] if error.failures else None
        return f"no: {first.exception if first is not None else error}".splitlines()[0]
    return f"yes: {answers[0]}"


def share_gpu() -> None:
    """Called on a rank before it touches CUDA."""
    os.environ.update(SHARING)
    torch.cuda.set_device(0)


def _symmetric_memory() -> str:
    """Each rank reads what the other one wrote, after a barrier of torch's."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    share_gpu()
    dist.init_process_group("gloo")
    world: Any = dist.group.WORLD
    rank, start = dist.get_rank(), time.perf_counter()
    mine = symmetric_memory.empty(1024, dtype=torch.float32, device=torch.device("cuda", 0))
    handle: Any = symmetric_memory.rendezvous(mine, world.group_name)
    mine.fill_(float(rank))
    handle.barrier(channel=0)
    peer = handle.get_buffer(1 - rank, (1024,), torch.float32)
    found = float(peer.sum()) / 1024
    handle.barrier(channel=0)
    torch.cuda.synchronize()
    if found != float(1 - rank):
        raise RuntimeError(f"rank {rank} read {found} in the memory of rank {1 - rank}")
    backend = getattr(symmetric_memory, "get_backend", lambda device: "unnamed")(torch.device("cuda", 0))
    multicast = getattr(handle, "multicast_ptr", 0)
    return f"backend {backend}, multicast {'yes' if multicast else 'no'}, {time.perf_counter() - start:.2f} s"


def _nccl() -> str:
    share_gpu()
    dist.init_process_group("nccl")
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if float(x[0]) != 2.0:
        raise RuntimeError(f"the sum of two ones is {float(x[0])}")
    dist.destroy_process_group()
    return "an all-reduce of two ranks is right"


WAYS = {"symmetric memory": _symmetric_memory, "NCCL": _nccl}
