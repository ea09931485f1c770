"""``python -m tests.nemesis``: random faults at random moments of calls, set-up and saving, on ranks of this machine.

Exit code 1 if a promise was broken; each such schedule is printed with its seed, and as JSON for ``--schedule``.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.nemesis import disk, network
from tests.nemesis.judge import problems
from tests.nemesis.play import NotPlayed, play
from tests.nemesis.schedules import BACKENDS, PLACES, WORKS, Schedule, draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis", description=__doc__)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, help="of the run (by default a fresh one, which is printed)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="schedules by their own seeds")
    parser.add_argument("--schedule", help="one schedule as JSON, as printed for a failure")
    parser.add_argument("--repeat", type=int, default=1, help="how often each is played")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--timeout", type=float, default=2.0, help="of the groups, in seconds")
    parser.add_argument("--slack", type=float, default=0.3, help="seconds that a busy machine may add to an error")
    parser.add_argument("--at-once", type=int, default=1, help="schedules that are played side by side")
    given = parser.parse_args()
    places = given.places.split(",")
    missing = network.unavailable()
    if missing is not None and "hosts" in places:
        places.remove("hosts")
        print(f"no hosts of their own: {missing}", flush=True)
    no_disks = disk.unavailable()
    if no_disks is not None:
        print(f"no full disks: {no_disks}", flush=True)
    run = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    seeds = given.only or range(run * 1_000_000, run * 1_000_000 + given.schedules)
    if given.schedule:
        schedules = [Schedule.from_json(given.schedule)]
    else:
        print(f"{len(seeds)} schedules, run {run}: --seed {run} repeats it", flush=True)
        choices = {"backends": given.backends.split(","), "places": places, "works": given.works.split(",")}
        full_disks = no_disks is None
        schedules = [draw(seed, **choices, timeout_s=given.timeout, full_disks=full_disks) for seed in seeds]
    return _play_all([one for one in schedules for _ in range(given.repeat)], given.slack, given.at_once)


def _play_all(schedules: list[Schedule], slack_s: float, at_once: int) -> int:
    start, tally, failed = time.monotonic(), Counter[str](), 0

    def judge(schedule: Schedule) -> tuple[Schedule, list[str], list[str]]:
        try:
            story = play(schedule)
        except NotPlayed as error:
            return schedule, [f"was not played: {error}"], []
        ends = [f"{end.kind} {end.failed.raised.kind if end.failed else ''}".strip() for end in story.ends.values()]
        return schedule, problems(schedule, story, slack_s), ends

    with ThreadPoolExecutor(at_once) as pool:
        for number, (schedule, wrong, ends) in enumerate(pool.map(judge, schedules), 1):
            tally.update(ends)
            if wrong:
                failed += 1
                print(f"{schedule.in_words()}\n  --schedule '{schedule.to_json()}'")
                print("".join(f"  BROKEN: {one}\n" for one in wrong), flush=True)
            seconds = time.monotonic() - start
            print(
                f"{number} of {len(schedules)}, {failed} failed, {seconds / number:.1f} s each",
                file=sys.stderr,
                flush=True,
            )
    print(f"{len(schedules)} schedules in {seconds:.0f} s, {failed} failed; ranks: {dict(tally.most_common())}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
