"""Benchmark results: what was measured, what follows from it, how it is printed and filed.

Owns: `CaseResult` and its derived figures, the table, and the description of machine and versions in result files.
Refuses: figures without their raw samples. Every ratio is between medians of one interleaved run.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from tpkernels.measure.rivals import RIVALS
from tpkernels.measure.timing import Measurement
from tpkernels.packages import needed

if TYPE_CHECKING:
    from rich.table import Table

# What is neither ours nor a way of doing the op.
ROOFS = ("gemm", "comm")
BASELINES = ("torch", "unfused")
TABLES = "a table of measurements"
RIVAL_NAMES = tuple(rival.name for rival in RIVALS)


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
        """(T_unfused - T_fused) / (T_unfused - max(T_gemm, T_comm)); None where under 2 % could be won at all."""
        unfused = self.median("unfused")
        if unfused is None or self.fused is None or self.roof is None or unfused - self.roof < 0.02 * unfused:
            return None
        return (unfused - self.fused) / (unfused - self.roof)

    @property
    def exposed_seconds(self) -> float | None:
        """T_fused - T_gemm: communication that was not hidden."""
        gemm = self.median("gemm")
        return None if gemm is None or self.fused is None else self.fused - gemm

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


def table(results: Sequence[CaseResult], title: str) -> Table:
    """Times in ms (medians; +- is half the interquartile range); the fused columns are those of the named one."""
    with needed("rich", TABLES):
        from rich.table import Table
    grid = Table(title=title, caption=_CAPTION, caption_justify="left", title_justify="left")
    grid.add_column("op  MxKxN", no_wrap=True)
    extra = [name for name in _implementations(results) if name not in BASELINES]
    for name in ("GEMM-only", "comm-only", "torch", "unfused", *extra, "auto"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name in ("vs torch", "vs unfused", "overlap", "exposed"):
        grid.add_column(name, justify="right", no_wrap=True)
    for result in results:
        cells = [_time_cell(result.times.get(name)) for name in ("gemm", "comm", "torch", "unfused", *extra)]
        auto = _time_cell(result.times.get("auto")) + f"\n{result.chosen}"
        efficiency, exposed = result.overlap_efficiency, result.exposed_seconds
        grid.add_row(
            f"{result.op}\n{result.shape} {result.dtype} W{result.world_size}",
            *cells,
            auto,
            _number(result.speedup_over("torch"), "{:.2f}x"),
            _number(result.speedup_over("unfused"), "{:.2f}x"),
            _number(efficiency, "{:.0%}"),
            _number(None if exposed is None else exposed * 1e3, "{:.2f}"),
        )
    return grid


_CAPTION = (
    "ms: median over interleaved repeats of the slowest rank, below it half the interquartile range.\n"
    "comm-only: the payload once over the wire, point to point. vs: baseline / fastest fused implementation.\n"
    "overlap: (unfused - fused) / (unfused - max(GEMM, comm)), '-' where nothing could be won. "
    "exposed: fused - GEMM-only."
)


def _implementations(results: Sequence[CaseResult]) -> list[str]:
    names = {name: None for result in results for name in result.times}
    return [name for name in names if name not in (*ROOFS, "torch", "auto")]


def _time_cell(measurement: Measurement | None) -> str:
    if measurement is None:
        return "-"
    digits = 1 if measurement.median >= 0.1 else 2 if measurement.median >= 0.01 else 3
    spread = measurement.interquartile_range / 2 * 1e3
    return f"{measurement.median * 1e3:.{digits}f}\n[dim]±{spread:.{digits}f}[/dim]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if not numerator or not denominator else numerator / denominator


def print_results(results: Sequence[CaseResult], title: str, file: TextIO | None = None) -> None:
    """The table, and who was left out, into ``file`` (default: where this process prints)."""
    with needed("rich", TABLES):
        from rich.console import Console
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)  # a log or a file: wrapping would cut the columns
    console.print(table(results, title))
    for line in remarks(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


_WIDTH = 190


def remarks(results: Sequence[CaseResult]) -> list[str]:
    """Wrong results, and who was left out: a line per name and reason, with the problems it concerns."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        label = f"{result.op} {result.shape} W{result.world_size}"
        for what, of in (("WRONG", result.failures), ("left out", result.notes)):
            for name, why in of.items():
                found.setdefault((name, what, why), []).append(label)
    return [
        f"{name} {what}: {why} ({'everywhere' if len(where) == len(results) else ', '.join(where)})"
        for (name, what, why), where in sorted(found.items(), key=lambda item: item[0][1] != "WRONG")
    ]


def write_table_and_figure(folder: str | Path, results: Sequence[CaseResult], title: str) -> list[str]:
    """bench.txt, and bench.png where matplotlib is installed; returns what to tell the user."""
    from tpkernels.measure import figure

    text, picture = Path(folder, "bench.txt"), Path(folder, "bench.png")
    with text.open("w", encoding="utf-8") as file:
        print_results(results, title, file)
    refusal = figure.draw(results, title, picture)
    return [f"table: {text}", f"figure: {picture}" if refusal is None else f"no figure: {refusal}"]


def describe_environment(setup: Mapping[str, Any]) -> dict[str, Any]:
    """What a result file must say beside its numbers: hardware, versions, command, date, and the caller's `setup`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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
