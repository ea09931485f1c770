"""The network lab: ranks on one machine that talk over a real, rate-limited network.

Owns: what N rank processes, each in its own network namespace (`links.py`), and a switch process that joins them and
hosts the rendezvous store do together; `tpkernels.launching` starts them, waits for them and ends them.
Assumes: root on Linux and `pyroute2` (extra `netlab`); otherwise raises `NetlabUnavailable`, whose message says what
is missing, so that the command line and the tests can skip with a reason.
Refuses: leaving anything behind. The namespaces are anonymous and belong to the rank and switch processes; those die
with their parent (PR_SET_PDEATHSIG), and the kernel reaps namespaces, veth pairs and queues with the last process.
That holds under SIGKILL of the parent too. (Processes that `fn` itself starts must see to their own end.)

Each rank gets one core and one torch thread while there are enough cores, the torchrun variables, and
GLOO_SOCKET_IFNAME. The caller's own network is never touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from tpkernels import config
from tpkernels.errors import TpKernelsError
from tpkernels.launching import local_ranks
from tpkernels.launching.conversation import Conversation, NotSaid
from tpkernels.launching.local_ranks import pack_call
from tpkernels.launching.rank_process import Link, RankSetup, children_inherit
from tpkernels.measure import links

STORE_PORT = 29500  # free by construction: the switch's namespace is new and holds nothing else
_SETUP_TIMEOUT_S = 120.0  # importing torch in every rank on a loaded machine


class NetlabUnavailable(TpKernelsError):
    """This machine or user cannot run the network lab; the message says what is missing."""


class NetlabError(TpKernelsError):
    """A rank or the switch of the network lab failed, died or was late; the message names it."""


class Sample(NamedTuple):
    """Bytes that had crossed one host's link at a time: `tx` left the host after the shaper, `rx` entered it."""

    time_ns: int  # time.monotonic_ns(), one clock for all processes of the machine
    tx_bytes: int
    rx_bytes: int


