"""The examples run, at tiny sizes."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from tests.forked_scripts import run_forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 300
TINY = ("--width", "32", "--layers", "1", "--vocabulary", "64", "--length", "8")


RANKS = """
import runpy, sys
import tpkernels as tpk
def main():
    sys.argv = {argv!r}
    runpy.run_path(sys.argv[0], run_name="__main__")
if __name__ == "__main__":
    tpk.launch(main, {ranks})
"""


def run_on(ranks: int, example: str, *args: str, cwd: Path) -> str:
    script = cwd / "ranks.py"
    script.write_text(RANKS.format(argv=[str(EXAMPLES / example), *args], ranks=ranks))
    return run_forked(script)


@pytest.mark.gloo
@pytest.mark.slow("4 s of new interpreters")
def test_training_goes_on_from_its_snapshot_at_another_number_of_ranks(tmp_path: Path) -> None:
    first = run_on(2, "train.py", *TINY, "--steps", "2", "--folder", "run", cwd=tmp_path)
    assert re.findall(r"^step (\d+): loss \d", first, re.M) == ["1", "2"]
    rest = run_on(1, "train.py", *TINY, "--steps", "3", "--folder", "run", cwd=tmp_path)
    assert re.findall(r"^step (\d+): loss \d", rest, re.M) == ["3"]
    assert sorted(path.name for path in tmp_path.joinpath("run").iterdir()) == ["step-2", "step-3"]


@pytest.mark.gloo
def test_shapes_are_checked_and_timed(tmp_path: Path) -> None:
    sizes = ("--tokens", "64", "--width", "32", "--hidden", "64", "--repeats", "3")
    output = run_on(2, "my_shapes.py", *sizes, cwd=tmp_path)
    assert re.findall(r"^(\w+) +\d+\.\d{3} ms", output, re.M) == ["torch", "unfused", "auto"]


@pytest.mark.gloo
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    shutil.copy(EXAMPLES / script.name, script)
    last = run_forked(script).strip().splitlines()[-1]
    differences = ast.literal_eval(last[last.index("[") :])
    assert len(differences) == 2 and all(0 <= difference < 1e-5 for difference in differences)
