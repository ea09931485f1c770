"""What this machine is, and which of the ways to have several ranks on one GPU it allows."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from gpu_steps.outcome import Recorder
from tpkernels.comm import cuda_native
from tpkernels.comm.launch import LaunchError
from tpkernels.measure.timing import measure

RANKS_S = 40.0
QUERY = (
    "name,driver_version,compute_cap,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,mig.mode.current"
)
SHARING = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
}


def run(recorder: Recorder) -> None:
    for name, value in versions().items():
        recorder.fact(name, value)
    recorder.fact("nvidia-smi", _nvidia_smi())
    properties = torch.cuda.get_device_properties(0)
    recorder.fact("GPU", {"SMs": properties.multi_processor_count, "GiB": round(properties.total_memory / 2**30, 1),
                          "L2 MiB": round(properties.L2_cache_size / 2**20)})  # fmt: skip
    recorder.fact("CUDA kernels", cuda_native.why_not() or "loaded")
    recorder.fact("bandwidths, GB/s", bandwidths())
    recorder.fact("symmetric memory, 2 processes on this GPU", _ranks(_symmetric_memory))
    recorder.fact("NCCL, 2 ranks on this GPU", _ranks(_nccl))


def versions() -> dict[str, Any]:
    """What can be said without a GPU, too."""
    found: dict[str, Any] = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda}
    for package in ("triton", "tpkernels", "transformer-engine"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["compute-sanitizer"] = shutil.which("compute-sanitizer") or "not on the PATH"
    return found


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (done.stdout or done.stderr).strip()


def bandwidths(num_bytes: int = 1 << 28, of: str = "cuda") -> dict[str, float]:
    """Copies of `num_bytes`; the one within the device counts what is read and what is written."""
    host, other_host = (torch.empty(num_bytes, dtype=torch.uint8, pin_memory=of == "cuda") for _ in range(2))
    device, other = (torch.empty(num_bytes, dtype=torch.uint8, device=of) for _ in range(2))
    side = torch.cuda.Stream()

    def both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other_host.copy_(other, non_blocking=True)
        device.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    candidates = {
        "host to device": (lambda: device.copy_(host, non_blocking=True), 1),
        "device to host": (lambda: host.copy_(device, non_blocking=True), 1),
        "both ways": (both_ways, 2),
        "within the device": (lambda: other.copy_(device), 2),
    }
    found = measure({name: call for name, (call, _) in candidates.items()}, repeats=9, device=of)
    return {name: round(times * num_bytes / found[name].median / 1e9, 1) for name, (_, times) in candidates.items()}


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
