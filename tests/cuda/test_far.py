"""Offsets past 2^31 elements, or bytes: the reducer, the calls in one kernel, and the copy pipeline, under g++.

Rows lie so far apart that 32 bits do not count the way to them, in memory of which only the rows are there.  Each place
where an offset is computed has a seeded fault: the same in 32 bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.builds import built_once, compiler, sources
from tests.cuda import emulator
from tests.cuda.test_ranks import CSRC, HERE, ONE_SHOT, REDUCE, TWO_SHOT, copy_of_the_source, run
from tests.kernels.sparse_memory import sparse_matrix
from tpkernels.backends.symmetric.cuda_group import Call, Group, Pipeline
from tpkernels.backends.symmetric.cuda_native import PAD_BYTES, STATE_BYTES, Chunk, CudaError, Library, Steps

pytestmark = pytest.mark.cpu

DEVICE = "csrc/cuda/device.h"
# File, and the offset that becomes one of 32 bits.
FAULTS = {
    "rows of partials": (REDUCE, "+ at.row * stride"),
    "rows of sums": (REDUCE, "+ at.row * job.out_stride"),
    "a rank's part of the peers' slots": (ONE_SHOT, "group.rank * job.slot_elements"),
    "a rank's part of its own slot, summed": (ONE_SHOT, "+ rank * job.slot_elements + element;"),
    "a rank's part of its own slot, copied": (ONE_SHOT, "+ rank * job.slot_elements;"),
    "a shard's place in the whole": (ONE_SHOT, "+ job.starts[rank];"),
    "an owner's part": (TWO_SHOT, "owner * job.slot_elements;"),
    "partials for their owner": (TWO_SHOT, "+ group.rank * job.slot_elements;"),
    "partials of a rank": (TWO_SHOT, "+ rank * job.slot_elements + place;"),
    "sums that leave": (TWO_SHOT, "(group.world_size + group.rank) * job.slot_elements"),
    "sums that have come": (TWO_SHOT, "+ (group.world_size + owner) * job.slot_elements;"),
    "packs of a share": (ONE_SHOT, "begin + unit * kPack<T>);"),
    "elements of a share": (ONE_SHOT, "begin + packs * kPack<T> + (unit - packs));"),
}


FLAGS = "-std=c++20 -O0 -Wall -Werror -pthread".split()


@pytest.fixture(scope="module")
def program() -> Path:
    return built_once("cuda-far", sources(CSRC, HERE), (FLAGS, FAULTS), build_with_faults) / "seeded" / "far"


def build_with_faults(parent: Path) -> None:
    folder = copy_of_the_source(parent / "seeded")
    for number, (file, offset) in enumerate(FAULTS.values(), 1):
        path = folder / file
        text = path.read_text()
        assert offset in text, f"{file} has no {offset!r} any more: seed this fault anew"
        sign, value = ("+ ", offset[2:]) if offset.startswith("+") else ("", offset)
        end = value[len(value.rstrip(";")) :]
        value = value.rstrip(";")
        if value.count(")") > value.count("("):  # of the call around it
            value, end = value[:-1], ")" + end
        narrow = f"{sign}(seeded_fault == {number} ? static_cast<std::int32_t>({value}) : {value}){end}"
        path.write_text(text.replace(offset, narrow))
    device = folder / DEVICE
    device.write_text(device.read_text().replace("#pragma once", "#pragma once\ninline int seeded_fault = 0;", 1))
    out = folder / "far"
    includes = [f"-I{folder / 'csrc'}", f"-I{folder}"]
    done = run([compiler(), *FLAGS, *includes, str(folder / "far.cpp"), "-o", str(out)])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow("3 s")
def test_kernels_reach_past_two_to_the_31_elements(program: Path) -> None:
    done = run([str(program), "0"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize("name", FAULTS)
def test_an_offset_of_32_bits_is_caught(program: Path, name: str) -> None:
    done = run([str(program), str(list(FAULTS).index(name) + 1)])
    assert done.returncode != 0 and "WRONG" in done.stderr, (done.returncode, done.stderr)


# --- copies -----------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 3, 24


def copy_rows(library: Library, strides: tuple[int, int]) -> None:
    """Rows of fp32, `strides` elements apart at the target and at the source."""
    pad, state = torch.zeros(PAD_BYTES, dtype=torch.uint8), torch.zeros(STATE_BYTES, dtype=torch.uint8)
    group = Group(library, rank=0, pads=[pad.data_ptr()], state=state.data_ptr(), timeout_s=5.0, max_blocks=3)
    pipeline = Pipeline(library, 1)
    target, source = (sparse_matrix(ROWS, COLUMNS, stride, torch.float32) for stride in strides)
    source.copy_(torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS))
    chunk = Chunk(
        target=target.data_ptr(), source=source.data_ptr(), rows=ROWS, row_bytes=4 * COLUMNS,
        target_stride_bytes=4 * strides[0], source_stride_bytes=4 * strides[1],
    )  # fmt: skip
    Call(library, group, pipeline, [chunk], op=1).run(Steps.BEGIN | Steps.MOVE | Steps.JOIN, stream=0)
    pipeline.close()
    group.close()
    assert torch.equal(target, source)


FAULTS_OF_COPIES: dict[str, tuple[type[Exception], tuple[str, str]]] = {
    "a pitch that CUDA refuses": (CudaError, ("kMaxPitch = INT32_MAX", "kMaxPitch = INT64_MAX")),
    "rows in 32 bits": (
        AssertionError,
        ("+ row * chunk.target_stride_bytes", "+ static_cast<std::int32_t>(row * chunk.target_stride_bytes)"),
    ),
}


@pytest.mark.parametrize("name", FAULTS_OF_COPIES)
def test_a_fault_of_the_copies_is_caught(name: str, full: bool) -> None:
    """Without faults they are tested where the library is built anyway: tests/backends/test_symmetric.py."""
    if not full:
        pytest.skip("--full: builds the library once more")
    error, (old, new) = FAULTS_OF_COPIES[name]
    library = Library(emulator.library({"pipeline.cu": {old: new}}))
    with pytest.raises(error):
        copy_rows(library, (2**29, COLUMNS))
