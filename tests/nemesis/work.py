"""What the processes of a trial do: ranks make calls, set groups up and save; another process may serve the store.

Each word that a rank says to the player carries the time at which it happened: "ready", then "done", "error" (a
`Failed`), or "wrong" (words). A rank that has raised then lives on, or leaves, as its schedule says.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tests.nemesis import network
from tests.nemesis.schedules import Schedule
from tests.reliability.calls import CALLS, WrongOutput, make_all
from tests.reliability.crew import Raised, caught
from tpkernels.comm import agreement, liveness
from tpkernels.launching.rank_process import MASTER_ADDR, Link

__all__ = ["WIDTH", "Failed", "Progress", "rank_main", "store_main"]

SETTLE_S = 60.0
WIDTH = 16  # of the model that is saved


@dataclass(frozen=True)
class Failed:
    """An error, and the call that raised it: its name, and when it was made."""

    raised: Raised
    what: str
    start: float


class Progress:
    """When each rank has made its last call, in a file that all processes of a trial map."""

    def __init__(self, path: Path, size: int, rank: int = 0) -> None:
        self.rank = rank
        with path.open("a+b") as file:
            file.truncate(8 * size)
            self._map = mmap.mmap(file.fileno(), 8 * size)

    def note(self, at: float) -> None:
        struct.pack_into("d", self._map, 8 * self.rank, at)

    def last(self, rank: int) -> float:
        return float(struct.unpack_from("d", self._map, 8 * rank)[0])


_at_work: Progress


class _Failure(Exception):
    def __init__(self, failed: Failed, at: float) -> None:
        self.failed, self.at = failed, at


def store_main(link: Link, schedule: Schedule, switch: str | None, log: str) -> None:
    """Serve the store until the end of the trial."""
    _begin(log)
    store = _serve(link, schedule.size, switch)
    link.hear()
    del store


def rank_main(
    link: Link,
    rank: int,
    schedule: Schedule,
    switch: str | None,
    folder: str,
    disk: str,
    log: str,
    sabotage: Callable[[], None] | None = None,
) -> None:
    """disk: where the ranks save. sabotage: puts a fault into the product, when the rank is ready."""
    _begin(log)
    store = _serve(link, rank, switch) if schedule.store == rank else None
    if store is None and switch is not None:
        _join(rank, switch)
    host, port = link.hear(SETTLE_S)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=SETTLE_S))  # type: ignore[attr-defined]
    group = _group(schedule, rank, store)
    global _at_work
    _at_work = Progress(Path(folder) / "progress", schedule.size, rank)
    work = WORKS[schedule.work](group, rank, schedule, Path(disk))
    dist.barrier()
    if sabotage is not None:
        sabotage()
    link.say("ready")
    go_at = link.hear(SETTLE_S)
    _set_clocks(schedule, rank, go_at)
    time.sleep(max(0.0, go_at - time.monotonic()))
    try:
        work(go_at + schedule.duration_s)
    except _Failure as failure:
        link.say("error", failure.failed, failure.at)
        if not schedule.lingers:
            os._exit(0)  # at once, like a rank of a job that has failed
    except WrongOutput as wrong:
        link.say("wrong", str(wrong))
    else:
        link.say("done")
    link.hear()  # whoever has come to the end waits for the player's


def _begin(path: str) -> None:
    """What c10d says of connections that end belongs to the trial; and times are the library's, not those of others."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)


def _join(host: int, switch: str) -> None:
    network.join(host, switch)
    # All hosts are this machine: without this, /proc would tell of the processes of the others.
    liveness._host = lambda: f"host {host}"  # type: ignore[assignment]


def _serve(link: Link, host: int, switch: str | None) -> Any:
    if switch is not None:
        _join(host, switch)
    name = MASTER_ADDR if switch is None else network.address(host)
    store = dist.TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SETTLE_S))  # type: ignore[attr-defined]
    link.say("serves", (name, store.port))
    return store


def _group(schedule: Schedule, rank: int, store: Any) -> Any:
    """The group that makes the calls. Snapshots are saved by all ranks of the job: there it is the default group."""
    limit = timedelta(seconds=schedule.timeout_s)
    saves = schedule.work == "saving"
    patience = limit if saves else timedelta(seconds=SETTLE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=schedule.size, timeout=patience)
    return dist.group.WORLD if saves else dist.new_group(timeout=limit)


