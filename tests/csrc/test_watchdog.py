"""The core's watchdog under sanitizers: groups that come and go while processes die, and what must not be ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.builds import built_once
from tests.csrc.exercises import CPU, compile_one, link, run

pytestmark = pytest.mark.cpu

HERE = Path(__file__).parent
UNITS = (CPU / "watchdog.cpp", CPU / "segment.cpp", HERE / "watchdog_exercise.cpp")
HEADERS = tuple(CPU / name for name in ("watchdog.h", "segment.h", "sleep.h"))
THREAD = "-O1 -g -fsanitize=thread".split()
ADDRESS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all".split()
WATCHDOG = "watchdog.cpp"

FAULTS = {
    "a call is ended at once": {"std::max(death, since) + grace_s": "std::max(death, since)"},
    "calls of living ranks are ended": {"death == 0.0 || since == 0.0": "since == 0.0"},
    "any socket with the number is shut down": {"cookie_of(mine.get()) == connection.cookie": "true"},
}


def _program(name: str, flags: list[str], edits: dict[str, str]) -> Path:
    def make(folder: Path) -> None:
        objects = []
        for unit in UNITS:
            source = unit
            if unit.name == WATCHDOG and edits:
                text = unit.read_text()
                for old, new in edits.items():
                    assert old in text, f"{WATCHDOG} has no {old!r} any more: seed this fault anew"
                    text = text.replace(old, new)
                source = folder / WATCHDOG
                source.write_text(text)
            objects.append(compile_one(source, folder, [*flags, f"-I{CPU.parent}"]))
        link(folder / "watchdog", objects, [*flags, "-pthread"])

    return built_once(f"watchdog-{name}", [*UNITS, *HEADERS], (flags, edits), make) / "watchdog"


def _check_clean(program: Path, rounds: int) -> None:
    done = run([str(program), "4", str(rounds)], TSAN_OPTIONS="halt_on_error=1:exitcode=66")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), done.stderr


@pytest.mark.slow("4 s: compiles with sanitizers")
def test_the_watchdog_races_with_nobody_and_ends_what_it_should(full: bool) -> None:
    _check_clean(_program("thread", THREAD, {}), 2000 if full else 100)


@pytest.mark.full("the same program without the races, which the run under ThreadSanitizer sees")
def test_the_watchdog_uses_memory_as_it_should() -> None:
    _check_clean(_program("address", ADDRESS, {}), 2000)


@pytest.mark.full("one compilation each")
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_of_the_watchdog_is_caught(name: str) -> None:
    program = _program(f"fault-{list(FAULTS).index(name)}", THREAD, FAULTS[name])
    done = run(["timeout", "30", str(program), "4", "100"], TSAN_OPTIONS="halt_on_error=1:exitcode=66")
    assert done.returncode != 0, name
    assert done.returncode == 124 or re.search("data race|WRONG", done.stderr), done.stderr
