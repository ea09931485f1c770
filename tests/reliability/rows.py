"""The rows: what is run, how often in a slice (continuous integration: about 40 s of a core in all), and in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.reliability import caches, deaths, fingerprint, growth, limits, mismatches, records, sharing, signals, values
from tests.reliability.outcome import Outcome


@dataclass(frozen=True)
class Row:
    """`run(count)` makes `count` trials. slice: 0 where the row runs in full alone. needs_root: what it does to its
    ranks takes privileges."""

    name: str
    what: str
    run: Callable[[int], Outcome]
    slice: int
    full: int
    needs_root: bool = False


def _over_gloo(name: str) -> tuple[Row, ...]:
    """The rows that are about calls, on the backends whose calls go over gloo; R7, R18 and R20 are about set-up, the
    exchange of records and shared memory itself, and `symmetric` needs GPUs (tests/gpu)."""
    end = f"-{name}"
    return (
        Row("R3" + end, "SIGKILL during rendezvous", _with(deaths.in_rendezvous, name), 0, 50),
        Row("R4" + end, "whole group killed", _with(deaths.whole_group, name), 0, 50),
        Row("R5" + end, "SIGSTOP beyond the time-out", _with(signals.stopped, name), 0, 20),
        Row("R6" + end, "mismatched calls", _with(mismatches.disagreement, name), 0, 60),
        Row("R8" + end, "use after an error", _with(mismatches.after_an_error, name), 0, 30),
        Row("R9" + end, "threads on one group", _with(sharing.threads_and_subgroups, name), 0, 1000),
        Row("R11" + end, "random problems within the bound", _with(values.random_problems, name), 0, 2000),
        Row("R12" + end, "NaN and Inf", _with(values.nonfinite, name), 0, 300),
        Row("R13" + end, "same bits whoever comes first", _with(values.same_bits, name), 0, 20),
        Row("R14" + end, "soak", _with(growth.soak, name), 0, 20000),
        Row("R19-SIGINT" + end, "Ctrl-C mid-op", _with(signals.interrupted, name), 0, 50),
        Row("R19-fork" + end, "fork after init", _with(signals.forked, name), 0, 20),
    )


def _with(run: Callable[..., Outcome], name: str) -> Callable[[int], Outcome]:
    return partial(run, implementation=name)


ROWS = (
    Row("R1-world2", "SIGKILL of a rank mid-op", partial(deaths.mid_op, size=2), 0, 200),
    Row("R1-world3", "SIGKILL of a rank mid-op", partial(deaths.mid_op, size=3), 2, 200),
    Row("R1-world4", "SIGKILL of a rank mid-op", partial(deaths.mid_op, size=4), 0, 200),
    Row("R2", "SIGKILL of a rank mid-op, chunked over gloo", deaths.OVER_GLOO["chunked"], 2, 50),
    Row("R3", "SIGKILL during rendezvous", deaths.in_rendezvous, 2, 200),
    Row("R4", "whole group killed", deaths.whole_group, 2, 500),
    Row("R5", "SIGSTOP beyond the time-out, then SIGCONT", signals.stopped, 2, 50),
    Row("R5-chain", "the stopped rank is not the one that is waited for", signals.stopped_upstream, 1, 50),
    Row("R6", "mismatched calls", mismatches.disagreement, 30, 500),
    Row("R7", "cost of the fingerprint", fingerprint.cost, 11, 101),
    Row("R8", "use after an error; a new group", mismatches.after_an_error, 3, 100),
    Row("R9", "threads on one group, groups that overlap", sharing.threads_and_subgroups, 80, 10**4),
    Row("R10", "workspaces of random sizes", growth.random_sizes, 40, 10**4),
    Row("R11", "random problems within the fp64 bound", values.random_problems, 60, 10**5),
    Row("R12", "NaN and Inf", values.nonfinite, 30, 10**3),
    Row("R13", "same bits whoever comes first", values.same_bits, 4, 100),
    Row("R14", "soak", growth.soak, 500, 10**6),
    Row("R18-user", "a rank of another user", limits.other_user, 1, 20, needs_root=True),
    Row("R18-strangers", "strangers at the socket", limits.strangers, 5, 50, needs_root=True),
    Row("R18-EMFILE", "no descriptors left", limits.descriptors, 9, 36),
    Row("R18-mmap", "no address space left", limits.address_space, 4, 24),
    Row("R18-growth", "a workspace that cannot grow", limits.growth_refused, 3, 30),
    Row("R18-ENOSPC", "memory that cannot be reserved", limits.full_memory, 2, 20),
    Row("R19-SIGINT", "Ctrl-C mid-op", signals.interrupted, 2, 50),
    Row("R19-fork", "fork after init", signals.forked, 2, 50),
    Row("R20-pickle", "no pickle in the exchange", records.no_pickle, 1, 10),
    Row("R20-corrupt", "rubbish in the exchange", records.corrupt, 3, 100),
    Row("R20-caches", "caches of tiles that differ or are rubbish", caches.caches, 4, 100),
    Row("R2-unfused", "SIGKILL of a rank mid-op", deaths.OVER_GLOO["unfused"], 0, 50),
    Row("R10-unfused", "collectives of random sizes", _with(growth.random_sizes, "unfused"), 0, 1000),
    *(row for name in ("chunked", "unfused") for row in _over_gloo(name)),
)
