"""Layers, options and the ranks that tests run on.

Layers are marks: `cpu` (no process group), `gloo` (real local ranks), `netns` (ranks in network namespaces; root),
`gpu`, `multi_gpu`. A layer that this machine cannot run is skipped with the reason. `--full` asks for full counts
(`full` fixture, `sample` mark) where a test by default takes a sample, and for tests that do not run otherwise (`full`
mark). `--slow` asks for those that no change lands without, and that a run between two edits leaves out (`slow` mark):
CI runs them. A case that is named on the command line runs.

Tests see no GPU, whatever machine they run on, but for those of tests/gpu, which run by themselves: `pytest tests/gpu`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tpkernels.launching import local_ranks as launch_module
from tpkernels.measure import netlab
from tpkernels.testing import spawn
from tpkernels.testing.spawn import Pools, fork_server

pytest_plugins = ["pytester"]  # for the tests of this file

# For a run of many tests: what `fork_server` imports, so that no rank imports it again. A rank that does takes long: an
# import sets off collections of garbage, and each of them writes to all objects of the fork and so copies its memory.
PRELOADED = [
    "torch",
    "torch.distributed",
    "tpkernels.sharding",
    spawn.__name__,
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    # What compiling in a rank imports: two seconds.
    "torch._dynamo.backends.common",
    "torch._inductor.pattern_matcher",
    "torch._decomp.decompositions_for_jvp",
    # What the modules of tests import: it was a third of the CPU time of those that use the ranks of `ranks`.
    "pytest",
    "tpkernels.testing.cases",
    "tpkernels.testing.references",
    "torch.distributed.tensor.debug",  # what `spawn` clears
    "tests.integrations.keras",  # chooses the backend of
    "keras",
    "peft",
    "transformers.trainer",
]

UNMEASURED = {"TPKERNELS_CALIBRATE": "0"}
"""Each new group of each test would measure its costs, and choose otherwise on a busy machine."""

GPU_TESTS = Path(__file__).parent / "gpu"
LAYERS = {
    "cpu": "no process group",
    "gloo": "two to four real ranks on this machine over gloo",
    "netns": "ranks in network namespaces joined by rate-limited links; needs root",
    "gpu": "one CUDA device",
    "multi_gpu": "at least two CUDA devices",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full counts where tests by default take a sample")
    parser.addoption("--slow", action="store_true", help="also the tests that are left to CI")


def pytest_configure(config: pytest.Config) -> None:
    if not wants_gpus(config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for this process and all that it starts: `tpk.init()` would take one
    for name, meaning in LAYERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "full(reason): runs with --full only; what it costs, or what stands for it")
    config.addinivalue_line("markers", "slow(reason): runs with --slow or --full only, and so in CI; what it costs")
    config.addinivalue_line("markers", "sample(count): without --full, only so many of the test's cases run")
    if hasattr(config, "workerinput"):  # of pytest-xdist
        os.setpgrp()  # tests look into their process group for what is left
        torch.set_num_threads(1)  # several workers share the cores: threads that wait for each other only spin


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # it finds no garbage in what is imported, and takes a fifth of the time of that


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()


def wants_gpus(arguments: Iterable[str]) -> bool:
    """Whether all that was asked for is of tests/gpu."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    return bool(paths) and all(path.is_relative_to(GPU_TESTS) for path in paths)


def missing_for(layer: str) -> str | None:
    """Why this machine cannot run a layer, or None."""
    if layer == "netns":
        return netlab.unavailable_reason()
    if layer in ("gpu", "multi_gpu"):
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        needed = 2 if layer == "multi_gpu" else 1
        if devices < needed:
            hidden = "; `pytest tests/gpu` looks for them" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else ""
            return f"needs {needed} CUDA device(s), found {devices}{hidden}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left_out = set(not_sampled(item for item in items if item.nodeid not in config.args))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        for item in items:
            if (marker := item.get_closest_marker("full")) and item.nodeid not in config.args:
                item.add_marker(pytest.mark.skip(reason=f"--full: {marker.args[0]}"))
            marker = item.get_closest_marker("slow")
            if marker and not config.getoption("--slow") and item.nodeid not in config.args:
                item.add_marker(pytest.mark.skip(reason=f"--slow: {marker.args[0]}"))
    wanted = [layer for layer in LAYERS if any(item.get_closest_marker(layer) for item in items)]
    reasons = {layer: missing_for(layer) for layer in wanted}
    for item in items:
        for layer, reason in reasons.items():
            if reason and item.get_closest_marker(layer):
                item.add_marker(pytest.mark.skip(reason=reason))


def not_sampled(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of tests marked with `sample(count)` that are not among the first and those evenly spread behind it."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("sample")
        assert marker is not None
        (count,) = marker.args
        kept = {index * len(same) // count for index in range(count)}
        yield from (item for index, item in enumerate(same) if index not in kept)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """True when the run asks for full counts."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session", autouse=True)
def preloaded(request: pytest.FixtureRequest) -> None:
    """In a run of many tests the fork server imports more. A fixture, so that what its ranks print is captured."""
    if hasattr(request.config, "workerinput"):
        fork_server().set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(3).run(fn, *args)` runs fn on three persistent ranks and returns their results."""
    pools = Pools(limit=4, forked=True, environment=UNMEASURED)  # of one to four ranks: none starts twice
    yield pools
    pools.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` starts ranks in milliseconds, as `ranks` does: for tests of anything but how ranks start."""
    monkeypatch.setattr(launch_module, "new_interpreters", fork_server)
