"""Which implementation runs a problem, and why.

A backend registers one :class:`Implementation` per op it can run.  Selection uses only facts that are equal on all
ranks (the :class:`Problem`, and :class:`Costs` that the ranks agreed on), so that every rank picks the same one.
``implementation="auto"`` takes the smallest estimate among those that do not refuse; a name forces, and raises
:class:`~tpkernels.errors.UnsupportedProblem` with everybody's reason where it cannot run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from tpkernels import partition
from tpkernels.comm import resources
from tpkernels.comm.resources import Standing
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import canonical, fp8

__all__ = [
    "FACTS",
    "GROUPED",
    "OPS",
    "Candidate",
    "Costs",
    "Explanation",
    "Facts",
    "Implementation",
    "Problem",
    "dtype_text",
    "implementations",
    "register",
    "select",
]


class Facts(NamedTuple):
    """What an op does, for all that treat ops of a kind alike."""

    multiplies: bool
    """Has a GEMM."""
    gathers: bool = False
    """Makes the whole of the ranks' shards."""
    reduces: bool = False
    """Sums over the ranks."""
    everywhere: bool = False
    """Every rank gets the whole sum, not its shard of it."""
    grouped: bool = False
    """Each row has a matrix of its expert's: a GEMM per expert."""
    dealt: bool = False
    """Each rank has some of the experts, and not a slice of each."""


FACTS = {
    "all_gather_matmul": Facts(multiplies=True, gathers=True),
    "matmul_reduce_scatter": Facts(multiplies=True, reduces=True),
    "matmul_all_reduce": Facts(multiplies=True, reduces=True, everywhere=True),
    "all_gather": Facts(multiplies=False, gathers=True),
    "reduce_scatter": Facts(multiplies=False, reduces=True),
    "all_reduce": Facts(multiplies=False, reduces=True, everywhere=True),
    "all_gather_grouped_matmul": Facts(multiplies=True, gathers=True, grouped=True),
    "grouped_matmul_reduce_scatter": Facts(multiplies=True, reduces=True, grouped=True),
    "grouped_matmul_all_reduce": Facts(multiplies=True, reduces=True, everywhere=True, grouped=True),
    "dispatch_grouped_matmul": Facts(multiplies=True, gathers=True, grouped=True, dealt=True),
    "grouped_matmul_combine": Facts(multiplies=True, reduces=True, grouped=True, dealt=True),
}
OPS = tuple(op for op, facts in FACTS.items() if not facts.grouped)
"""Those whose rows all have the same matrix, or none."""
GROUPED = tuple(op for op, facts in FACTS.items() if facts.grouped)


GROUPED_GEMM, GROUPED_SUM = 2.0, 3.0
"""How many times as long as one GEMM's the arithmetic and the weights of many small ones take, alone and with the sums
over a token's experts; of few large ones the arithmetic alone: what a further part of theirs costs is one GEMM's.

Measured in bf16 on one core of an Intel Xeon with AMX, torch 2.13, 2026-11-24, in ms, with this factor in brackets, in
1, 2, 3, 5 and 9 parts.  128 experts, 2048 tokens with 8 each: gate and up of 384 x 2048 took 105, 160, 215, 276, 441
(100, 136, 180, 275, 473), the sum 88, 127, 171, 228, 370 (75, 103, 137, 209, 359).  32 experts, 4 each: 512 x 1024 took
28, 36, 45, 58, 83 (27, 33, 39, 53, 84), the sum 21, 27, 31, 38, 49 (21, 25, 29, 40, 64).

Those brackets had the factor on every part's weights, too.  On 2026-11-27, GEMMs at 1.3 TFLOP/s, as it is now: 8
experts, 2 each, gate and up of 1792 x 1024 took 54, 57, 67, 82, 129 (51, 58, 66, 82, 110), the sum 36, 31, 33, 42, 63
(37, 42, 47, 62, 83).  256 experts, 8 each, 128 x 896: 42, 59, 75, 116, 187 (27, 44, 62, 100, 177), the sum 40, 52, 64,
88, 140 (20, 33, 48, 76, 135).
"""


