"""The verdict on a story: every rank has the right bits, or raised an error that names a faulty process in time."""

from __future__ import annotations

import errno
import os

from tests.nemesis.play import End, Story
from tests.nemesis.schedules import Schedule

__all__ = ["problems"]

KINDS = ("PeerLost", "CollectiveTimeout", "GroupPoisoned")
"""Errors that faults of processes and links may become; a GroupMismatch would say that the program is wrong."""
NO_SPACE = os.strerror(errno.ENOSPC)
FACTOR = 1.1


def problems(schedule: Schedule, story: Story, slack_s: float = 0.3) -> list[str]:
    """What breaks the promise; empty if nothing does. slack_s: what a busy machine may add to the time of an error."""
    found = [
        f"rank {rank} {what}"
        for rank, end in sorted(story.ends.items())
        for what in _of(rank, end, schedule, story, slack_s)
    ]
    return found + story.torn


def _of(rank: int, end: End, schedule: Schedule, story: Story, slack_s: float) -> list[str]:
    if end.kind in ("done", "struck"):
        return []
    if end.failed is None:
        return [f"{_WORDS[end.kind]}: {end.text}"]
    raised = end.failed.raised
    told = f"{raised.kind} of {list(raised.ranks)} in {end.failed.what}: {raised.text}"
    if schedule.must_pass():
        return [f"raised a false alarm: {told}"]
    if _had_no_room(end, schedule):
        return []
    if raised.kind not in KINDS:
        return [f"raised {told}"]
    found = [] if (blame := _blame(rank, end, schedule, story)) is None else [f"{blame}: {told}"]
    seconds = _took(rank, end, schedule, story)
    if seconds > FACTOR * schedule.timeout_s + slack_s:
        found.append(f"took {seconds:.2f} s of {schedule.timeout_s:g} s: {told}")
    return found


_WORDS = {
    "hangs": "hangs",
    "died": "died by itself",
    "wrong": "got wrong bits",
    "raised": "raised what it may not",
}


def _had_no_room(end: End, schedule: Schedule) -> bool:
    """Whether it says that a disk was full, as every rank does, whichever could not write."""
    if end.failed is None or not schedule.disk_fills():
        return False
    return end.failed.raised.kind == "ValueError" and NO_SPACE in end.failed.raised.text


def _blame(rank: int, end: End, schedule: Schedule, story: Story) -> str | None:
    """What is wrong with the ranks that an error names."""
    assert end.failed is not None
    raised, guilty = end.failed.raised, schedule.guilty(rank)
    if not schedule.lingers:  # whoever found the disk full and left is why the others did not hear of it
        guilty |= {other for other, one in story.ends.items() if one.at < end.at and _had_no_room(one, schedule)}
    if not raised.ranks:
        # A store that no rank serves has no number.
        return None if "store" in raised.text and schedule.store in guilty else "names nobody"
    named = set(raised.ranks)
    # Whoever has raised and left before is gone, too: to name it beside a culprit is no lie.
    left = {
        other
        for other, earlier in story.ends.items()
        if earlier.failed is not None and not schedule.lingers and earlier.at < end.at
    }
    struck = any(fault.kind == "stop" and rank in fault.target for fault in schedule.harmful())
    # One that was stopped finds that the others have gone, and need not know why.
    if not named <= guilty | left or not (named & guilty or struck):
        return "blames the innocent"
    if not all(str(one) in raised.text for one in named):
        return "does not name in words whom it blames"
    return None


def _took(rank: int, end: End, schedule: Schedule, story: Story) -> float:
    """Seconds from the call, or from the last of several faults, without those in which it was stopped."""
    assert end.failed is not None
    start = max(end.failed.start, story.go_at)
    before = [at for _, at, _ in story.struck if at < end.at]
    if len(before) > 1:
        start = max(start, *before)
    return end.at - start - story.stopped_for(rank, start, end.at)
