"""What compute-sanitizer looks at: every kernel once, on small sizes that do not divide.

    python benchmarks/gpu_steps/sanitized.py alone       kernels that wait for nobody else's
    python benchmarks/gpu_steps/sanitized.py together    kernels that wait for copies and kernels of other streams

Two programs, because a tool that runs one kernel at a time makes the second kind time out: reported, not hung.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402

from gpu_steps import experts, faults, gemm, link, reducer  # noqa: E402
from gpu_steps.lab import Lab  # noqa: E402
from gpu_steps.outcome import Outcome, Recorder  # noqa: E402
from tpkernels.measure.cases import Shape  # noqa: E402


def alone(lab: Lab, recorder: Recorder) -> None:
    gemm.measure_gather(lab, recorder, Shape(530, 200, 600), 2)
    gemm.measure_scatter(lab, recorder, Shape(530, 400, 264), 2)
    experts.check_layer(lab, experts.Layer(experts=5, top_k=3, d_model=200, d_ff=130, tokens=70))
    reducer.measure_reducer(lab, recorder, 3, torch.bfloat16, rows=37, columns=1000)
    faults.aborts(lab, recorder, 1)


def together(lab: Lab, recorder: Recorder) -> None:
    link.measure_gather(lab, recorder, 530, 264, 200, 3, 1.0, num_chunks=3)
    link.measure_scatter(lab, recorder, 530, 264, 200, 3, 1.0)
    faults.replays(lab, recorder, 3)


WAYS: dict[str, Callable[[Lab, Recorder], None]] = {"alone": alone, "together": together}


def main(way: str) -> None:
    WAYS[way](replace(Lab.of_this_gpu(), repeats=1), Recorder(Outcome(way, "running")))
    torch.cuda.synchronize()
    print(f"{way}: every result is right")


if __name__ == "__main__":
    main(sys.argv[1])
