"""Plays a schedule: starts its processes, strikes at its moments, and hears what became of each rank.

Owns: `play`, which returns a `Story`. Every wait is bounded; when it returns, nothing that it started is left.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.nemesis import network
from tests.nemesis.disk import Disk
from tests.nemesis.network import CUT, Network, Weather
from tests.nemesis.schedules import DISTURBANCES, STORE, Fault, Schedule
from tests.nemesis.snapshots import torn
from tests.nemesis.work import SETTLE_S, Failed, Progress, rank_main, store_main
from tpkernels import config
from tpkernels.launching.conversation import Conversation, NotSaid
from tpkernels.launching.local_ranks import pack_call
from tpkernels.launching.rank_process import RankSetup
from tpkernels.testing.spawn import fork_server

__all__ = ["End", "NotPlayed", "Story", "play"]

LAST_WORDS = ("done", "error", "wrong", "raised")
PATIENCE_S = 6.0
MOST_S = 120.0  # beyond the last fault, however busy the machine is
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TPKERNELS_CALIBRATE": "0"}


class NotPlayed(AssertionError):
    """The processes did not get as far as the first fault."""


@dataclass(frozen=True)
class End:
    """How a rank ended. kind: one of `LAST_WORDS`, "died" (by itself), "hangs", or "struck" (it was not to answer)."""

    kind: str
    at: float = 0.0
    failed: Failed | None = None
    text: str = ""


@dataclass
class Story:
    """What happened: the moments of the faults, how each rank ended, and snapshots that are neither whole nor none."""

    go_at: float
    struck: list[tuple[Fault, float, float | None]] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    logs: dict[int, str] = field(default_factory=dict)

    def stopped_for(self, rank: int, start: float, end: float) -> float:
        """Seconds between these moments in which this rank was stopped."""
        stops = [(a, b) for fault, a, b in self.struck if fault.kind == "stop" and fault.target == (rank,)]
        total, reached = 0.0, start
        for begin, over in sorted(stops, key=lambda span: span[0]):  # they may overlap
            until = end if over is None else min(over, end)
            total += max(0.0, until - max(begin, reached))
            reached = max(reached, until)
        return total


def play(
    schedule: Schedule,
    *,
    sabotage: Callable[[], None] | None = None,
    patience_s: float = PATIENCE_S,
    attempts: int = 3,
) -> Story:
    """Play it; on a machine so busy that ranks are late before the first fault, again.

    sabotage: what each rank calls when it is ready, to put a fault into the product. patience_s: beyond the time that
    an error may take; a rank whose call lasts longer hangs.
    """
    for _ in range(attempts - 1):
        with suppress(NotPlayed):
            return _play(schedule, sabotage, patience_s)
    return _play(schedule, sabotage, patience_s)


def _play(schedule: Schedule, sabotage: Callable[[], None] | None, patience_s: float) -> Story:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nemesis-")))
        switch = stack.enter_context(Network(folder, schedule.seed)) if schedule.place == "hosts" else None
        disk = stack.enter_context(Disk(folder / "disk", of_its_own=schedule.disk_fills()))
        player = _Player(schedule, folder, switch, disk, sabotage, patience_s)
        stack.callback(player.close)
        return player.play()


class _Player:
    def __init__(
        self,
        schedule: Schedule,
        folder: Path,
        switch: Network | None,
        disk: Disk,
        sabotage: Callable[[], None] | None,
        patience_s: float,
    ) -> None:
        self.schedule, self.folder, self.switch, self.disk = schedule, folder, switch, disk
        self.patience_s = patience_s
        path = None if switch is None else switch.path
        interface = "lo" if switch is None else network.INTERFACE
        environment = config.inherited() | _ENVIRONMENT | {"GLOO_SOCKET_IFNAME": interface}
        count = schedule.size + schedule.own_store
        calls = [
            pack_call(rank_main, (rank, schedule, path, str(folder), str(disk.path), self._log(rank), sabotage))
            for rank in range(schedule.size)
        ]
        if schedule.own_store:
            calls.append(pack_call(store_main, (schedule, path, self._log(schedule.size))))
        setups = [RankSetup(rank, environment, talks=True) for rank in range(count)]
        self.conversation = Conversation(setups, calls, fork_server())
        self.pids = [one.process.pid or 0 for one in self.conversation.ranks]
        self.killed: set[int] = set()
        self.lasting: Counter[tuple[str, tuple[int | str, ...]]] = Counter()

    def close(self) -> None:
        self.conversation.close()

    def _log(self, process: int) -> str:
        return str(self.folder / f"log-{process}")

    def _process(self, target: int | str) -> int:
        return self.schedule.size if target == STORE else int(target)

    def play(self) -> Story:
        ranks = range(self.schedule.size)
        host = self._process(self.schedule.store)
        try:
            (served,) = self.conversation.expect(("serves",), time.monotonic() + SETTLE_S, [host])
            for rank in ranks:
                self.conversation.tell(rank, served.value)
            self.conversation.expect(("ready",), time.monotonic() + SETTLE_S, ranks)
        except NotSaid as silence:
            raise NotPlayed(f"{silence}\n{self._logs()}") from None
        story = Story(go_at=time.monotonic() + 0.03)
        for rank in ranks:
            self.conversation.tell(rank, story.go_at)
        self._strike(story)
        self._hear_the_end(story)
        story.torn = torn(self.disk.path) if self.schedule.work == "saving" else []
        story.logs = self._logs()
        return story

    def _logs(self) -> dict[int, str]:
        found = {}
        for process in range(len(self.pids)):
            with suppress(FileNotFoundError):
                found[process] = Path(self._log(process)).read_text(errors="replace")[-2000:]
        return found

    # ---------------------------------------------------------------- faults

    def _strike(self, story: Story) -> None:
        """Every fault at its moment, and its end at its own; meanwhile ranks are heard."""
        moments: list[tuple[float, int, Fault, bool]] = []
        for number, fault in enumerate(self.schedule.faults):
            moments.append((story.go_at + fault.at_s, number, fault, True))
            if fault.lasts_s is not None:
                moments.append((story.go_at + fault.at_s + fault.lasts_s, number, fault, False))
        started: dict[int, float] = {}
        for moment, number, fault, begins in sorted(moments, key=lambda one: one[:2]):
            while (left := moment - time.monotonic()) > 0:
                self.conversation.listen(left)
            self._apply(fault, begins)
            now = time.monotonic()
            if begins:
                started[number] = now
                story.struck.append((fault, now, None))
            else:
                story.struck.remove((fault, started[number], None))
                story.struck.append((fault, started[number], now))

    def _apply(self, fault: Fault, begins: bool) -> None:
        self.lasting[fault.kind, fault.target] += 1 if begins else -1
        lasts = self.lasting[fault.kind, fault.target] > 0  # another one of this kind may end later
        if fault.kind == "kill":
            self.killed.add(self._process(fault.target[0]))
            self._signal(fault.target[0], signal.SIGKILL)
        elif fault.kind == "stop":
            self._signal(fault.target[0], signal.SIGSTOP if lasts else signal.SIGCONT)
        elif fault.kind == "full disk":
            self.disk.fill() if lasts else self.disk.empty()
        elif fault.kind != "clock":
            disturbed = DISTURBANCES.get(fault.kind)
            weather = CUT if disturbed is None else Weather(**disturbed)
            self._change_weather(fault, weather, begins)

    def _signal(self, target: int | str, number: int) -> None:
        process = self._process(target)
        if not self.conversation.ranks[process].has_ended():
            with suppress(ProcessLookupError):
                os.kill(self.pids[process], number)

    def _change_weather(self, fault: Fault, weather: Weather, begins: bool) -> None:
        assert self.switch is not None
        hosts = [self._process(target) for target in fault.target]
        everybody = range(len(self.pids))
        if fault.kind == "one way":
            pairs = [(hosts[0], hosts[1])]
        elif fault.kind == "isolate":
            pairs = [
                pair for other in everybody if other != hosts[0] for pair in ((hosts[0], other), (other, hosts[0]))
            ]
        else:
            pairs = [(a, b) for a in hosts for b in hosts if a != b]
        for sender, receiver in pairs:
            (self.switch.begin if begins else self.switch.end)(sender, receiver, weather)

    # ---------------------------------------------------------------- ends

    def _hear_the_end(self, story: Story) -> None:
        schedule = self.schedule
        stopped = {
            self._process(fault.target[0]) for fault, _, end in story.struck if fault.kind == "stop" and end is None
        }
        struck = (self.killed | stopped) & set(range(schedule.size))
        last = max([story.go_at + schedule.duration_s, *(end or start for _, start, end in story.struck)])
        progress, patience = (
            Progress(self.folder / "progress", schedule.size),
            1.1 * schedule.timeout_s + self.patience_s,
        )
        waiting = [rank for rank in range(schedule.size) if rank not in struck]
        while True:
            # A rank whose end of the connection is closed has said all that it will.
            said = self._said()
            mute = [r for r in waiting if r not in said and not self.conversation.ranks[r].says_no_more()]
            since = max([last, *(progress.last(rank) for rank in mute)])
            if not mute or time.monotonic() > since + patience or time.monotonic() > last + MOST_S:
                break
            self.conversation.listen(0.5)
        for rank in range(schedule.size):
            if rank in said:
                story.ends[rank] = said[rank]
            elif rank in struck:
                story.ends[rank] = End("struck")
            else:
                story.ends[rank] = self._silence(rank)

    def _said(self) -> dict[int, End]:
        found: dict[int, End] = {}
        for word in self.conversation.heard:
            if word.what in LAST_WORDS and word.rank not in found and word.rank < self.schedule.size:
                failed = word.value if isinstance(word.value, Failed) else None
                text = "" if word.value is None or failed else getattr(word.value, "details", str(word.value))
                found[word.rank] = End(word.what, word.at, failed, text)
        return found

    def _silence(self, rank: int) -> End:
        process = self.conversation.ranks[rank]
        if process.says_no_more():
            process.process.join(5.0)
            return End("died", text=f"exit code {process.process.exitcode}")
        process.ask_for_stack()
        _until(lambda: self._drained(rank), 3.0)
        return End("hangs", text=process.stuck("hangs").details)

    def _drained(self, rank: int) -> bool:
        process = self.conversation.ranks[rank]
        process.drain()
        return process.has_shown_stack()


def _until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