@dataclass(frozen=True)
class Problem:
    """One call in rank-invariant terms.

    ``m``, ``n`` and ``k`` are those of the GEMM over the whole group: ``all_gather_matmul`` runs m x k x n/W on each of
    the W ranks, ``matmul_reduce_scatter`` and ``matmul_all_reduce`` run m x k/W x n.  Collectives without a GEMM move
    a whole of ``m`` rows of ``k`` (gather) or ``n`` (reduce) elements.  Of a grouped GEMM ``m`` are the tokens, each of
    which is multiplied with the matrices of ``top_k`` of ``experts`` experts.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    """Of the operands."""
    world_size: int
    device: str = "cpu"
    backend: str = "gloo"
    co_located: bool = False
    # Calls hash a problem, and these hardly ever differ; errors list the reasons of the implementations instead.
    resources: tuple[Standing, ...] = field(default=(), hash=False, repr=False)
    """What the group has of the things that backends own, see :mod:`tpkernels.comm.resources`."""
    out_dtype: torch.dtype | None = None
    """Of the result and of partials, if it is another one: of fp8 calls."""
    activation: str | None = None
    """What follows the product; of a gated one, ``n`` are the columns of both products."""
    experts: int = 1
    top_k: int = 1
    same_bits: int = 0
    """The largest degree whose bits the call is to give, see :mod:`tpkernels.gemm.canonical`; 0: none."""

    def refusal(self, resource: str) -> str | None:
        """Why the group does not have this resource; None if it does."""
        standing = self._standing(resource)
        return f"the group has no {resource.replace('_', ' ')}" if standing is None else standing.refusal

    def features(self, resource: str) -> frozenset[str]:
        """What this resource of the group can do beside what every one of its kind can."""
        standing = self._standing(resource)
        return frozenset() if standing is None else standing.features

    def _standing(self, resource: str) -> Standing | None:
        return next((standing for standing in self.resources if standing.name == resource), None)

    @property
    def facts(self) -> Facts:
        """What its op does."""
        return FACTS[self.op]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that travels: of the gathered x with its scale, or of partial sums."""
        if not self.facts.gathers:
            itemsize = (self.out_dtype or self.dtype).itemsize
            return self.n * (max(itemsize, torch.float32.itemsize) if self.same_bits else itemsize)
        return self.k * self.dtype.itemsize if self.out_dtype is None else fp8.packed_bytes(self.k)

    @property
    def wire_bytes(self) -> int:
        """Bytes that each rank sends (and receives) when the payload crosses the wire once."""
        once = self.m * self.row_bytes * (self.world_size - 1) // max(1, self.world_size)
        if self.facts.dealt:  # a token goes to a rank that has one of its experts: once, if they are chosen by chance
            return int(once * (1.0 - (1.0 - 1.0 / self.world_size) ** self.top_k))
        return 2 * once if self.facts.everywhere else once

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank's GEMM."""
        return 2.0 * self.m * self.top_k * self.n * self.k / self.world_size if self.facts.multiplies else 0.0

    def num_matrices(self, calls: int = 1) -> float:
        """Matrices that each of ``calls`` parts of the GEMM is expected to read, if tokens choose experts by chance."""
        rows = max(1, self.m * self.top_k // calls)
        used = self.experts * (1.0 - (1.0 - 1.0 / self.experts) ** rows)
        return used / self.world_size if self.facts.dealt else used

    @property
    def num_chunks(self) -> int:
        """Chunks per shard for an even cut; see :func:`tpkernels.partition.num_chunks`."""
        return partition.num_chunks(-(-self.m // self.world_size), self.row_bytes)


@dataclass(frozen=True)
class Costs:
    """What a group's machines and link were measured to do; rates of the slowest rank.

    ``gemm_gflops`` is what further rows of a large GEMM run at.  A GEMM of few rows streams its weight at
    ``weight_gbytes``; each further GEMM of many rows over a weight costs as long as that takes at ``relay_gbytes``,
    because the library lays the weight out anew at every call, or as much of that as does not hide behind arithmetic.

    ``copy_gbytes`` and ``signal_us`` are those of memory that ranks of one host share (built-in values elsewhere).

    ``few_rows_gbytes`` and ``sixteen_rows_gbytes`` are the rates at which the compiled kernel for few rows
    (:mod:`tpkernels.gemm.few_rows`) goes through a weight with one row and with sixteen; 0 where it is not taken.

    ``own`` has what the group's resources were measured to cost by names that their backends alone know
    (:meth:`tpkernels.comm.resources.Resource.link_costs`).

    ``widens``: the GEMM is the one that :mod:`tpkernels.gemm.widened` makes in fp32, on all ranks.

    ``link_cpu`` is the part of a transfer's time during which it occupies the core that also runs the GEMM: near 1 for
    sockets on one host, near 0 for a network card or a copy engine.
    """

    gemm_gflops: float = 100.0
    gemm_overhead_us: float = 20.0
    weight_gbytes: float = 8.0
    relay_gbytes: float = 40.0
    link_gbytes: float = 1.0
    link_latency_us: float = 100.0
    link_cpu: float = 0.5
    copy_gbytes: float = 4.0
    signal_us: float = 10.0
    few_rows_gbytes: float = 0.0
    sixteen_rows_gbytes: float = 0.0
    own: tuple[tuple[str, float], ...] = ()
    measured: bool = False
    widens: bool = False

    @staticmethod
    def of(measurements: Mapping[str, float], *, measured: bool = True, widens: bool = False) -> Costs:
        """Costs of what was measured, by name; names that are not fields here go to ``own``."""
        names = {one.name for one in fields(Costs)} - {"own", "measured", "widens"}
        own = tuple(sorted((name, value) for name, value in measurements.items() if name not in names))
        known = {name: measurements[name] for name in names & measurements.keys()}
        return Costs(**known, own=own, measured=measured, widens=widens)

    def own_cost(self, name: str) -> float:
        """What was measured under a backend's own name; 0 where nothing was, and the backend's model stands."""
        return dict(self.own).get(name, 0.0)

    def gemm_us(self, problem: Problem, calls: int = 1) -> float:
        """One rank's GEMM cut into ``calls`` along its rows: each call reads the weight again, and lays it out anew.

        While streaming the weight takes longer than the arithmetic, most of the arithmetic hides behind it (fitted to
        bf16 on one CPU core); with more rows it ends at the arithmetic and the measured cost of a further call.
        """
        matrices = problem.num_matrices(calls)
        whole = matrices * problem.n * problem.k * problem.dtype.itemsize
        weight_bytes = whole if problem.facts.dealt else whole / problem.world_size
        compute = problem.flops / self.gemm_gflops * 1e-3 / calls
        stream, relay = weight_bytes / self.weight_gbytes * 1e-3, weight_bytes / self.relay_gbytes * 1e-3
        times = 1.0
        if problem.facts.grouped:
            times = GROUPED_SUM if problem.facts.reduces else GROUPED_GEMM
        if compute <= stream:
            one = times * (stream + (0.8 * compute * (compute / stream) ** 0.5 if stream else 0.0))
        else:
            one = times * compute + relay + (0.8 * times * stream - relay) * stream / compute
        return calls * (one + matrices * self.gemm_overhead_us)

    def few_rows_us(self, problem: Problem) -> float:
        """One rank's GEMM by the kernel for few rows, each of which adds the same; else :meth:`gemm_us`."""
        if not self.few_rows_gbytes or not self.sixteen_rows_gbytes:
            return self.gemm_us(problem)
        weight_bytes = problem.n * problem.k * problem.dtype.itemsize / problem.world_size
        one, sixteen = (weight_bytes / rate * 1e-3 for rate in (self.few_rows_gbytes, self.sixteen_rows_gbytes))
        return one + max(0.0, sixteen - one) * (problem.m - 1) / 15

    def copy_us(self, num_bytes: float, signals: int = 1) -> float:
        """Copies through shared memory, and waits for signals."""
        return num_bytes / self.copy_gbytes * 1e-3 + signals * self.signal_us

    def local_us(self, problem: Problem) -> float:
        """What a rank does to rows that came over a link: sums them, or lays its own beside them.

        On a CPU; a GPU takes no time for it that counts.
        """
        if problem.device != "cpu":
            return 0.0
        own = problem.m * problem.row_bytes / problem.world_size
        return self.copy_us(own if problem.facts.gathers else problem.wire_bytes, 0)

    def link_us(self, num_bytes: float, messages: int = 1) -> float:
        return num_bytes / self.link_gbytes * 1e-3 + messages * self.link_latency_us


@dataclass(frozen=True)
class Implementation:
    """What a backend offers for one op.

    ``refuses`` returns None or the reason why it cannot run a problem, ``estimate`` its time in microseconds (None
    where nobody knows: "auto" takes another one), and ``run`` executes the op's contract (see
    :mod:`tpkernels.ops.contract`).  ``agree``, if it has one, is called on every rank when a signature is new to the
    group, and may exchange records; what it returns comes with every such call, in ``Context.agreed``.  ``repeat``, if
    it has one, takes what ``run`` took and returns what the contract offers for further calls like that one, or None.
    ``describe``, if it has one, says in a few words how it would run a problem that it does not refuse.
    """

    name: str
    op: str
    refuses: Callable[[Problem], str | None]
    estimate: Callable[[Problem, Costs], float | None]
    run: Callable[..., Any]
    agree: Callable[..., Any] | None = None
    repeat: Callable[..., Any] | None = None
    describe: Callable[[Problem], str] | None = None
    keeps_bits: bool = False
    """Whether ``run`` gives the same bits at every degree where ``problem.same_bits`` asks for it; else it refuses."""
    has_own_bits: bool = False
    """Whether these are other bits than those of the other implementations, so that all degrees have to take it."""

    def __post_init__(self) -> None:
        if self.op not in FACTS:
            raise ValueError(f"implementation {self.name!r} is for an unknown op {self.op!r}; known: {tuple(FACTS)}")


@dataclass(frozen=True)
class Candidate:
    """One implementation's answer to a problem."""

    name: str
    refusal: str | None
    estimate_us: float | None
    how: str = ""


@dataclass(frozen=True)
class Explanation:
    """Which implementation runs a problem and why; ``str()`` is a table."""

    problem: Problem
    chosen: str
    reason: str
    candidates: tuple[Candidate, ...]
    costs: Costs

    def __str__(self) -> str:
        p = self.problem
        experts = f" experts={p.experts} top_k={p.top_k}" if p.facts.grouped else ""
        lines = [
            f"{p.op}  m={p.m} k={p.k} n={p.n}{experts} {dtype_text(p.dtype, p.out_dtype)}  "
            f"world_size={p.world_size} device={p.device} backend={p.backend} co_located={p.co_located}",
            f"-> {self.chosen}: {self.reason}",
        ]
        width = max(len(candidate.name) for candidate in self.candidates)
        for candidate in self.candidates:
            if candidate.refusal is not None:
                what = f"cannot run: {candidate.refusal}"
            else:
                what = "no estimate" if candidate.estimate_us is None else f"estimate {candidate.estimate_us:,.0f} us"
                what += f"{', ' if candidate.how else ''}{candidate.how}"
            lines.append(f"   {candidate.name:<{width}}  {what}")
        if self.costs.widens and not p.same_bits:
            lines.append(
                f"   GEMM: {dtype_text(p.dtype, None)} is widened to fp32 in blocks and rounded once, which every rank "
                "measured\n   to be faster than the library's own GEMM"
            )
        if p.same_bits and p.facts.multiplies:
            cut = p.m, p.n, p.k, (p.out_dtype or p.dtype).itemsize, p.world_size, p.same_bits
            if p.facts.grouped:
                lines.append(
                    f"   {canonical.describe_experts(*cut, gathers=p.facts.gathers, experts=p.experts, top_k=p.top_k)}"
                )
            else:
                lines.append(f"   {canonical.describe(*cut, gathers=p.facts.gathers)}")
        origin = "measured on this group" if self.costs.measured else "built-in costs, not measured"
        own = dict(self.costs.own)
        texts = [kind.costs_text(own) for kind in resources.kinds() if p.refusal(kind.name) is None]
        of_resources = "".join(f", {text}" for text in texts if text)
        lines.append(
            f"   costs ({origin}): GEMM {self.costs.gemm_gflops:,.0f} GFLOP/s, "
            f"link {self.costs.link_gbytes:.2f} GB/s + {self.costs.link_latency_us:.0f} us{of_resources}"
        )
        return "\n".join(lines)


def dtype_text(dtype: torch.dtype, out_dtype: torch.dtype | None) -> str:
    """What a call computes in, and what it returns if that differs."""
    names = [str(one).removeprefix("torch.") for one in (dtype, out_dtype) if one is not None]
    return " -> ".join(names)


_registry: dict[tuple[str, str], Implementation] = {}


def register(implementation: Implementation) -> None:
    """Offer an implementation of an op; a name may be taken once per op."""
    key = (implementation.op, implementation.name)
    if key in _registry:
        raise ValueError(f"{implementation.op} has an implementation named {implementation.name!r} already")
    _registry[key] = implementation


def implementations(op: str) -> list[Implementation]:
    """Registered implementations of an op in order of registration."""
    if op not in FACTS:
        raise ValueError(f"unknown op {op!r}; known: {', '.join(FACTS)}")
    return [implementation for (of, _), implementation in _registry.items() if of == op]


def select(problem: Problem, requested: str, costs: Costs) -> tuple[Implementation, Explanation]:
    """The implementation that runs ``problem``.

    One rank takes what it can for an op with experts, whatever is ``requested``, unless its peers at other degrees have
    bits that it would not.

    Raises:
        ValueError: ``requested`` is no implementation's name.
        UnsupportedProblem: ``requested`` cannot run the problem.
    """
    offers = implementations(problem.op)
    check_name(problem.op, requested)
    if problem.facts.grouped and problem.world_size == 1:
        is_bound = problem.same_bits and any(offer.has_own_bits for offer in offers if offer.name == requested)
        requested = requested if is_bound else "auto"
    refusals = {offer.name: _loses_bits(offer, problem) or offer.refuses(problem) for offer in offers}
    candidates = tuple(
        Candidate(
            offer.name,
            refusals[offer.name],
            offer.estimate(problem, costs) if refusals[offer.name] is None else None,
            offer.describe(problem) if refusals[offer.name] is None and offer.describe is not None else "",
        )
        for offer in offers
    )
    able = [offer for offer in offers if refusals[offer.name] is None]
    if requested != "auto":
        able = [offer for offer in able if offer.name == requested]
        reason = "forced by implementation="
    else:
        estimates = {c.name: math.inf if c.estimate_us is None else c.estimate_us for c in candidates}
        able = sorted(able, key=lambda offer: estimates[offer.name])
        reason = "smallest estimate" if len(able) > 1 else "the only one that can run this"
    if not able:
        listing = "".join(f"\n  {c.name}: {c.refusal or 'can run this'}" for c in candidates)
        raise UnsupportedProblem(f"implementation {requested!r} cannot run {problem}:{listing}")
    return able[0], Explanation(problem, able[0].name, reason, candidates, costs)


def _loses_bits(offer: Implementation, problem: Problem) -> str | None:
    if not problem.same_bits:
        return None
    if problem.device != "cpu":
        return f"same_bits={problem.same_bits} is proven on CPUs alone, these tensors are on {problem.device}"
    if not offer.keeps_bits:
        return f"its results depend on the number of ranks, and same_bits={problem.same_bits}"
    return None


def check_name(op: str, requested: str) -> None:
    """Raise ``ValueError`` unless ``requested`` is "auto" or a registered implementation of ``op``."""
    if requested == "auto" or (op, requested) in _registry:
        return
    names = [offer.name for offer in implementations(op)]
    raise ValueError(f"implementation must be one of {['auto', *names]}, got {requested!r}")
