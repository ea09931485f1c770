"""`tpkernels test --same-bits`: whether training gives the same bits at every number of ranks, on these machines.

Owns a training run that records a digest of every loss, gradient, norm and parameter (:class:`Run`), the groups on
which one job repeats it at each degree, and the verdict in words.  Every rank of the job trains at every degree, so
that each host's own bits are compared, not those of the first.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tpkernels.comm.startup import new_group
from tpkernels.measure.gathered import from_all_ranks, to_plain
from tpkernels.measure.progress import remaining
from tpkernels.nn.gathering import gathered
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.styles import Style
from tpkernels.selftest.small_decoder import SHAPES, Decoder, Shape

__all__ = ["Case", "Difference", "Run", "cases", "compare", "degrees_of", "Verdict", "groups_of_degrees", "run_rank"]

STEPS, QUICK_STEPS = 20, 3
WAIT_S = 120.0
"""How long a rank waits for the others."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    kind: str
    dtype: str
    steps: int = STEPS
    layers: int = 2
    sequence_parallel: bool = False
    """By the plan that is found; otherwise by one that is written by hand, which takes no time."""

    @property
    def shape(self) -> Shape:
        return replace(SHAPES[self.kind], layers=self.layers)

    def __str__(self) -> str:
        return f"{self.kind}, {self.dtype}{', sequence parallelism' if self.sequence_parallel else ''}"


class Run:
    """A model and its AdamW on one group; `digests` has what every step gave, by name, equal on all ranks."""

    def __init__(self, case: Case, group: dist.ProcessGroup, same_bits: int | None, *, seed: int = 0) -> None:
        """``seed``: of the initial weights."""
        self.case = case
        torch.manual_seed(seed)
        model = Decoder(case.kind, case.shape).to(getattr(torch, case.dtype))
        batch = self._batch(0)
        plan: dict[str, str | Style] | ShardingPlan = model.styles
        if case.sequence_parallel:
            plan = tpk.make_plan(model, group, sequence_parallel=True, example_inputs=batch, same_bits=same_bits)
        self.model = tpk.parallelize(model, group, plan, example_inputs=batch, same_bits=same_bits)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.digests: dict[str, str] = {}

    def _batch(self, step: int) -> Tensor:
        shape, generator = self.case.shape, torch.Generator().manual_seed(step)
        return torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)

    def steps(self, first: int, stop: int) -> None:
        """Steps ``[first, stop)``, whose batches and masks depend on their number alone, and then the parameters."""
        for step in range(first, stop):
            torch.manual_seed(1000 + step)
            loss = self.model(self._batch(step))
            loss.backward()
            self._record(f"loss of step {step}", loss.detach())
            for name, parameter in self.model.named_parameters():
                self._record(f"gradient of {name} in step {step}", _gradient_of(parameter))
            self._record(f"norm of step {step}", tpk.clip_grad_norm_(self.model.parameters(), 0.5))
            self.optimizer.step()
            self.optimizer.zero_grad()
        for name, value in tpk.full_state_dict(self.model).items():
            self._record(f"{name} after step {stop - 1}", value)

    def _record(self, name: str, value: Tensor) -> None:
        data = gathered(value).contiguous().reshape(-1).view(torch.uint8).numpy()
        self.digests[name] = hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def _gradient_of(parameter: Tensor) -> Tensor:
    """On the parameter's mesh; torch caches meshes, and may give it an equal one whose group is gone."""
    grad = parameter.grad
    assert isinstance(grad, DTensor) and isinstance(parameter, DTensor)
    shape, stride = grad.shape, grad.stride()
    return DTensor.from_local(
        grad.to_local(), parameter.device_mesh, grad.placements, run_check=False, shape=shape, stride=stride
    )


def cases(dtypes: Sequence[str], *, quick: bool) -> list[Case]:
    """What is trained; with ``quick`` fewer steps."""
    return [Case(kind, dtype, QUICK_STEPS if quick else STEPS) for kind in SHAPES for dtype in dtypes]


def degrees_of(world_size: int, same_bits: int) -> list[int]:
    """The degrees that so many ranks can train at and that are to agree: 1, 2, 4, ..."""
    largest = math.gcd(world_size, same_bits)
    return [2**power for power in range(largest.bit_length()) if largest % 2**power == 0]


