"""What is said of every overlap of a transfer and a GEMM: its forecast, and its figures beside the host's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpu_steps.lab import Lab
from gpu_steps.outcome import Recorder, Row, times_of
from gpu_steps.roofline import DRIVER_CALL_S, KNOWN_LAUNCH_S, TORCH_CALL_S, efficiency, overlapped_s

EFFICIENCY, SPEEDUP, HOST = "overlap efficiency", "unfused / fused", "host enqueue of fused, us"
BESIDE = "cuBLAS beside the copies / alone"


@dataclass(frozen=True)
class Forecast:
    """Seconds as modelled: of the library's GEMM and of ours, of the transfer, and of what comes behind both."""

    gemm_s: float
    our_gemm_s: float
    transfer_s: float
    chunks: int
    hides: bool
    driver_calls: int
    torch_calls: int
    behind_s: float = 0.0

    @property
    def unfused_s(self) -> float:
        return self.gemm_s + self.transfer_s + self.behind_s

    @property
    def fused_s(self) -> float:
        ours, wire = self.our_gemm_s, self.transfer_s
        return self.behind_s + (overlapped_s(ours, wire, self.chunks) if self.hides else ours + wire)

    @property
    def host_s(self) -> float:
        return self.driver_calls * DRIVER_CALL_S + self.torch_calls * TORCH_CALL_S + KNOWN_LAUNCH_S


def predict(recorder: Recorder, problem: str, forecast: Forecast, target: str, *, beside: bool) -> None:
    one, unfused, fused = forecast, forecast.unfused_s, forecast.fused_s
    recorder.predict(target, problem, EFFICIENCY, efficiency(unfused, fused, one.gemm_s, one.transfer_s))
    recorder.predict(target, problem, SPEEDUP, unfused / fused)
    recorder.predict("-", problem, HOST, 1e6 * one.host_s)
    if beside:  # the copies take next to nothing of the device's memory bandwidth
        recorder.predict("-", problem, BESIDE, 1.02)


def report(
    lab: Lab, recorder: Recorder, problem: str, candidates: dict[str, Callable[[], None]], label: str, target: str
) -> None:
    measured = lab.measure(dict(candidates))
    host = lab.host_time("enqueued by the host", candidates["fused"])
    median = {name: one.median for name, one in measured.items()}
    found = efficiency(median["unfused"], median["fused"], median["gemm"], median["transfer"])
    bound = ">= 0.90" if target == "G3" and label == "PCIe link" else ""
    recorder.row(Row(target, problem, EFFICIENCY, found, label, bound, lab.repeats, times_of(measured)))
    recorder.row(Row(target, problem, SPEEDUP, median["unfused"] / median["fused"], label, "", lab.repeats))
    both = times_of({"host": host, "device": measured["fused"]})
    recorder.row(Row("-", problem, HOST, 1e6 * host.median, "host", "", lab.repeats, both))
    if "gemm beside copies" in median:
        slowdown = median["gemm beside copies"] / median["gemm"]
        recorder.row(Row("-", problem, BESIDE, slowdown, label, "", lab.repeats))
