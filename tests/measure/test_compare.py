"""`bench --compare`: changes beyond noise, of ratios within each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpkernels.measure import compare, report
from tpkernels.measure.report import CaseResult
from tpkernels.measure.timing import Measurement

pytestmark = pytest.mark.cpu


def run(slowdown: float = 1.0, **medians_ms: float) -> CaseResult:
    rounds = (0.98, 1.0, 1.01, 1.03)
    times = {
        name: Measurement(name, tuple(one * value * slowdown / 1e3 for one in rounds))
        for name, value in medians_ms.items()
    }
    return CaseResult("all_gather_matmul", "8x16x32", "bf16", 2, times, 64, "chunked", 4)


def said(tmp_path: Path, old: CaseResult, new: CaseResult) -> list[str]:
    file = tmp_path / "old.json"
    report.write_json(file, report.describe_environment({}), [old])
    return compare.lines(file, report.describe_environment({}), [new])


def test_a_slower_way_is_flagged_and_a_slower_machine_is_not(tmp_path: Path) -> None:
    old = run(gemm=80, unfused=160, chunked=110, auto=112)
    assert said(tmp_path, old, run(3.0, gemm=80, unfused=160, chunked=110, auto=112))[1:] == [
        "2 of 2 within noise or 5%"
    ]
    lines = said(tmp_path, old, run(3.0, gemm=80, unfused=160, chunked=150, auto=90))
    assert lines[1].split()[:2] == ["slower", "-27%"] and "chunked" in lines[1]
    assert lines[2].split()[:2] == ["faster", "+24%"] and "1.43x -> 1.78x" in lines[2]
    assert lines[3] == "0 of 2 within noise or 5%"


def test_a_change_within_the_spread_of_either_run_is_noise(tmp_path: Path) -> None:
    old, new = run(unfused=160, chunked=110), run(unfused=160, chunked=120)
    wild = tuple(one * 0.11 for one in (0.6, 0.9, 1.1, 1.4))
    old.times["chunked"] = Measurement("chunked", wild)
    assert said(tmp_path, old, new)[1:] == ["1 of 1 within noise or 5%"]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    other = run(unfused=160, chunked=110)
    other.shape = "1x1x1"
    assert said(tmp_path, other, run(unfused=160, chunked=110))[1:] == ["no problem was measured in both runs"]
    for content in ("{", "[]", '{"results": [{"op": 1}]}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=r"not a result file of `tpkernels bench --json`"):
            compare.read(tmp_path / "bad.json")
    file = tmp_path / "elsewhere.json"
    environment = report.describe_environment({})
    report.write_json(file, {**environment, "hardware": {**environment["hardware"], "cores": 96}}, [other])
    assert any(line.startswith("differs: cores: 96 then") for line in compare.lines(file, environment, [other]))