def _set_clocks(schedule: Schedule, rank: int, go_at: float) -> None:
    """The clock of the day, as Python tells it, jumps; of what C++ reads nothing is changed here."""
    real = time.time
    for fault in schedule.faults:
        if fault.kind == "clock" and fault.target == (rank,):

            def jump(by: float = fault.size) -> None:
                time.time = lambda: real() + by

            timer = threading.Timer(max(0.0, go_at + fault.at_s - time.monotonic()), jump)
            timer.daemon = True
            timer.start()


# ---------------------------------------------------------------- work

Work = Callable[[float], None]


@contextmanager
def _call(what: str) -> Iterator[None]:
    """One call that may fail: with which error, and how long it took to."""
    start = time.monotonic()
    _at_work.note(start)

    def again() -> None:
        raise error

    try:
        yield
    except WrongOutput:
        raise
    except Exception as error_:
        error = error_
        raised, at = caught(again)  # which lets through what no rank may raise
        assert raised is not None
        raise _Failure(Failed(raised, what, _at_work.last(_at_work.rank)), at) from error_


def _set_up(group: Any, rank: int, schedule: Schedule, folder: Path) -> Work:
    return lambda until: _make_calls(group, rank, schedule, until)


def _calls(group: Any, rank: int, schedule: Schedule, folder: Path) -> Work:
    make_all(group, rank, schedule.size, 0, schedule.backend)
    _enough(group, False, schedule)
    return lambda until: _make_calls(group, rank, schedule, until)


def _make_calls(group: Any, rank: int, schedule: Schedule, until: float) -> None:
    """Calls of every op, again and again, and each time one that the ranks have to agree on first."""
    for salt in range(10**9):
        for name, call in CALLS.items():
            with _call(name):
                call(group, rank, schedule.size, salt, schedule.backend)
        with _call("a new signature"):
            _new_signature(group, rank, schedule, salt)
        with _call("the end"):
            if _enough(group, time.monotonic() >= until, schedule):
                return


def _new_signature(group: Any, rank: int, schedule: Schedule, salt: int) -> None:
    x = torch.full((1 + salt % 50, 2 + salt // 50 % 500), float(rank + salt % 3))
    y = tpk.all_reduce(x, group, implementation=_collective(schedule))
    expected = float(sum(range(schedule.size)) + schedule.size * (salt % 3))
    if y.shape != x.shape or not bool((y == expected).all()):
        raise WrongOutput(f"all_reduce of a new shape on rank {rank}, salt {salt}: {y.flatten()[:4].tolist()}")


def _enough(group: Any, mine: bool, schedule: Schedule) -> bool:
    """Whether the time of any rank is over, by an all-reduce: all ranks end after the same call."""
    late = tpk.all_reduce(torch.full((1, 1), float(mine)), group, implementation=_collective(schedule))
    value = float(late[0, 0])
    if value not in range(schedule.size + 1):
        raise WrongOutput(f"the number of ranks whose time is over is {value}")
    return value > 0


def _collective(schedule: Schedule) -> str:
    return "unfused" if schedule.backend == "chunked" else schedule.backend  # nothing to overlap with


def _saving(group: Any, rank: int, schedule: Schedule, folder: Path) -> Work:
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
    tpk.parallelize(model, mesh, {"0": "column", "1": "row"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _note_exchanges()
    _save(model, optimizer, folder, 0)

    def work(until: float) -> None:
        for step in range(1, 10**9):
            with _call("save"):
                _save(model, optimizer, folder, step)
            with _call("the end"):
                if _enough(group, time.monotonic() >= until, schedule):
                    return

    return work


def _note_exchanges() -> None:
    """A save is many calls, with work between them: an error counts from the last."""
    original = agreement.exchange_records

    def exchange_records(*given: Any, **options: Any) -> Any:
        _at_work.note(time.monotonic())
        return original(*given, **options)

    agreement.exchange_records = exchange_records


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    """Everything in the files of a step is its number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    tpk.save_snapshot(model, optimizer, folder / f"step-{step}", extra={"step": step})
    tpk.save_pretrained(model, folder / f"export-{step}", max_file_bytes=2048)


WORKS: dict[str, Callable[[Any, int, Schedule, Path], Work]] = {"set-up": _set_up, "calls": _calls, "saving": _saving}
