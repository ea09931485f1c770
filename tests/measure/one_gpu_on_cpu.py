"""Run the measuring code of `benchmarks/gpu_steps` on an emulated GPU: its library under g++, its kernels interpreted.

    TRITON_INTERPRET=1 python -m tests.measure.one_gpu_on_cpu LIBRARY [everything]    prints rows and facts as JSON

Every step verifies its results before it times them, so wrong arguments, addresses, flags and chunk lists fail here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_steps import environment, faults, gemm, link, reducer, sanitized
from gpu_steps.lab import Lab
from gpu_steps.outcome import Outcome, Recorder

from tests.measure import fake_cuda
from tpkernels.comm.cuda_native import Library
from tpkernels.measure.cases import Shape


def scaled_by_row(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    return out.copy_((x.float() @ y.float() * of_x * of_y).to(out_dtype))


def main(library: str, everything: bool) -> None:
    torch.set_num_threads(1)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # torch 2.11's takes one scale per tensor on CPUs
        torch._scaled_mm = scaled_by_row  # type: ignore[assignment]
    lab = Lab(torch.device("cpu"), Library(Path(library)), 80, 4, polls_per_second=5000, repeats=1)
    recorder = Recorder(Outcome("all", "running"))
    gemm.measure_gather(lab, recorder, Shape(70, 24, 64), 2)
    gemm.measure_scatter(lab, recorder, Shape(70, 48, 40), 2)
    gemm.measure_scaled_gather(replace(lab, capability=90), recorder, Shape(70, 32, 64), 2)
    reducer.measure_reducer(lab, recorder, 3, torch.bfloat16, rows=5, columns=24)
    link.measure_gather(lab, recorder, 70, 40, 24, 3, 1.0, num_chunks=3)
    link.measure_gather(lab, recorder, 40, 24, 24, 2, 0.4)
    link.measure_scatter(lab, recorder, 70, 40, 24, 3, 0.4)
    faults.TIMEOUT_S = 0.05
    faults.aborts(lab, recorder, 2)
    fake_cuda.install()
    link.measure_clock(lab, recorder, 70, 40, 24, 3, 400.0)
    faults.replays(lab, recorder, 5)
    environment.bandwidths = partial(environment.bandwidths, 1 << 16, "cpu")
    environment.run(recorder)
    if everything:
        for way in sanitized.WAYS.values():
            way(lab, recorder)
    print(json.dumps(recorder.outcome.to_json()))


if __name__ == "__main__":
    main(sys.argv[1], everything="everything" in sys.argv[2:])
