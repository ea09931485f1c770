"""The network lab: ranks on one machine that talk over a real, rate-limited network.

Owns: starting N rank processes, each in its own network namespace (`links.py`), a switch process that joins them and
hosts the rendezvous store, bounded waiting, and tearing everything down.
Assumes: root on Linux and `pyroute2` (extra `netlab`); otherwise raises `NetlabUnavailable`, whose message says what
is missing, so that the command line and the tests can skip with a reason.
Refuses: leaving anything behind. The namespaces are anonymous and belong to the rank and switch processes; those die
with their parent (PR_SET_PDEATHSIG), and the kernel reaps namespaces, veth pairs and queues with the last process.
That holds under SIGKILL of the parent too. (Processes that `fn` itself starts must see to their own end.)

Each rank gets one core and one torch thread while there are enough cores, the torchrun variables, and
GLOO_SOCKET_IFNAME. The caller's own network is never touched.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from tpkernels.errors import TpKernelsError
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
        self._switch: _Child | None = None
        self._ranks: list[_Child] = []

    def __enter__(self) -> Netlab:
        missing = links.missing_capability()
        if missing is not None:
            raise NetlabUnavailable(f"the network lab {missing}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        if self._switch is not None:
            raise RuntimeError("this Netlab has already run; make a new one (a run owns its namespaces)")
        cores = sorted(os.sched_getaffinity(0))
        setup_deadline = time.monotonic() + _SETUP_TIMEOUT_S
        self._switch = _Child("switch", _QUIET, _switch_main, self.spec, self.nproc)
        for rank in range(self.nproc):
            core = cores[rank] if self.nproc <= len(cores) else None
            variables = _rank_variables(rank, self.nproc)
            self._ranks.append(_Child(f"rank {rank}", variables, _rank_main, rank, self.spec, core, fn, args))
        self._join_network(setup_deadline)
        if self.sample_interval_s is not None:
            self._switch.conn.send(("sample", self.sample_interval_s))
            self._gather([self._switch], "sampling", setup_deadline)
        for child in self._ranks:
            child.conn.send("start")
        results = self._gather(self._ranks, "done", time.monotonic() + timeout)
        values = [pickle.loads(results[f"rank {rank}"]) for rank in range(self.nproc)]
        if self.sample_interval_s is not None:
            self._switch.conn.send(("stop", None))
            per_rank = self._gather([self._switch], "samples", time.monotonic() + 30)["switch"]
            self.samples = [[Sample(*row) for row in rows] for rows in per_rank]
        # Only now may ranks go: a host that left earlier would have taken its end of the network with it.
        for child in self._ranks:
            child.conn.send("exit")
        for child in self._ranks:
            child.process.join(timeout=10)
        return values

    def _join_network(self, deadline: float) -> None:
        assert self._switch is not None
        self._gather([self._switch], "ready", deadline)
        self._gather(self._ranks, "entered", deadline)
        pids = [child.process.pid for child in self._ranks]
        self._switch.conn.send(("plug", pids))
        self._gather([self._switch], "plugged", deadline)
        for child in self._ranks:
            child.conn.send("configure")
        self._gather(self._ranks, "configured", deadline)

    def _gather(self, children: Sequence[_Child], expected: str, deadline: float) -> dict[str, Any]:
        """Wait until each child sent `(expected, value)`; raise for the first that failed, died, or is late."""
        assert self._switch is not None
        pending = {child.conn: child for child in children}
        # The switch is watched throughout: without it no rank can make progress.
        watched = {child.process.sentinel: child for child in {*children, self._switch}}
        values: dict[str, Any] = {}
        while pending:
            ready = multiprocessing.connection.wait([*pending, *watched], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(child.name for child in pending.values())
                raise NetlabError(f"network lab: {late} did not report {expected!r} in time")
            for conn in [item for item in ready if item in pending]:
                child = pending.pop(conn)
                values[child.name] = child.receive(expected)
            for sentinel in [item for item in ready if item in watched]:
                child = watched.pop(sentinel)
                bystander = child not in children
                if bystander or (child.conn in pending and not child.conn.poll()):
                    raise child.death()
        return values

    def _kill(self) -> None:
        children = [*self._ranks, *([self._switch] if self._switch is not None else [])]
        for child in children:
            child.process.kill()
        for child in children:
            child.process.join(timeout=10)
            child.conn.close()


class _Child:
    """A process and the pipe to it. Spawned, not forked: torch's threads do not survive a fork."""

    def __init__(self, name: str, variables: dict[str, str], main: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, os.getpid(), *args), name=f"tpkernels-{name}")
        with _children_inherit(variables):
            self.process.start()
        theirs.close()

    def receive(self, expected: str) -> Any:
        try:
            kind, value = self.conn.recv()
        except EOFError:
            raise self.death() from None
        if kind == "unavailable":
            raise NetlabUnavailable(f"the network lab cannot be built: {value}")
        if kind == "failed":
            raise NetlabError(f"network lab: {self.name} failed\n{value}")
        assert kind == expected, f"{self.name} sent {kind!r} where {expected!r} was due"
        return value

    def death(self) -> NetlabError:
        self.process.join(timeout=5)  # the pipe closes a moment before the exit code can be read
        return NetlabError(f"network lab: {self.name} died with exit code {self.process.exitcode}")


