"""`tpkernels run --tp N script.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpkernels.cli import main

pytestmark = pytest.mark.gloo

SCRIPT = """
import sys
import beside
import torch
import tpkernels as tpk

mesh = tpk.init()
total = tpk.all_reduce(torch.ones(2), mesh["tp"])
if __name__ == "__main__":
    with open(f"{sys.argv[1]}/{mesh.get_rank()}", "w") as out:
        out.write(f"{total.tolist()} {sys.argv[2:]} {beside.HERE}")
    sys.exit(3 if "--fail" in sys.argv else None)
"""


@pytest.mark.usefixtures("forked")
def test_a_script_runs_on_every_rank_with_its_own_arguments(tmp_path: Path) -> None:
    tmp_path.joinpath("script.py").write_text(SCRIPT)
    tmp_path.joinpath("beside.py").write_text("HERE = 1")
    argv = ["run", "--tp", "2", str(tmp_path / "script.py"), str(tmp_path)]
    assert main([*argv, "--epochs", "3"]) == 0
    assert [tmp_path.joinpath(rank).read_text() for rank in "01"] == ["[2.0, 2.0] ['--epochs', '3'] 1"] * 2
    assert main([*argv, "--fail"]) == 3


@pytest.mark.usefixtures("forked")
def test_a_script_that_raises_or_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", str(tmp_path / "nothing.py")])
    assert stop.value.code == 2 and "argument SCRIPT: there is no file" in capsys.readouterr().err
    tmp_path.joinpath("wrong.py").write_text("raise KeyError('lost')")
    assert main(["run", str(tmp_path / "wrong.py")]) == 1
    assert "lost" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["run", str(tmp_path / "wrong.py")]) == 2
    assert "give the script to torchrun" in capsys.readouterr().err
