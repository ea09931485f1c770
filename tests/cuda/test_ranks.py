"""The CUDA kernels' own source as ordinary threads: ranks run it on each other's memory under ThreadSanitizer.

`ranks.cpp` plays random calls with stragglers, and the failures; every result is compared with an exact sum.  Faults
are edits of a temporary copy of the source, all in one program that is told which of them to have: an edit whose text
is no longer there fails, so that it can not silently test nothing.  What only hardware shows (the memory model of PTX,
copy engines, streams) is not shown here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builds import built_once, compiler, sources
from tpkernels import partition

pytestmark = pytest.mark.cpu

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Device functions of csrc/cuda are inline; -fno-builtin, because ThreadSanitizer does not see an expanded memcpy.
FLAGS = "-std=c++20 -g1 -O0 -fsanitize=thread -fno-builtin -ffp-contract=off -Wall -Wextra -Wconversion -Werror".split()
DEVICE, PROTOCOL, NUMBERS = "csrc/cuda/device.h", "csrc/cuda/protocol.h", "csrc/cuda/numbers.h"
SYNC = "csrc/cuda/sync_kernels.h"
TWO_SHOT = "csrc/cuda/two_shot_kernels.h"
NORM = "csrc/cuda/one_shot_norm_kernels.h"
ONE_SHOT, REDUCE, RANKS = "csrc/cuda/one_shot_kernels.h", "csrc/cuda/reduce_kernel.h", "ranks.cpp"
RACE, ANY = "WARNING: ThreadSanitizer: data race", "data race|WRONG"


@dataclass(frozen=True)
class Fault:
    """Text and what it becomes; FAULT is true in the run that has this fault."""

    file: str
    edits: dict[str, str]
    command: str = "calls 3 1 60 0"
    found_by: str = ANY


FAULTS = {
    "a signal is stored without release": Fault(
        DEVICE,
        {"__atomic_store_n(word, value, __ATOMIC_RELEASE);": "FAULT ? __atomic_store_n(word, value, __ATOMIC_RELAXED)"
         " : __atomic_store_n(word, value, __ATOMIC_RELEASE);"},
        found_by=RACE,
    ),
    "a signal is loaded without acquire": Fault(
        DEVICE,
        {"return __atomic_load_n(word, __ATOMIC_ACQUIRE);": "return FAULT ? __atomic_load_n(word, __ATOMIC_RELAXED)"
         " : __atomic_load_n(word, __ATOMIC_ACQUIRE);"},
        found_by=RACE,
    ),
    "a block signals before all its threads have written": Fault(
        PROTOCOL, {"    sync_block();\n": "    if (!FAULT) sync_block();\n"}, found_by=RACE
    ),
    "a slot is written while peers read its last call": Fault(
        PROTOCOL, {"last_use[slot] + 1": "last_use[slot] + (FAULT ? 0 : 1)"}
    ),
    "an all-reduce does not note that it used its slot": Fault(
        ONE_SHOT, {"    group.state->last_use[slot] =": "    if (!FAULT) group.state->last_use[slot] ="},
        "calls 3 1 60 0 30000 1",
    ),
    "flags of the last call are still raised": Fault(SYNC, {"flags[i] = 0;": "flags[i] = FAULT ? flags[i] : 0;"}),
    "a copy is announced before it was made": Fault(
        RANKS, {"                job.flags = me.flags.data() + chunk;": "if (FAULT) job.signal_peers = bit(owner), "
                "job.signal_chunk = chunk;\n                job.flags = me.flags.data() + chunk;"}
    ),
    "one peer is not waited for": Fault(
        PROTOCOL, {"(sources >> peer & 1) == 0)": "(sources >> peer & 1) == 0 || (FAULT && peer == 0))"}
    ),
    "ranks are summed in another order": Fault(
        NUMBERS, {"at(0)": "at(FAULT ? world_size - 1 : 0)", "at(rank + j)": "at(rank + j - (FAULT ? 1 : 0))"},
        found_by="WRONG",
    ),
    "the sum is rounded before the bias": Fault(
        NUMBERS,
        {"if (bias != nullptr) sum[i] =": "if (FAULT) narrow(sum[i], rounded.element[i]);\n"
         "if (FAULT) sum[i] = widen(rounded.element[i]);\nif (bias != nullptr) sum[i] ="},
        found_by="WRONG",
    ),
    "ties are rounded up": Fault(
        NUMBERS, {"0x7fffu + ((bits >> 16) & 1u)": "(FAULT ? 0x8000u : 0x7fffu + ((bits >> 16) & 1u))"},
        "numbers", "WRONG"
    ),
    "a signal overtakes what was multicast": Fault(
        ONE_SHOT, {"end);\n    if (multicasts) fence": "end);\n    if (multicasts && !FAULT) fence"}
    ),
    "a multicast goes to the part of another rank": Fault(
        ONE_SHOT, {"job.multicast + place,": "job.multicast + (FAULT ? job.slot_elements + element : place),"}
    ),
    "a rank that multicasts does not wait for its slot": Fault(
        ONE_SHOT, {"if (!wait_slot_of_block(": "if (!(FAULT && multicasts) && !wait_slot_of_block("},
        "calls 3 1 60 0 30000 1",
    ),
    "sums are announced before they are made": Fault(
        TWO_SHOT, {"current, others, partials);\n    if (!wait": "current, others, partials);\n"
                   "    if (FAULT) signal_chunk_of_block(group, current, others, sums);\n    if (!wait"}
    ),
    "partials are summed before they are there": Fault(
        TWO_SHOT, {"!wait_chunk_of_block(group, current, others, partials": "!FAULT && !wait_chunk_of_block(group, "
                   "current, others, partials"}
    ),
    "sums go where partials are": Fault(
        TWO_SHOT, {"there = (group.world_size + group.rank)": "there = ((FAULT ? 0 : group.world_size) + group.rank)"}
    ),
    "sums that were multicast are overtaken": Fault(
        TWO_SHOT, {"});\n    if (multicasts) fence_aliases();\n    signal": "});\n    if (multicasts && !FAULT) "
                   "fence_aliases();\n    signal"}
    ),
    "a row's squares are summed before all threads have said theirs": Fault(
        NORM, {"room[thread] = mine;\n    sync_block();": "room[thread] = mine;\n    if (!FAULT) sync_block();"}
    ),
    "a row is normalised by its first lane": Fault(
        NORM, {"lane < lanes; ++lane)": "lane < (FAULT ? 1 : lanes); ++lane)"}
    ),
    "the residual is added after the squares": Fault(
        NORM, {"const float wide = widen(sum.element[i]);": "const float wide = widen((FAULT ? y : sum).element[i]);"}
    ),
    "the first block to leave ends the call of all": Fault(
        ONE_SHOT, {"!= num_blocks() - 1)": "!= (FAULT ? 0 : num_blocks() - 1))"}
    ),
    "the first chunk is summed before it is there": Fault(REDUCE, {"chunk = -1;": "chunk = FAULT ? 0 : -1;"}),
    "epochs are compared without the wrap": Fault(
        PROTOCOL,
        {"reached(epoch_of(seen), target)": "(FAULT ? epoch_of(seen) >= target : reached(epoch_of(seen), target))"},
        "calls 3 1 60 0xfffffff0 2000",
    ),
    "every wait that fails writes the record": Fault(
        PROTOCOL, {"if (!claim_device(&group.state->failed)) return;": "if (!claim_device(&group.state->failed) &&"
                   " !FAULT) return;"}, "failures 4 1"
    ),
    "peers are not told of a failure": Fault(
        PROTOCOL, {"group.pads[peer] + kPoison,": "group.pads[peer] + (FAULT ? 1 : kPoison),"}, "failures 2 1", "WRONG"
    ),
    "a peer's failure is not looked for after the last read": Fault(
        PROTOCOL, {"if (poison == 0) return;": "if (poison == 0 || FAULT) return;"}, "failures 2 1", "WRONG"
    ),
    "fingerprints are not compared": Fault(
        PROTOCOL, {"|| seen == current)": "|| seen == current || FAULT)"}, "failures 2 1", "WRONG"
    ),
}  # fmt: skip


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:abort_on_error=0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def copy_of_the_source(folder: Path) -> Path:
    for part in ("common", "cuda"):
        shutil.copytree(CSRC / part, folder / "csrc" / part)  # makes the folder, too
    for file in HERE.glob("*.[ch]*"):
        shutil.copy(file, folder)
    return folder


def seed_faults(folder: Path) -> None:
    for number, fault in enumerate(FAULTS.values(), 1):
        path = folder / fault.file
        text = path.read_text()
        for old, new in fault.edits.items():
            assert old in text, f"{fault.file} has no {old!r} any more: seed this fault anew"
            text = text.replace(old, new.replace("FAULT", f"(seeded_fault == {number})"))
        path.write_text(text)
    device, ranks = folder / DEVICE, folder / RANKS
    device.write_text(device.read_text().replace("#pragma once", "#pragma once\ninline int seeded_fault = 0;", 1))
    opening = "int main(int argc, char** argv) {"
    assert opening in ranks.read_text()
    ranks.write_text(ranks.read_text().replace(opening, f"{opening}\nseeded_fault = std::atoi(argv[--argc]);"))


def build(folder: Path) -> None:
    includes = [f"-I{folder / 'csrc'}", f"-I{folder}"]
    done = run([compiler(), *FLAGS, *includes, str(folder / RANKS), "-pthread", "-o", str(folder / "ranks")])
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def seeded() -> Path:
    """The program with all the edits; its last argument says which is at work, and 0 is none."""

    def make(folder: Path) -> None:
        seed_faults(copy_of_the_source(folder))
        build(folder)

    return built_once("cuda-ranks-seeded", sources(CSRC, HERE), (FLAGS, FAULTS), make) / "ranks"


@pytest.fixture(scope="module")
def program(seeded: Path, full: bool) -> list[str]:
    """The command of the program as it is; without --full the one with the edits, and none of them at work.

    Compiling the sources a second time costs more than all the commands.
    """
    if not full:
        return [str(seeded), "0"]
    as_it_is = built_once("cuda-ranks", sources(CSRC, HERE), FLAGS, lambda folder: build(copy_of_the_source(folder)))
    return [str(as_it_is / "ranks")]


COMMANDS = (
    "numbers",
    "calls 1 4 60 0",
    "calls 2 1 80 0",
    "calls 3 2 50 0xffffffd0",
    "calls 4 3 12 0x7fffffe0",
    "calls 3 1 60 0",  # that of most faults
    "calls 8 5 15 0",
    "calls 3 4 30 9 30000 1",  # every call uses the slot of the last one
    "failures 2 1",
    "failures 3 2",
    "failures 4 3",
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow("18 s of a race detector")
def test_ranks_race_nowhere_and_sum_exactly(command: str, program: list[str], full: bool) -> None:
    scenario, *numbers = command.split()
    for repeat in range(10 if full and numbers else 1):
        with_seed = [numbers[0], str(int(numbers[1]) + 100 * repeat), *numbers[2:]] if numbers else []
        done = run([program[0], scenario, *with_seed, *program[1:]])
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), done.stderr


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow("3 s: that the race detector can fail")
def test_a_seeded_fault_is_caught(name: str, seeded: Path) -> None:
    fault, number = FAULTS[name], list(FAULTS).index(name) + 1
    done = run([str(seeded), *fault.command.split(), str(number)])
    assert done.returncode != 0 and re.search(fault.found_by, done.stderr), f"{done.returncode}, {done.stderr}"


@pytest.mark.full("without --full the program of the faults is the one that is said to race nowhere")
@pytest.mark.parametrize("command", ["calls 3 1 60 0", "calls 3 1 60 0xfffffff0", "failures 4 1"])
def test_it_is_the_fault_that_is_caught(command: str, seeded: Path) -> None:
    """The commands of the faults pass where none of the edits is at work."""
    done = run([str(seeded), *command.split(), "0"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", ""), done.stderr


def test_chunks_are_cut_as_in_python(tmp_path: Path) -> None:
    """csrc/common/schedule.h against tpkernels/partition.py."""
    program = """
