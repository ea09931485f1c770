"""Benchmark results: what was measured, what follows from it, how it is filed.

Owns: `CaseResult` and its derived figures, and the description of machine and versions in result files.
Refuses: figures without their raw samples. Every ratio is between medians of one interleaved run.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tpkernels.measure.rivals import RIVALS
from tpkernels.measure.timing import Measurement

# What is neither ours nor a way of doing the op.
ROOFS = ("gemm", "comm")
BASELINES = ("torch", "unfused")
TABLES = "a table of measurements"
NOISE = "~"
RIVAL_NAMES = tuple(rival.name for rival in RIVALS)


@dataclass(frozen=True)
class Ratio:
    """``baseline / way``: of the medians, and the quartiles of the rounds' own ratios."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, baseline: Measurement | None, way: Measurement | None) -> Ratio | None:
        """None where one of them was not measured; rounds are paired."""
        if baseline is None or way is None:
            return None
        ratios = [b / w for b, w in zip(baseline.seconds, way.seconds, strict=True) if w > 0]
        if not ratios:
            return None
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(baseline.median / way.median, low, high)

    @property
    def is_noise(self) -> bool:
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        return f"{self.value:.2f}x {NOISE if self.is_noise else ' '}"


@dataclass
class CaseResult:
    """Times of one op on one shape. `times` maps gemm, comm, torch, auto and implementation names to measurements."""

    op: str
    shape: str
    dtype: str
    world_size: int
    times: dict[str, Measurement]
    wire_bytes: int
    chosen: str
    chunks: int
    notes: dict[str, str] = field(default_factory=dict)
    """Who was left out, and why."""
    failures: dict[str, str] = field(default_factory=dict)
    """Our implementations whose result was wrong, which were not timed."""
    estimates_us: dict[str, float] = field(default_factory=dict)
    """What auto expected of each implementation that can run this; it takes the smallest."""

    def median(self, name: str) -> float | None:
        return self.times[name].median if name in self.times else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N over the whole group."""
        m, k, n = (int(size) for size in self.shape.split("x"))
        return m, k, n

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank."""
        m, k, n = self.sizes
        return 2.0 * m * k * n / self.world_size

    @property
    def fused_name(self) -> str | None:
        """The fastest of our implementations that overlap."""
        names = [name for name in self.times if name not in (*ROOFS, *BASELINES, *RIVAL_NAMES, "auto")]
        return min(names, key=lambda name: self.times[name].median, default=None)

    @property
    def fused(self) -> float | None:
        return self.median(self.fused_name) if self.fused_name else None

    def speedup_over(self, baseline: str) -> float | None:
        return _ratio(self.median(baseline), self.fused)

    @property
    def roof(self) -> float | None:
        """max(GEMM-only, comm-only): what perfect overlap would take."""
        roofs = [self.times[name].median for name in ROOFS if name in self.times]
        return max(roofs, default=None)

    @property
    def fused_over_roof(self) -> float | None:
        return _ratio(self.fused, self.roof)

    @property
    def overlap_efficiency(self) -> float | None:
        """:meth:`overlap_of` the fastest fused implementation."""
        return None if self.fused_name is None else self.overlap_of(self.fused_name)

    def overlap_of(self, name: str) -> float | None:
        """(T_unfused - T) / (T_unfused - max(T_gemm, T_comm)), within 0 and 1; None where under 2 % could be won.

        A way that is slower than unfused hides nothing; one below the roof (it reads its peers' memory in place, or
        the roof is noise) hides all.
        """
        unfused, time = self.median("unfused"), self.median(name)
        if unfused is None or time is None or self.roof is None or unfused - self.roof < 0.02 * unfused:
            return None
        return min(1.0, max(0.0, (unfused - time) / (unfused - self.roof)))

    def overlap_is_noise(self, name: str) -> bool:
        """Whether the rounds do not say that ``name`` differs from unfused, or that unfused differs from the roof."""
        unfused = self.times.get("unfused")
        roof = max((self.times[one] for one in ROOFS if one in self.times), key=lambda one: one.median, default=None)
        ratios = (Ratio.of(unfused, self.times.get(name)), Ratio.of(unfused, roof))
        return any(ratio is None or ratio.is_noise for ratio in ratios)

    @property
    def exposed_seconds(self) -> float | None:
        """:meth:`exposed_of` the fastest fused implementation."""
        return None if self.fused_name is None else self.exposed_of(self.fused_name)

    def exposed_of(self, name: str) -> float | None:
        """T - T_gemm: communication that was not hidden."""
        gemm, time = self.median("gemm"), self.median(name)
        return None if gemm is None or time is None else time - gemm

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "shape_MxKxN": self.shape,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "wire_bytes_per_rank": self.wire_bytes,
            "auto_chose": self.chosen,
            "chunks": self.chunks,
            "fused": self.fused_name,
            "speedup_over_torch": self.speedup_over("torch"),
            "speedup_over_unfused": self.speedup_over("unfused"),
            "fused_over_roof": self.fused_over_roof,
            "overlap_efficiency": self.overlap_efficiency,
            "exposed_ms": None if self.exposed_seconds is None else self.exposed_seconds * 1e3,
            "left_out": self.notes,
            "failures": self.failures,
            "estimates_ms": {name: estimate / 1e3 for name, estimate in self.estimates_us.items()},
            "times": {name: measurement_to_json(measurement) for name, measurement in self.times.items()},
        }


def measurement_to_json(measurement: Measurement) -> dict[str, Any]:
    return {
        "median_ms": measurement.median * 1e3,
        "min_ms": measurement.best * 1e3,
        "max_ms": measurement.worst * 1e3,
        "interquartile_range_ms": measurement.interquartile_range * 1e3,
        "samples_ms": [seconds * 1e3 for seconds in measurement.seconds],
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if not numerator or not denominator else numerator / denominator


def describe_environment(setup: Mapping[str, Any]) -> dict[str, Any]:
    """What a result file must say beside its numbers: hardware, versions, command, date, and the caller's `setup`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "hardware": _hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
            **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
            **_our_version(),
        },
        "setup": dict(setup),
    }


def _command(argv: Sequence[str]) -> str:
    """What can be typed again; of a package that was started by ``python -m``, argv names its ``__main__.py``."""
    program = Path(argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, shlex.join(argv[1:])]).rstrip()


def write_json(path: str | Path, environment: Mapping[str, Any], results: Sequence[CaseResult]) -> None:
    content = {**environment, "results": [result.to_json() for result in results]}
    unfinished = Path(f"{path}.part")  # whoever is ended while writing leaves the last complete file
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        # Beside idle machines' numbers those of a busy one must be recognisable.
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(_colon_pairs(cpuinfo.read_text()))
        found["cpu"] = fields.get("model name", found["cpu"])
        flags = fields.get("flags", "").split()
        found["isa"] = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        total_kib = int(dict(_colon_pairs(meminfo.read_text()))["MemTotal"].split()[0])
        found["memory_gib"] = round(total_kib / 2**20, 1)
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return found


def _colon_pairs(text: str) -> list[tuple[str, str]]:
    return [(name.strip(), value.strip()) for name, colon, value in (line.partition(":") for line in text.splitlines())]


def _our_version() -> dict[str, str]:
    from importlib import metadata

    try:
        return {"tpkernels": metadata.version("tpkernels")}
    except metadata.PackageNotFoundError:
        return {"tpkernels": "source tree"}
