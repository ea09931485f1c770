"""The rows: what is run, how often in a slice (continuous integration: about 40 s of a core in all), and in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.reliability import caches, deaths, fingerprint, growth, limits, mismatches, records, sharing, signals, values
from tests.reliability.outcome import Outcome


@dataclass(frozen=True)
class Row:
    """`run(count)` makes `count` trials. needs_root: what it does to its ranks takes privileges.

    sampled: continuous integration runs a slice; of R1 with three ranks alone, which have a victim and two survivors.
    """

    name: str
    what: str
    run: Callable[[int], Outcome]
    slice: int
    full: int
    needs_root: bool = False
    sampled: bool = True


ROWS = (
    Row("R1-world2", "SIGKILL of a rank mid-op", partial(deaths.mid_op, size=2), 4, 200, sampled=False),
    Row("R1-world3", "SIGKILL of a rank mid-op", partial(deaths.mid_op, size=3), 2, 200),
    Row("R1-world4", "SIGKILL of a rank mid-op", partial(deaths.mid_op, size=4), 2, 200, sampled=False),
    Row("R2", "SIGKILL of a rank mid-op, chunked over gloo", deaths.CHUNKED, 2, 50),
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
)
