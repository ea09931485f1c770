"""All executions of small concurrent programs that the C++ memory model allows, by exhaustive search.

Memory is, per location, the list of messages written to it in modification order.  A thread has a view: the oldest
message it may still read of each location.  A release store puts its thread's view into its message, an acquire load
takes the message's view over; relaxed accesses do neither.  That is the operational ("view") account of
release/acquire (Kang et al., "A Promising Semantics for Relaxed-Memory Concurrency", POPL 2017) without promises, so it
does not show loads that come before older stores of other locations to be *performed*; stores delayed past later loads,
which Dekker's pattern is about, it shows.  Sequentially consistent accesses are, in addition, ordered as they are
executed: such a load does not read what is older than what such an access to that location wrote or read before.

One writer per location, except for read-modify-writes, which always read the last message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Add", "Check", "Outcome", "Read", "Spin", "Write", "explore", "sleeping", "signalling"]


class Order(Enum):
    RELAXED = "relaxed"
    ACQ_REL = "release or acquire"
    SEQ_CST = "sequentially consistent"


@dataclass(frozen=True)
class Write:
    place: int
    value: int
    order: Order = Order.RELAXED


@dataclass(frozen=True)
class Add:
    """Read-modify-write."""

    place: int
    value: int
    order: Order


@dataclass(frozen=True)
class Spin:
    """Load until the value is at least this."""

    place: int
    at_least: int
    order: Order


@dataclass(frozen=True)
class Check:
    """A plain read that must find this value and no other: of a slot or header."""

    place: int
    value: int


@dataclass(frozen=True)
class Read:
    """Load into the thread's registers."""

    place: int
    order: Order


Step = Write | Add | Spin | Check | Read
View = tuple[int, ...]
Message = tuple[int, View]
Thread = tuple[int, View, tuple[int, ...]]  # next step, view, registers
# Memory, threads, and the newest message of each location that a sequentially consistent access wrote or read.
State = tuple[tuple[tuple[Message, ...], ...], tuple[Thread, ...], View]


@dataclass(frozen=True)
class Outcome:
    states: int
    violation: str | None  # the first wrong read
    stuck: bool  # a state in which threads wait for ever
    registers: frozenset[tuple[tuple[int, ...], ...]]  # by thread, of all ends


def explore(programs: Sequence[Sequence[Step]], places: int) -> Outcome:
    zero: View = (0,) * places
    start: State = (tuple(((0, zero),) for _ in range(places)), tuple((0, zero, ()) for _ in programs), zero)
    seen, pending = {start}, [start]
    stuck, ends = False, set()
    while pending:
        state = pending.pop()
        threads = state[1]
        running = [index for index, (step, _, _) in enumerate(threads) if step < len(programs[index])]
        if not running:
            ends.add(tuple(registers for _, _, registers in threads))
        progressed = False
        for index in running:
            step = programs[index][threads[index][0]]
            for following in _run(state, index, step):
                if isinstance(following, str):
                    return Outcome(len(seen), f"thread {index}, {step}: {following}", stuck, frozenset(ends))
                progressed = True
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
        stuck = stuck or (bool(running) and not progressed)
    return Outcome(len(seen), None, stuck, frozenset(ends))


def _run(state: State, index: int, step: Step) -> list[State | str]:
    """Every state that may follow, or what is wrong."""
    memory, threads, agreed = state
    position, view, registers = threads[index]
    place, messages = step.place, memory[step.place]
    following: list[State | str] = []

    is_ordered = not isinstance(step, Check) and step.order is Order.SEQ_CST

    def go_on(view: View, registers: tuple[int, ...] = registers, message: Message | None = None) -> None:
        common = _at(agreed, place, view[place]) if is_ordered else agreed
        thread = (position + 1, view, registers)
        changed = memory
        if message is not None:
            changed = (*memory[:place], (*messages, message), *memory[place + 1 :])
        following.append((changed, (*threads[:index], thread, *threads[index + 1 :]), common))

    if isinstance(step, Write | Add):
        before = view
        if isinstance(step, Add) and step.order is not Order.RELAXED:
            before = _join(before, messages[-1][1])
        after = _at(before, place, len(messages))
        value = messages[-1][0] + step.value if isinstance(step, Add) else step.value
        alone = _at((0,) * len(memory), place, len(messages))
        go_on(after, message=(value, alone if step.order is Order.RELAXED else after))
        return following
    if isinstance(step, Check):
        for value, _ in messages[view[place] :]:
            if value != step.value:
                following.append(f"saw {value}")
        go_on(view)
        return following
    for time in range(max(view[place], agreed[place] if is_ordered else 0), len(messages)):
        value, carried = messages[time]
        after = _at(view, place, time)
        if step.order is not Order.RELAXED:
            after = _join(after, carried)
        if isinstance(step, Read):
            go_on(after, (*registers, value))
        elif value >= step.at_least:
            go_on(after)
    return following


def _join(a: View, b: View) -> View:
    return tuple(map(max, a, b))


def _at(view: View, place: int, time: int) -> View:
    return (*view[:place], max(view[place], time), *view[place + 1 :])


def signalling(
    ranks: int, calls: int, store: Order = Order.ACQ_REL, load: Order = Order.ACQ_REL, slots: int = 2
) -> Outcome:
    """Ranks that gather: each call writes header and slot, publishes the epoch, and reads those of all peers."""

    def place(rank: int, call: int, part: int) -> int:
        return ranks + (rank * slots + call % slots) * 2 + part

    programs: list[list[Step]] = []
    for me in range(ranks):
        program: list[Step] = []
        for call in range(1, calls + 1):
            program += [Write(place(me, call, 0), call), Write(place(me, call, 1), call), Write(me, call, store)]
            for peer in (rank for rank in range(ranks) if rank != me):
                program += [
                    Spin(peer, call, load),
                    Check(place(peer, call, 0), call),
                    Check(place(peer, call, 1), call),
                ]
        programs.append(program)
    return explore(programs, ranks + 2 * ranks * slots)


def sleeping(signaller: Order, waiter: Order, look_first: bool = False) -> bool:
    """Whether the signaller can miss the sleeper while the sleeper misses the epoch."""
    epoch, sleepers = 0, 1
    signal: list[Step] = [Write(epoch, 1, signaller), Read(sleepers, signaller)]
    wait: list[Step] = [Add(sleepers, 1, waiter), Read(epoch, waiter)]
    ends = explore([signal[::-1] if look_first else signal, wait], 2).registers
    return ((0,), (0,)) in ends
