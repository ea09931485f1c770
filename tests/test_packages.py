"""A machine with torch, triton and numpy alone: what works there, and what is said of what does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tpkernels as tpk
from tpkernels import cli
from tpkernels.packages import MissingPackage, needed

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
ABSENT = ("rich", "platformdirs", "filelock", "safetensors")
NEEDS_TRITON = "benchmarks/gpu_steps and tests/gpu compile kernels"

# Each stage alone: what it failed with, or "". The first import of a stage is not one of an earlier stage's modules.
BARE_MACHINE = f"""
import importlib, json, pathlib, sys
sys.modules |= dict.fromkeys({ABSENT})
root = pathlib.Path(sys.argv[1])
sys.path[:0] = [str(root), str(root / "benchmarks")]

def ops():
    import torch, tpkernels as tpk
    mesh = tpk.init(device="cpu")["tp"]
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    assert tpk.matmul_all_reduce(x, w, mesh).tolist() == [[3.0] * 4] * 2
    assert tpk.nn.ColumnParallelLinear(3, 4, mesh)(x).shape == (2, 4)
    assert tpk.parallelize and tpk.load_pretrained

def one_gpu():
    import one_gpu
    from tpkernels.measure.report import describe_environment
    for path in sorted((root / "benchmarks" / "gpu_steps").glob("*.py")):
        importlib.import_module(f"gpu_steps.{{path.stem}}")
    assert one_gpu.main(["--plan"]) == 0

def gpu_tests():
    import pytest
    folder = root / "tests" / "gpu"
    code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", str(root), str(folder)])
    assert code == 0, f"pytest ends with {{code}}"

found = {{}}
for stage in (ops, one_gpu, gpu_tests):
    try:
        stage()
        found[stage.__name__] = ""
    except BaseException as error:
        found[stage.__name__] = repr(error)
print("\\n" + json.dumps(found))
"""


def on_a_bare_machine(root: Path) -> tuple[dict[str, str], str]:
    """What each stage failed with on the tree at ``root``, and all that was printed."""
    command = [sys.executable, "-c", BARE_MACHINE, str(root)]
    # Plugins that pytest finds installed are theirs, not ours, and it looks into what is absent for their sake.
    ours = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=root, env={**os.environ, **ours}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.slow("6 s: imports every module in a new interpreter")
def test_ops_layers_and_the_gpu_suites_need_torch_triton_and_numpy_alone() -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    found, printed = on_a_bare_machine(ROOT)
    assert set(found.values()) == {""}, f"{found}\n{printed}"


@pytest.mark.full("6 s of a core: that the test before it can fail")
def test_an_import_of_anything_else_is_found_in_each_of_them(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    left_out = shutil.ignore_patterns("__pycache__", "results", "mutations", "_native*", "fuzz")
    for folder in ("tpkernels", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=left_out)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    for path, package in (
        ("tpkernels/state/clipping.py", "safetensors"),
        ("benchmarks/gpu_steps/lab.py", "rich"),
        ("tests/gpu/ranks.py", "platformdirs"),
    ):
        file = tmp_path / path
        file.write_text(file.read_text().replace("\nimport torch\n", f"\nimport {package}\nimport torch\n", 1))
    found, printed = on_a_bare_machine(tmp_path)
    assert "safetensors" in found["ops"] and "rich" in found["one_gpu"], found
    assert "pytest ends with" in found["gpu_tests"] and "import of platformdirs halted" in printed


# what is said


def _without(*packages: str) -> Any:
    return mock.patch.dict(sys.modules, dict.fromkeys(packages))


def test_a_missing_package_is_named_with_its_use_and_the_command_that_brings_it() -> None:
    said = "the package 'rich' is missing, which a table needs. Install it: pip install rich"
    with _without("rich"), pytest.raises(MissingPackage, match=said) as caught, needed("rich", "a table"):
        import rich.table  # noqa: F401
    assert isinstance(caught.value, ModuleNotFoundError) and caught.value.name == "rich"


def test_what_a_package_that_is_there_lacks_is_not_blamed_on_it() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught, needed("rich", "a table"):
        import no_such_module  # noqa: F401
    assert not isinstance(caught.value, MissingPackage)


@pytest.mark.parametrize("command", ["demo", "test", "train-demo", "bench", "profile"])
def test_a_command_that_prints_tables_says_so_before_it_runs(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = next(one for one in cli.COMMANDS if one.name == command)
    add_arguments, _ = entry.load()  # a first import of what the command itself is made of may bring rich

    def never(options: object) -> int:
        raise AssertionError("it ran")

    monkeypatch.setattr(cli, "COMMANDS", [cli.Command(command, "", lambda: (add_arguments, never), entry.needs)])
    with _without("rich"):
        assert cli.main([command]) == 1
    assert capsys.readouterr().err == (
        f"tpkernels: the package 'rich' is missing, which `tpkernels {command}` needs. Install it: pip install rich\n"
    )


def test_on_another_system_ranks_are_refused_in_one_sentence_and_the_doctor_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for start in (tpk.init, lambda: tpk.launch(print, 2)):
        with pytest.raises(tpk.errors.UnsupportedPlatform, match="on Linux, and this is darwin: use a Linux machine"):
            start()
    assert cli.main(["explain"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("tpkernels explain: tpkernels runs ranks on Linux") and "Traceback" not in said
    assert cli.main(["doctor"]) == 1
    assert "Broken: " in capsys.readouterr().out
