"""The kernels compile for sm_80, sm_90 and sm_100 without a GPU: no spills, known resources, the right barriers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.builds import built_once
from tests.kernels.ahead_of_time import in_table
from tests.kernels.index_lint import narrow_products
from tests.kernels.interpreter import mutant
from tests.kernels.ptx_lint import lint

pytestmark = pytest.mark.cpu

KERNELS = {file.name: file.read_text() for file in (Path(__file__).parents[2] / "tpkernels" / "kernels").glob("*.py")}
REPOSITORY = Path(__file__).parents[2]
TABLES: dict[str, dict[str, list[int]]] = json.loads((Path(__file__).parent / "resources.json").read_text())["kernels"]
"""Of each Triton, what its assembler gave each variant."""
# Barriers (also waits for tensor cores) and instructions of a step along K; instructions that a tile adds: bias, GELU
# and rounding of 128 numbers a thread are 2,500, with erf from the library they were 4,850.
STEP_LIMIT = {"sm_80": (3, 220), "sm_90": (5, 200), "sm_100": (4, 220)}
TILE_LIMIT = 3500
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


@cache
def compilations() -> Path:
    """Triton's own cache, where what it has compiled lies under a hash of source, options and compiler."""
    files = [*sorted((REPOSITORY / "tpkernels" / "kernels").glob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    return built_once("triton", files, version("triton"), lambda folder: folder.joinpath("cache").mkdir()) / "cache"


def compiled(folder: Path, *arguments: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(compilations())
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time", *arguments]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


COMPILES = pytest.mark.slow("19 s: compiles every kernel for four architectures")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, full: bool) -> dict[str, Any]:
    """Of the kernels, and of those with a fault; one process, which imports Triton, for all."""
    folder = tmp_path_factory.mktemp("kernels")
    packages = ["tpkernels.kernels", *mutants(folder, tuple(FAULTS) if full else FEW)]
    return compiled(folder, *(["--full"] if full else []), "--packages", *packages)


@COMPILES
def test_no_kernel_spills_or_needs_more_shared_memory_than_there_is(report: dict[str, Any]) -> None:
    rows = report["packages"]["tpkernels.kernels"]
    assert {name.split("-")[1] for name in rows} == set(SHARED_LIMIT)
    for name, row in rows.items():
        assert (row["stack"], row["local"]) == (0, 0), name
        assert row["shared"] <= SHARED_LIMIT[name.split("-")[1]], name


@COMPILES
def test_resources_are_those_of_the_table(report: dict[str, Any]) -> None:
    """After a change that is meant, with each Triton of the table: python -m tests.kernels.ahead_of_time --write"""
    table = TABLES.get(report["triton"])
    if table is None:  # another compiler, other registers; the limits above hold for all
        pytest.skip(f"resources.json has no Triton {report['triton']}, only {', '.join(TABLES)}")
    found = {name: in_table(row) for name, row in report["packages"]["tpkernels.kernels"].items()}
    assert found == {name: table[name] for name in found}


@COMPILES
def test_the_table_is_complete(report: dict[str, Any], full: bool) -> None:
    rows = set(report["packages"]["tpkernels.kernels"])
    for triton, table in TABLES.items():
        assert rows == set(table) if full else rows < set(table), triton


def drains(row: dict[str, Any]) -> bool:
    """Whether a tile begins with an empty pipeline: loads beside those of its steps, barriers of its own for them."""
    return bool(row["work"]["tile"]["loads"] or row["work"]["tile"]["mbarriers"])


@COMPILES
def test_the_flat_loop_keeps_its_pipeline_full_from_tile_to_tile(report: dict[str, Any]) -> None:
    rows = {name: row for name, row in report["packages"]["tpkernels.kernels"].items() if row["work"] is not None}
    flat = [name for name, row in rows.items() if row["loop"] == "flat"]
    assert {name.split("-")[1] for name in flat} == set(SHARED_LIMIT)
    assert [name for name in flat if drains(rows[name])] == []
    assert drains(rows["gather-sm_90-bfloat16-gelu-bias-nested"]), "the loop of before no longer fails this"


def too_much(name: str, row: dict[str, Any]) -> bool:
    step, tile = row["work"]["step"], row["work"]["tile"]
    barriers, instructions = STEP_LIMIT[name.split("-")[1]]
    return bool(step["barriers"] > barriers or step["instructions"] > instructions or tile["instructions"] > TILE_LIMIT)


OVER = {"gather-sm_90-bfloat16-swiglu-bias-flat"}
"""For two weights a flat loop waits for each product on sm_90 (ptxas C7515), and so is not taken there."""
ADDRESSES = {"gather-sm_100-bfloat16-swiglu-preactivation-pointers"}
"""Reads two weights without descriptors: 234 instructions a step (262 with Triton 3.6), most of them addresses."""
WAITS_MORE = {"3.6.0": {"gather-sm_90-float8_e4m3fn-row-bias", "scatter-sm_90-float8_e4m3fn-row-staging_fp32"}}
"""6 barriers a step: on sm_90 Triton 3.6 has one more than 3.7 in every loop with descriptors."""


@COMPILES
def test_steps_and_tiles_execute_no_more_than_they_may(report: dict[str, Any]) -> None:
    """Whatever the compiler."""
    rows = {name: row for name, row in report["packages"]["tpkernels.kernels"].items() if row["work"] is not None}
    flat = [name for name, row in rows.items() if row["loop"] == "flat"]
    over = {name for name in flat if too_much(name, rows[name])}
    assert over <= OVER | ADDRESSES | WAITS_MORE.get(report["triton"], set())
    if report["triton"] in TABLES:
        assert over >= OVER, "config.py need not take the nested loop for two weights on sm_90 any more"


@COMPILES
def test_waits_acquire_releases_follow_a_barrier_and_offsets_of_rows_have_64_bits(report: dict[str, Any]) -> None:
    assert {name: row["lint"] for name, row in report["packages"]["tpkernels.kernels"].items() if row["lint"]} == {}
    assert report["probes"]["tpkernels.kernels"] == []


@COMPILES
def test_results_are_stored_sixteen_bytes_at_a_time(report: dict[str, Any]) -> None:
    for name, row in report["packages"]["tpkernels.kernels"].items():
        assert row["wide_stores"] > 0, name
        if name.startswith("scatter"):  # a gather stores its failure record word by word
            assert row["narrow_stores"] == 0, name


LOOP = "for _ in tl.range(0, tl.cdiv(num_tiles - tl.program_id(0), programs) * num_steps"
SPECIALISED = {
    "all_gather_matmul.py": "gather-sm_90-bfloat16-gelu-bias",
    "matmul_reduce_scatter.py": "scatter-sm_90-bfloat16-staging_fp32",
}


@COMPILES
def test_warp_specialisation_changes_nothing_on_sm_90(report: dict[str, Any], tmp_path: Path, full: bool) -> None:
    """As tiles.py says of the Tritons that were tried. Once one does: a further choice of loop for a GPU to compare."""
    if not full:
        pytest.skip("--full: compiles two kernels once more")
    change = {file: (LOOP + "):", LOOP + ", warp_specialize=True):") for file in SPECIALISED}
    package = mutant(tmp_path, "specialised", change)
    found = compiled(tmp_path, "--only", *SPECIALISED.values(), "--packages", package)["packages"][package]
    plain = report["packages"]["tpkernels.kernels"]
    assert found == {name: plain[name] for name in SPECIALISED.values()}


# ---------------------------------------------------------------- the lint can fail

GATHER, SCATTER, PROBE = "gather-sm_90-bfloat16-bias-m8", "scatter-sm_90-bfloat16-staging_fp32-m8", "probe"


def wait_at_the_end_of_the_tile_before() -> tuple[str, str]:
    """Right in the order of the source, and when interpreted: a tile ends with the wait for the next one.

    But nothing that is loaded depends on that wait, and in the pipelined loop the loads come steps before it.
    """
    flat = KERNELS["all_gather_matmul.py"].partition("    else:\n        num_steps")[2].partition("\n\n\n")[0]
    start = flat.index("a_places, b_places, b_up_places, ready, arrived = _begin(")
    call = flat[start : flat.index("# fmt: skip", start)].rstrip()
    waits = call.replace("a_places, b_places, b_up_places", "a, b, b_up")
    waits = " ".join(line.strip() for line in waits.replace("tile, ready", "TILE, ready").splitlines())
    late = flat.replace(
        call, call.replace("ready, arrived =", "x, y =").replace("arrived, whole", "arrived * 0, whole")
    )
    first, after = waits.replace("TILE", "tl.program_id(0)"), waits.replace("TILE", "done + programs")
    late = late.replace("        for _ in tl.range", f"        {first}\n        for _ in tl.range")
    sums = "                acc, acc_up = no_sums(BLOCK_M, BLOCK_N, DUAL)"
    assert sums in late
    late = late.replace(sums, f"{sums}\n                if done + programs < num_tiles:\n                    {after}")
    return flat, late


FAULTS = {
    "relaxed_wait": (GATHER, ('signal, 0, sem="acquire"', 'signal, 0, sem="relaxed"'), "a wait does not acquire"),
    "wait_within_the_gpu": (
        GATHER, ('signal, 0, sem="acquire", scope="sys"', 'signal, 0, sem="acquire", scope="gpu"'), "nothing is waited",
    ),
    "no_proxy_fence": (GATHER, ("fence.proxy.async.global; ", ""), "without a proxy fence"),
    "no_barrier": (PROBE, ("_barrier()\n    _store_release", "_store_release"), "a store reaches a release"),
    "rows_behind_no_wait": (
        GATHER, ("row, rows = behind(arrived, row), behind(arrived, rows)", ""), "from a place that is behind no wait",
    ),
    "wait_at_the_end_of_the_tile_before": (GATHER, wait_at_the_end_of_the_tile_before(), "behind a constant"),
    "relaxed_signal": (SCATTER, ("@p st.release.sys", "@p st.relaxed.sys"), "nothing is announced with release"),
    "relaxed_count": (SCATTER, ('"acq_rel", scope="gpu") + 1', '"relaxed", scope="gpu") + 1'), "is not counted"),
    "rows_in_32_bits": (
        SCATTER, ("(row + m_offsets).to(tl.int64)[:, None] * stride", "(row + m_offsets)[:, None] * stride"),
        "a stride is multiplied in 32 bits",
    ),
}  # fmt: skip


FEW = ("relaxed_wait", "no_barrier", "rows_in_32_bits")
"""Without --full."""


def mutants(folder: Path, names: tuple[str, ...]) -> list[str]:
    """Packages with these faults, and the variant of each that shows it."""
    packages = []
    for name in names:
        variant, change, _ = FAULTS[name]
        file = next(file for file in ("signals.py", "tiles.py", "all_gather_matmul.py") if change[0] in KERNELS[file])
        packages.append(f"{mutant(folder, f'mutant_{name}', {file: change})}={variant}")
    return packages


@COMPILES
@pytest.mark.parametrize("name", FAULTS)
def test_the_lint_finds_a_seeded_fault(report: dict[str, Any], name: str, full: bool) -> None:
    if not full and name not in FEW:
        pytest.skip("--full: compiles one kernel more")
    variant, _, said = FAULTS[name]
    package = f"mutant_{name}"
    found = report["probes"][package] if variant == PROBE else report["packages"][package][variant]["lint"]
    assert any(said in sentence for sentence in found), found


def test_the_lint_follows_a_stride_to_its_product() -> None:
    text = """tt.func public @kernel(%x: !tt.ptr<bf16>, %stride_x: i32 loc("stride_x"(#loc))) {
      %places = tt.splat %stride_x : i32 -> tensor<16x1xi32> loc(#loc1)
      %places_1 = arith.muli %rows, %places : tensor<16x1xi32> loc(#loc2)
      %wide = arith.extsi %stride_x : i32 to i64 loc(#loc3)
      %far = arith.muli %wide, %row : i64 loc(#loc4)
    """
    assert narrow_products(text) == ["a stride is multiplied in 32 bits: arith.muli %rows, %places : tensor<16x1xi32>"]


def test_the_lint_finds_a_load_by_threads_that_have_not_acquired() -> None:
    head = "ld.global.sys.acquire.b32 %r1, [ %rd1 + 0 ];\n@%p1 bra $L__BB0_2;\n"
    tail = "$L__BB0_2:\nld.global.b32 %r2, [ %rd2 + 0 ];\nret;\n"
    options = {"waits": True, "announces": False, "descriptors": False}
    assert lint(head + "bar.sync 0;\n" + tail, **options) != []  # the branch goes around the barrier
    assert lint("bar.sync 0;\n" + head.replace("@%p1 bra", "bar.sync 0;\nbra") + tail, **options) == []
