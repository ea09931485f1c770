"""The compiled core under the sanitizers, with ranks as threads, and races seeded into its source that must be caught.

`races.cpp` plays random calls with stragglers, and the failures.  ThreadSanitizer needs `-fno-builtin`: a `memcpy` that
the compiler expands in place is not seen.  The faults are edits of a temporary copy of the source: an edit whose text
is no longer there fails, so that it can not silently test nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builds import built_once, compiler, sources
from tests.csrc import exercises

pytestmark = pytest.mark.cpu

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
CHANNEL, COLLECTIVES, SIGNALS, RACES = "cpu/channel.cpp", "cpu/collectives.cpp", "common/signals.h", "races.cpp"
FLAGS = "-std=c++17 -g -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -Wpedantic -Wconversion -Werror".split()
THREAD = ("-O0", "-fsanitize=thread", "-fno-builtin")
ADDRESS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# An all-reduce in pieces of 512 bytes, so that the sizes of races.cpp have several.
SMALL_PIECES = {"kPieceBytes = [^;]+;": "kPieceBytes = 512;", "kShareBytes = [^;]+;": "kShareBytes = 256;"}


@dataclass(frozen=True)
class Fault:
    edits: dict[str, dict[str, str]]
    command: str = "calls 3 50 1 400"
    found_by: str = "data race|WRONG"
    flags: tuple[str, ...] = THREAD


RACE = "WARNING: ThreadSanitizer: data race"
FAULTS = {
    "the epoch is published without release": Fault(
        {SIGNALS: {"store(epoch, std::memory_order_seq_cst)": "store(epoch, std::memory_order_relaxed)"}}, found_by=RACE
    ),
    "the epoch is read without acquire": Fault(
        {SIGNALS: {"counter.load(std::memory_order_acquire)": "counter.load(std::memory_order_relaxed)"}}, found_by=RACE
    ),
    "all calls use the same slot": Fault({CHANNEL: {"(call() & 1) * kSlotBytes": "0 * kSlotBytes"}}),
    "all calls use the same header": Fault(
        {
            CHANNEL: {
                "header = state(rank_).headers[call() & 1]": "header = state(rank_).headers[0]",
                "theirs = state(peer).headers[call_ & 1]": "theirs = state(peer).headers[0]",
            }
        }
    ),
    "one peer is not waited for": Fault({CHANNEL: {"step < size_; ++step) wait(": "step < size_ - 1; ++step) wait("}}),
    "the header is never checked": Fault(
        {CHANNEL: {"(agreed_ & bit(peer)) == 0": "false"}}, "failures 3 50 1 0", "WRONG: (no|unexpected) "
    ),
    "the poison is readable without release": Fault(
        {CHANNEL: {"store(kReadable, std::memory_order_seq_cst)": "store(kReadable, std::memory_order_relaxed)"}},
        "failures 3 50 1 0",
        RACE,
    ),
    "the sum of an all-reduce is read before its signal": Fault(
        {RACES: {"static_cast<Epoch>(channel_.size())": "static_cast<Epoch>(channel_.size() - 1)"}}
    ),
    "a piece of an all-reduce is staged where the last one is read": Fault(
        {COLLECTIVES: {"kPiecesInFlight = 2;": "kPiecesInFlight = 1;"}}
    ),
    "a list of ranks is too short": Fault(
        {COLLECTIVES: {"std::array<ConstRows, kMaxRanks> parts;": "std::array<ConstRows, 2> parts;"}},
        found_by="AddressSanitizer",
        flags=ADDRESS,
    ),
}


class Tree:
    """A copy of the source, its objects, and the program built from them; what is in the folder already stays."""

    def __init__(self, folder: Path, flags: Sequence[str], like: Tree | None = None) -> None:
        self.folder, self.flags = folder, flags
        self.compiler = compiler()
        is_new = not (folder / "csrc").exists()
        if is_new:
            shutil.copytree(CSRC if like is None else like.folder / "csrc", folder / "csrc")
        if is_new and like is None:
            shutil.copy(HERE / RACES, folder / "csrc" / RACES)
            for constant, small in SMALL_PIECES.items():
                self.edit(COLLECTIVES, constant, small)
        units = [path.relative_to(folder / "csrc").as_posix() for path in (folder / "csrc" / "cpu").glob("*.cpp")]
        self.units = [RACES, *sorted(units)]
        self.objects = {unit: folder / (unit.replace("/", "_") + ".o") for unit in self.units}

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / "csrc" / file
        text, count = re.subn(old, new, path.read_text())
        assert count > 0, f"{file} has no {old!r} any more: seed this fault anew"
        path.write_text(text)

    def compile(self, units: Sequence[str]) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in pool.map(self._compile, units):
                assert done.returncode == 0, done.stderr

    def _compile(self, unit: str) -> subprocess.CompletedProcess[str]:
        source, include = str(self.folder / "csrc" / unit), f"-I{self.folder / 'csrc'}"
        return _run([self.compiler, *FLAGS, *self.flags, include, "-c", source, "-o", str(self.objects[unit])])

    def link(self) -> None:
        objects = [str(self.objects[unit]) for unit in self.units]
        done = _run([self.compiler, *self.flags, *objects, "-pthread", "-o", str(self.folder / "races")])
        assert done.returncode == 0, done.stderr

    def play(self, command: str) -> subprocess.CompletedProcess[str]:
        return _run([str(self.folder / "races"), *command.split()])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    options = "halt_on_error=1:exitcode=66:abort_on_error=0"
    environment = {**os.environ, "TSAN_OPTIONS": options, "ASAN_OPTIONS": "exitcode=66", "UBSAN_OPTIONS": options}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def _built(name: str, flags: Sequence[str]) -> Tree:
    """With objects that others have compiled.

    The vector code of x86 is never run here (races.cpp forces the portable one), but has to be there: as the
    installation has it. Under AddressSanitizer all kernels are those of the program of random cases.
    """
    if flags == ADDRESS:
        others = exercises.built("exercise", exercises.SANITIZED).parent
        lent = [others / f"{kernel.stem}.o" for kernel in exercises.KERNELS]
    else:
        others = exercises.of_the_installation().parent
        lent = [others / f"{kernel.stem}.o" for kernel in exercises.KERNELS if _has_vectors(kernel)]

    def make(folder: Path) -> None:
        tree = Tree(folder, flags)
        of_units = {f"cpu/{path.stem}.cpp": path for path in lent}
        for unit, path in of_units.items():
            shutil.copy(path, tree.objects[unit])
        tree.compile([unit for unit in tree.units if unit not in of_units])
        tree.link()

    return Tree(_built_once(name, flags, lent, None, make), flags)


def _has_vectors(kernel: Path) -> bool:
    return kernel.stem.rpartition("_")[2] in exercises.ISA_FLAGS


def _built_once(
    name: str, flags: Sequence[str], lent: Sequence[Path], edits: object, make: Callable[[Path], None]
) -> Path:
    return built_once(name, [*sources(CSRC), HERE / RACES, *lent], (flags, FLAGS, SMALL_PIECES, edits), make)


@pytest.fixture(scope="module")
def with_thread_sanitizer() -> Tree:
    return _built("races-thread", THREAD)


@pytest.fixture(scope="module")
def with_address_sanitizer() -> Tree:
    return _built("races-address", ADDRESS)


COMMANDS = (
    "calls 2 50 1 1500",  # spinning
    "calls 4 0 3 800",  # sleeping
    "calls 2 0 4 800",
    "failures 3 0 6 0",
    "calls 3 50 2 1500",
    "failures 4 50 7 0",
    "failures 2 50 5 0",
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow("10 s: compiles the core with sanitizers")
def test_thread_sanitizer_reports_nothing(command: str, with_thread_sanitizer: Tree, full: bool) -> None:
    _check_clean(with_thread_sanitizer, command, full)


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow("10 s: compiles the core with sanitizers")
def test_address_and_undefined_behaviour_sanitizers_report_nothing(
    command: str, with_address_sanitizer: Tree, full: bool
) -> None:
    _check_clean(with_address_sanitizer, command, full)


def _check_clean(tree: Tree, command: str, full: bool) -> None:
    scenario, ranks, spin_us, seed, calls = command.split()
    for repeat in range(10 if full else 1):
        done = tree.play(f"{scenario} {ranks} {spin_us} {int(seed) + 100 * repeat} {int(calls) * (4 if full else 1)}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow("4 s: compiles the core with sanitizers")
def test_a_seeded_fault_is_caught(name: str, with_thread_sanitizer: Tree, with_address_sanitizer: Tree) -> None:
    fault = FAULTS[name]
    clean = with_thread_sanitizer if fault.flags == THREAD else with_address_sanitizer

    def make(folder: Path) -> None:
        tree = Tree(folder, fault.flags, like=clean)
        for file, replacements in fault.edits.items():
            for old, new in replacements.items():
                tree.edit(file, re.escape(old), new)
        # Only channel.cpp uses what the faults in signals.h change.
        changed = {CHANNEL if file == SIGNALS else file for file in fault.edits}
        tree.objects |= {unit: clean.objects[unit] for unit in tree.units if unit not in changed}
        tree.compile(sorted(changed))
        tree.link()

    seeded = _built_once(f"races-fault-{list(FAULTS).index(name)}", fault.flags, [], fault.edits, make)
    done = Tree(seeded, fault.flags).play(fault.command)
    assert done.returncode != 0 and re.search(fault.found_by, done.stderr), f"{name}: {done.returncode}, {done.stderr}"