_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else c10d warns, per connection, that the lab's addresses have no names


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
        "OMP_NUM_THREADS": "1",
        **_QUIET,
    }


@contextmanager
def _children_inherit(variables: dict[str, str]) -> Iterator[None]:
    """Launchers write the environment of their children; only config.py reads it. Undone for this process."""
    saved = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _rank_main(
    conn: Connection,
    parent_pid: int,
    rank: int,
    spec: links.LinkSpec,
    core: int | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    links.die_with_parent(parent_pid)
    try:
        links.enter_new_namespace()
        if core is not None:
            os.sched_setaffinity(0, {core})
        conn.send(("entered", None))
        conn.recv()  # "configure"; EOFError if the parent is gone
        links.configure_host(rank, spec)
    except (OSError, ImportError) as error:
        conn.send(("unavailable", f"{type(error).__name__}: {error}"))
        return
    try:
        import torch

        torch.set_num_threads(1)
        conn.send(("configured", None))
        conn.recv()  # "start"
        value = pickle.dumps(fn(*args))  # by value: tensors must not arrive as handles into a process that is leaving
        _destroy_process_group()
    except BaseException:
        conn.send(("failed", traceback.format_exc()))
        raise
    conn.send(("done", value))
    conn.recv()  # "exit"


def _destroy_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _switch_main(conn: Connection, parent_pid: int, spec: links.LinkSpec, nproc: int) -> None:
    links.die_with_parent(parent_pid)
    try:
        links.enter_new_namespace()
        links.make_switch()
    except (OSError, ImportError) as error:
        conn.send(("unavailable", f"{type(error).__name__}: {error}"))
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        links.SWITCH_ADDRESS, STORE_PORT, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    conn.send(("ready", None))
    try:
        _serve_switch(conn, spec, nproc)
    finally:
        del store


def _serve_switch(conn: Connection, spec: links.LinkSpec, nproc: int) -> None:
    interval: float | None = None
    samples: list[list[tuple[int, int, int]]] = [[] for _ in range(nproc)]
    next_time = 0.0
    while True:
        # Without a command the wait doubles as the sampling clock; EOFError (parent gone) ends the process.
        if conn.poll(max(0.0, next_time - time.monotonic()) if interval is not None else None):
            command, value = conn.recv()
            if command == "plug":
                try:
                    for rank, pid in enumerate(value):
                        links.plug_host(rank, pid, spec, shape_downlink=nproc > 2)
                except OSError as error:
                    conn.send(("unavailable", f"{type(error).__name__}: {error}"))
                    return
                conn.send(("plugged", None))
            elif command == "sample":
                interval = float(value)
                next_time = time.monotonic()
                conn.send(("sampling", None))
            elif command == "stop":
                interval = None
                conn.send(("samples", samples))
        elif interval is not None:
            now = time.monotonic_ns()
            counters = links.read_counters()
            for rank, rows in enumerate(samples):
                port_rx, port_tx = counters[f"port{rank}"]  # what the port receives is what the host sent
                rows.append((now, port_rx, port_tx))
            next_time = max(next_time + interval, time.monotonic())
