"""The sets of steps that `one_gpu.py` knows by name, and how long each may take.

The budgets of a set's steps add up to its limit at most, so that no step is short of time because of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from gpu_steps.outcome import Recorder


@dataclass(frozen=True)
class Step:
    """A process of its own, which is ended when `budget_s` is over. environment: variables that it has beside ours."""

    name: str
    what: str
    budget_s: float
    module: str
    function: str = "run"
    environment: tuple[tuple[str, str], ...] = ()

    def load(self) -> Callable[[Recorder], None]:
        run: Callable[[Recorder], None] = getattr(import_module(f"gpu_steps.{self.module}"), self.function)
        return run


@dataclass(frozen=True)
class StepSet:
    """gate: if one of its steps is not done, nothing that comes after it runs."""

    name: str
    limit_s: float
    steps: tuple[Step, ...]
    gate: bool = False


SETS = (
    StepSet("smoke", 60, (
        Step("build", "the CUDA library, if there is none yet", 25, "programs", "build"),
        Step("smoke", "right or wrong: reducer, one-shot, AG and RS GEMM, grouped, a missing flag", 35, "smoke"),
    ), gate=True),
    StepSet("core", 500, (
        Step("environment", "versions, clocks, bandwidths", 50, "environment"),
        Step("gemm", "G1 loops with flags preset against cuBLAS, G2 waits and signals", 180, "gemm"),
        Step("reducer", "G4 the sum over ranks against copy bandwidth", 40, "reducer"),
        Step("faults", "R21 waits that end, R22 graphs with fresh data", 80, "faults"),
        Step("experts", "the grouped kernel on layers of four models against F.grouped_mm", 140, "experts"),
    )),
    StepSet("link", 300, (
        Step("link", "G3 overlap with PCIe as the link; arrival clock; host enqueue beside device time", 180, "link"),
        Step("one-queue", "the same with one hardware queue, by how flags are raised", 110, "link", "run_one_queue",
             (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)),
    )),
    StepSet("ranks", 530, (
        Step("sharing", "how several processes can share this GPU", 90, "sharing"),
        Step("tests", "tests/gpu: every op, dtype and cut, gradients, graphs, time-outs", 340, "programs", "tests"),
        Step("experts-ranks", "layers with experts, as two processes on this GPU", 100, "experts_ranks"),
    )),
    StepSet("sanitizer", 480, tuple(
        Step(f"{tool}-{way}", f"{tool} over small cases, kernels {way}", 120, "programs", f"{tool}_{way}")
        for way in ("alone", "together") for tool in ("memcheck", "synccheck")
    )),
    StepSet("tiles", 180, (
        Step("tiles", "the tiles that are chosen against their neighbours", 180, "tiles"),
    )),
    StepSet("rivals", 90, (
        Step("rivals", "G5 against torch.ops.symm_mem, as two processes on this GPU", 90, "rivals"),
    )),
)  # fmt: skip
DEFAULT = ("smoke", "core")
STEPS = {step.name: step for one in SETS for step in one.steps}