#include <cstdio>
#include "common/schedule.h"
int main() {
    for (int rows = 0; rows < 40; ++rows)
        for (int count = 1; count < 12; ++count) {
            for (int chunk = 0; chunk <= count; ++chunk)
                std::printf("%lld ", static_cast<long long>(tpk::chunk_begin(rows, count, chunk)));
            for (int row = 0; row < rows; ++row)
                std::printf("%lld ", static_cast<long long>(tpk::chunk_of_row(rows, count, row)));
            for (int step = 1; step < count; ++step) std::printf("%d ", tpk::peer_after(rows % count, count, step));
        }
}
"""
    tmp_path.joinpath("schedule.cpp").write_text(program)
    binary = str(tmp_path / "schedule")
    built = run(
        [compiler(), "-std=c++17", "-Wall", "-Werror", f"-I{CSRC}", str(tmp_path / "schedule.cpp"), "-o", binary]
    )
    assert built.returncode == 0, built.stderr
    expected: list[int] = []
    for rows in range(40):
        for count in range(1, 12):
            ranges = partition.chunk_ranges(rows, count)
            expected += [start for start, _ in ranges] + [rows]
            expected += [chunk for chunk, (start, stop) in enumerate(ranges) for _ in range(start, stop)]
            expected += partition.peers_after(rows % count, count)
    assert [int(number) for number in run([binary]).stdout.split()] == expected
