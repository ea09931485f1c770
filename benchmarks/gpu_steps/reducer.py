"""G4: the kernel that sums the partials of all ranks, against the bandwidth of a copy on the same GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_steps.lab import Lab, LoneRank
from gpu_steps.outcome import Recorder, Row, times_of
from tpkernels.backends.symmetric.cuda_native import Dtype

DTYPES = {torch.bfloat16: Dtype.BF16, torch.float32: Dtype.F32}


WORLD_SIZES, ROWS, COLUMNS = (2, 8), 4096, 8192


def run(recorder: Recorder) -> None:
    lab = Lab.of_this_gpu()
    for world_size in WORLD_SIZES:
        for dtype in DTYPES:
            measure_reducer(lab, recorder, world_size, dtype, rows=ROWS, columns=COLUMNS)


def measure_reducer(lab: Lab, recorder: Recorder, world_size: int, dtype: torch.dtype, rows: int, columns: int) -> None:
    problem = f"{world_size} partials of {rows}x{columns} {str(dtype).removeprefix('torch.')}"
    share, rate = "of the bandwidth of a copy", "GB/s of the sum"
    part_bytes = rows * columns * dtype.itemsize
    reduced = (world_size + 1) * part_bytes / lab.card.reduce_s(world_size, part_bytes)
    copied = 2 * world_size * part_bytes / lab.card.copy_s(world_size * part_bytes)
    recorder.predict("G4", problem, share, reduced / copied)
    recorder.predict("-", problem, rate, reduced / 1e9)
    rank = LoneRank(lab, world_size)
    rank.next_call()
    parts = [lab.random(r, rows, columns, dtype=dtype) for r in range(world_size)]
    out = torch.full_like(parts[0], float("nan"))
    source = torch.cat(parts)  # as many bytes as the reducer reads, and then some are written
    target = torch.empty_like(source)

    def reduce() -> None:
        rank.group.reduce(
            op=1, part_dtype=DTYPES[dtype], out_dtype=DTYPES[dtype], parts=[part.data_ptr() for part in parts],
            strides=[columns] * world_size, out=out.data_ptr(), out_stride=columns, rows=rows, columns=columns,
            stream=lab.stream(),
        )  # fmt: skip

    reduce()
    rank.raise_if_failed()
    exact = parts[0].float()
    for part in parts[1:]:
        exact = exact + part.float()
    if not torch.equal(out, exact.to(dtype)):
        raise AssertionError(f"the sum of {world_size} partials in {dtype} is not that of fp32 in rank order")
    candidates: dict[str, Callable[[], object]] = {"reduce": reduce, "copy": lambda: target.copy_(source)}
    measured = lab.measure(candidates)
    rank.raise_if_failed()
    rank.close()
    reduced = (world_size + 1) * part_bytes / measured["reduce"].median
    copied = 2 * world_size * part_bytes / measured["copy"].median
    recorder.row(Row("G4", problem, share, reduced / copied, "device", ">= 0.85", lab.repeats, times_of(measured)))
    recorder.row(Row("-", problem, rate, reduced / 1e9, "device", "", lab.repeats))