def groups_of_degrees(degrees: Sequence[int], timeout: float) -> dict[int, dist.ProcessGroup]:
    """This rank's group of each degree: neighbours, all ranks being in one; every rank of the job calls it."""
    own: dict[int, dist.ProcessGroup] = {}
    for degree in degrees:
        for first in range(0, dist.get_world_size(), degree):
            ranks = range(first, first + degree)
            group = new_group(ranks, "cpu", timeout)
            if dist.get_rank() in ranks:
                own[degree] = group
    return own


@dataclass(frozen=True)
class Difference:
    """Where bits first differ from those of rank 0 without tensor parallelism."""

    case: str
    degree: int
    rank: int
    first: str
    count: int

    def __str__(self) -> str:
        return (
            f"{self.case}: rank {self.rank}, training on {self.degree} ranks, first differs in the {self.first}; "
            f"{self.count} results differ"
        )


def compare(case: Case, groups: Mapping[int, dist.ProcessGroup], same_bits: int | None) -> tuple[int, list[Difference]]:
    """Train at each degree; how many results each has, and what differs, equal on all ranks.  All ranks call it."""
    mine: dict[str, dict[str, str]] = {}
    for degree, group in groups.items():
        run = Run(case, group, same_bits)
        run.steps(0, case.steps)
        mine[str(degree)] = run.digests
    of_ranks = from_all_ranks(mine, dict[str, dict[str, str]])
    expected = of_ranks[0][str(min(groups))]
    found = []
    for rank, by_degree in enumerate(of_ranks):
        for at, digests in by_degree.items():
            differ = [name for name, digest in expected.items() if digests.get(name) != digest]
            if differ or digests.keys() != expected.keys():
                first = differ[0] if differ else "names of the results"
                found.append(Difference(str(case), int(at), rank, first, len(differ)))
    return len(expected), found


@dataclass(frozen=True)
class Verdict:
    """What one job found."""

    cases: list[Case]
    degrees: list[int]
    same_bits: int
    compared: int
    differences: list[Difference]

    @property
    def same(self) -> bool:
        """Whether every bit is."""
        return not self.differences

    def __str__(self) -> str:
        """One sentence on what was compared, or a line for each difference."""
        if self.differences:
            return "\n".join([f"NOT the same bits (same_bits={self.same_bits}):", *map(str, self.differences)])
        kinds, dtypes = ([*dict.fromkeys(getattr(one, name) for one in self.cases)] for name in ("kind", "dtype"))
        return (
            f"The same bits at tensor-parallel degrees {_listed(self.degrees)} (same_bits={self.same_bits}) on every "
            f"rank: {self.compared:,} losses, gradients, norms and parameters of {self.cases[0].steps} steps of AdamW "
            f"with clipping and dropout, of {_listed(kinds)}, in {_listed(dtypes)}."
        )

    def to_json(self) -> dict[str, object]:
        """For a file."""
        return {"passed": self.same, "verdict": str(self), **to_plain(self)}


def run_rank(same_bits: int, dtypes: Sequence[str], quick: bool) -> Verdict:
    """One rank's part; the verdict, equal on all ranks.  A default group that exists is used and kept."""
    joined = dist.is_initialized()
    tpk.init(device="cpu", timeout=WAIT_S)
    torch.set_num_threads(1)
    try:
        degrees = degrees_of(dist.get_world_size(), same_bits)
        groups = groups_of_degrees(degrees, WAIT_S)
        verdict = Verdict(cases(dtypes, quick=quick), degrees, same_bits, 0, [])
        started = time.monotonic()
        for number, case in enumerate(verdict.cases):
            if dist.get_rank() == 0:
                left = remaining(number, len(verdict.cases), time.monotonic() - started)
                print(f"[{number + 1}/{len(verdict.cases)}] {case}{left}", file=sys.stderr, flush=True)
            count, found = compare(case, groups, same_bits)
            verdict = replace(verdict, compared=verdict.compared + count, differences=[*verdict.differences, *found])
        return verdict
    finally:
        if not joined:
            dist.destroy_process_group()


def _listed(words: Sequence[object]) -> str:
    *most, last = [str(word) for word in words]
    return f"{', '.join(most)} and {last}" if most else last