def unavailable_reason() -> str | None:
    """Why `Netlab` would raise here, or None. Tries it for real, in a throw-away process."""
    missing = links.missing_capability()
    if missing is not None:
        return missing
    try:
        probe = subprocess.run([sys.executable, links.__file__], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "building a probe namespace took over 60 s"
    if probe.returncode != 0:
        output = (probe.stdout + probe.stderr).strip()
        return output.splitlines()[-1] if output else f"the probe exited with {probe.returncode}"
    return None


def run_in_netlab(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    rate: str = "1gbit",
    delay: str | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Run `fn(*args)` on `nproc` hosts joined by links of `rate`; return its values by rank.

    `fn` must be importable (it crosses a process boundary) and its value picklable.
    Raises: NetlabUnavailable; NetlabError with the traceback of the first rank that failed, or naming the ranks that
    had not finished after `timeout` seconds.
    """
    with Netlab(nproc, rate=rate, delay=delay) as lab:
        return lab.run(fn, *args, timeout=timeout)


class Netlab:
    """One use of the network lab; `run_in_netlab` unless the byte counters are wanted.

    With `sample_interval_s`, the switch reads every port's byte counters that often while `run` lasts. It is a process
    of its own, so that the ranks' interpreters are not disturbed; `samples[rank]` holds what it saw.
    """

    def __init__(
        self, nproc: int, *, rate: str = "1gbit", delay: str | None = None, sample_interval_s: float | None = None
    ) -> None:
        if not links.MIN_HOSTS <= nproc <= links.MAX_HOSTS:
            raise ValueError(f"nproc must be {links.MIN_HOSTS}..{links.MAX_HOSTS} in the network lab, got {nproc}")
        self.nproc = nproc
        self.spec = links.LinkSpec.parse(rate, delay)
        self.sample_interval_s = sample_interval_s
        self.samples: list[list[Sample]] = [[] for _ in range(nproc)]
        self._hosts, self._switch = range(nproc), nproc
        self._lab: Conversation | None = None

    def __enter__(self) -> Netlab:
        missing = links.missing_capability()
        if missing is not None:
            raise NetlabUnavailable(f"the network lab {missing}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lab is not None:
            self._lab.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        if self._lab is not None:
            raise RuntimeError("this Netlab has already run; make a new one (a run owns its namespaces)")
        setup_deadline = time.monotonic() + _SETUP_TIMEOUT_S
        self._lab = self._start(fn, args)
        self._join_network(setup_deadline)
        if self.sample_interval_s is not None:
            self._lab.tell(self._switch, ("sample", self.sample_interval_s))
            self._gather([self._switch], "sampling", setup_deadline)
        for host in self._hosts:
            self._lab.tell(host, "start")
        values = self._gather(self._hosts, "done", time.monotonic() + timeout)
        if self.sample_interval_s is not None:
            self._lab.tell(self._switch, ("stop", None))
            (per_rank,) = self._gather([self._switch], "samples", time.monotonic() + 30)
            self.samples = [[Sample(*row) for row in rows] for rows in per_rank]
        # Only now may ranks go: a host that left earlier would have taken its end of the network with it.
        for host in self._hosts:
            self._lab.ranks[host].send(b"", time.monotonic() + 10)
        for host in self._hosts:
            self._lab.ranks[host].process.join(timeout=10)
        return values

    def _start(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Conversation:
        """The hosts, and the switch as the last one. New interpreters: torch's threads do not survive a fork."""
        cores = sorted(os.sched_getaffinity(0))
        pinned = self.nproc <= len(cores)
        with children_inherit(_EARLY):
            inherited = config.inherited()
            setups = [
                RankSetup(
                    rank, inherited | _rank_variables(rank, self.nproc), (cores[rank],) if pinned else (), talks=True
                )
                for rank in self._hosts
            ]
            setups.append(RankSetup(self._switch, inherited, talks=True))
            calls = [pack_call(_host, (rank, self.spec, fn, args)) for rank in self._hosts]
            calls.append(pack_call(_serve_switch, (self.spec, self.nproc)))
            return Conversation(setups, calls, local_ranks.new_interpreters())

    def _join_network(self, deadline: float) -> None:
        assert self._lab is not None
        self._gather([self._switch], "ready", deadline)
        self._gather(self._hosts, "entered", deadline)
        self._lab.tell(self._switch, ("plug", [self._lab.ranks[host].process.pid for host in self._hosts]))
        self._gather([self._switch], "plugged", deadline)
        for host in self._hosts:
            self._lab.tell(host, "configure")
        self._gather(self._hosts, "configured", deadline)

    def _gather(self, children: Sequence[int], expected: str, deadline: float) -> list[Any]:
        """Wait until each child has said `expected`; raise for the first that failed, died, or is late."""
        assert self._lab is not None
        try:  # the switch is watched throughout: without it no rank can make progress
            return [said.value for said in self._lab.expect((expected,), deadline, children, needed=[self._switch])]
        except NotSaid as silence:
            if silence.failure is not None:
                if isinstance(silence.failure.exception, NetlabUnavailable):
                    raise silence.failure.exception from None
                raise NetlabError(
                    f"network lab: {self._name(silence.failure.rank)} failed\n{silence.failure.details}"
                ) from None
            if silence.gone:
                process = self._lab.ranks[silence.gone[0]].process
                process.join(timeout=5)  # the pipe closes a moment before the exit code can be read
                name = self._name(silence.gone[0])
                raise NetlabError(f"network lab: {name} died with exit code {process.exitcode}") from None
            late = ", ".join(map(self._name, silence.missing))
            raise NetlabError(f"network lab: {late} did not report {expected!r} in time") from None

    def _name(self, child: int) -> str:
        return "switch" if child == self._switch else f"rank {child}"


# Before torch is imported: else c10d warns, per connection, that the lab's addresses have no names.
_EARLY = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def _rank_variables(rank: int, nproc: int) -> dict[str, str]:
    """What torchrun would have set, and the interface that gloo shall use."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": "0",  # every rank is alone on its host
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": links.SWITCH_ADDRESS,
        "MASTER_PORT": str(STORE_PORT),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the switch hosts the store, so rank 0 must not
        "GLOO_SOCKET_IFNAME": links.HOST_INTERFACE,
    }


@contextmanager
def _building() -> Iterator[None]:
    """What the kernel refuses is a reason why there is no lab."""
    try:
        yield
    except (OSError, ImportError) as error:
        raise NetlabUnavailable(f"the network lab cannot be built: {type(error).__name__}: {error}") from error


def _host(link: Link, rank: int, spec: links.LinkSpec, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with _building():
        links.enter_new_namespace()
    link.say("entered")
    link.hear()  # "configure"
    with _building():
        links.configure_host(rank, spec)
    link.say("configured")
    link.hear()  # "start"
    value = fn(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    link.say("done", value)


def _serve_switch(link: Link, spec: links.LinkSpec, nproc: int) -> None:
    with _building():
        links.enter_new_namespace()
        links.make_switch()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        links.SWITCH_ADDRESS, STORE_PORT, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    link.say("ready")
    interval: float | None = None
    samples: list[list[tuple[int, int, int]]] = [[] for _ in range(nproc)]
    next_time = 0.0
    while store is not None:  # it serves as long as this function runs
        # Without a command the wait doubles as the sampling clock.
        if link.is_told(max(0.0, next_time - time.monotonic()) if interval is not None else None):
            command, value = link.hear()
            if command == "plug":
                with _building():
                    for rank, pid in enumerate(value):
                        links.plug_host(rank, pid, spec, shape_downlink=nproc > 2)
                link.say("plugged")
            elif command == "sample":
                interval = float(value)
                next_time = time.monotonic()
                link.say("sampling")
            elif command == "stop":
                interval = None
                link.say("samples", samples)
        elif interval is not None:
            now = time.monotonic_ns()
            counters = links.read_counters()
            for rank, rows in enumerate(samples):
                port_rx, port_tx = counters[f"port{rank}"]  # what the port receives is what the host sent
                rows.append((now, port_rx, port_tx))
            next_time = max(next_time + interval, time.monotonic())
