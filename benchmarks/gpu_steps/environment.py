"""What this machine is, and what its memory and its bus do."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gpu_steps.lab import Lab
from gpu_steps.outcome import Recorder, Row, times_of
from tpkernels.backends.symmetric import cuda_native

NUM_BYTES = 1 << 28  # of each copy
QUERY = (
    "name,driver_version,compute_cap,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,mig.mode.current"
)


def run(recorder: Recorder) -> None:
    for name, value in versions().items():
        recorder.fact(name, value)
    recorder.fact("nvidia-smi", _nvidia_smi())
    properties = torch.cuda.get_device_properties(0)
    recorder.fact("GPU", {"SMs": properties.multi_processor_count, "GiB": round(properties.total_memory / 2**30, 1),
                          "L2 MiB": round(properties.L2_cache_size / 2**20)})  # fmt: skip
    recorder.fact("CUDA kernels", cuda_native.why_not() or str(cuda_native.file()))
    lab = Lab.of_this_gpu()
    recorder.fact("predictions are those of", str(lab.card))
    bandwidths(lab, recorder, NUM_BYTES)


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


def bandwidths(lab: Lab, recorder: Recorder, num_bytes: int) -> None:
    """Copies of `num_bytes`; the one within the device counts what is read and what is written."""
    host, other_host = (lab.pinned(num_bytes, dtype=torch.uint8) for _ in range(2))
    device, other = (torch.empty(num_bytes, dtype=torch.uint8, device=lab.device) for _ in range(2))
    side = torch.cuda.Stream()

    def both_ways() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other_host.copy_(other, non_blocking=True)
        device.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    one_way, within = lab.card.pcie_s(num_bytes), lab.card.copy_s(num_bytes)
    # name: call, bytes over num_bytes, seconds as modelled, what it is
    ways: dict[str, tuple[Callable[[], object], int, float, str]] = {
        "host to device": (lambda: device.copy_(host, non_blocking=True), 1, one_way, "PCIe link"),
        "device to host": (lambda: host.copy_(device, non_blocking=True), 1, one_way, "PCIe link"),
        "both ways": (both_ways, 2, one_way, "PCIe link"),
        "within the device": (lambda: other.copy_(device), 2, within, "device"),
    }
    problem = f"copies of {num_bytes >> 10} KiB"
    for name, (_, times, seconds, _) in ways.items():
        recorder.predict("-", problem, f"GB/s {name}", times * num_bytes / seconds / 1e9)
    found = lab.measure({name: way[0] for name, way in ways.items()})
    for name, (_, times, _, label) in ways.items():
        rate = times * num_bytes / found[name].median / 1e9
        recorder.row(Row("-", problem, f"GB/s {name}", rate, label, "", lab.repeats, times_of({name: found[name]})))
