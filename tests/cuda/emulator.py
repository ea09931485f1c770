"""The library of the CUDA kernels for a machine without a GPU: `csrc/cuda/*.cu` themselves, built by g++.

`emulated/cuda_runtime.h` stands in for CUDA's: streams are threads with queues, kernels are functions. Launches
(`kernel<<<...>>>(...)`, which g++ does not know) become calls; a few numbers become small, so that tiny tensors have
several blocks. An edit whose text is no longer there fails: the copy must follow the source.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.builds import built_once, compiler, sources
from tests.cuda.test_ranks import CSRC

HERE = Path(__file__).parent
FILE = "emulated.so"
# One thread per block, so that blocks need no barriers; several blocks for little data; polls that leave the core.
EDITS: Mapping[str, Mapping[str, str]] = {
    "numbers.h": {"kReduceThreads = 512": "kReduceThreads = 1"},
    "reduce_kernel.h": {"kSumThreads = 960": "kSumThreads = 1"},
    "one_shot.cu": {"kBytesPerBlock = 8192": "kBytesPerBlock = 256"},
    "device.h": {
        "kStrip = 2": "kStrip = 1",
        "std::this_thread::yield();": "std::this_thread::sleep_for(std::chrono::microseconds(30));",
    },
}
LAUNCH = re.compile(r"(\w+(?:<\w+(?:, \w+)?>)?)<<<(.+?), .+?, 0, as_stream\((.+?)\)>>>\((.+?)\);", re.DOTALL)
FLAGS = "-std=c++17 -O1 -shared -fPIC -pthread -fvisibility=hidden -Wall -Wextra -Wno-unused-function -Werror".split()


def library(edits: Mapping[str, Mapping[str, str]] | None = None) -> Path:
    """The library's file, with more edits (a seeded fault) if given."""
    name = "-".join(("emulated", *(edits or ())))
    made_of = (FLAGS, EDITS, LAUNCH.pattern, edits)
    return built_once(name, sources(CSRC, HERE), made_of, lambda folder: build(folder, edits)) / FILE


def build(folder: Path, edits: Mapping[str, Mapping[str, str]] | None) -> None:
    source = folder / "csrc"
    shutil.copytree(CSRC, source)
    for changes in (EDITS, edits or {}):
        for name, replacements in changes.items():
            path = source / "cuda" / name
            text = path.read_text()
            for old, new in replacements.items():
                assert old in text, f"csrc/cuda/{name} has no {old!r} any more: change this edit"
                text = text.replace(old, new)
            path.write_text(text)
    units = [HERE / "emulated" / "late.cpp"]
    for path in sorted(source.glob("cuda/*.cu")):
        text, count = LAUNCH.subn(
            r"emulated::launch(\2, as_stream(\3), [](auto... each) { \1(each...); }, \4);", path.read_text()
        )
        assert "<<<" not in text and (count > 0) == ("<<<" in path.read_text()), (
            f"{path.name}: a launch of another form"
        )
        unit = path.with_suffix(".cpp")
        # The runtime's stand-in knows device.h, as nvcc knows the vocabulary of device code.
        unit.write_text('#include "cuda/device.h"\n' + text)
        units.append(unit)
    includes = [f"-I{source}", f"-I{HERE / 'emulated'}", f"-I{HERE}"]
    done = subprocess.run(
        [compiler(), *FLAGS, *includes, *map(str, units), "-o", str(folder / FILE)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
