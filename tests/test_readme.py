"""What the documents show runs, and what they name exists."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import tpkernels as tpk
from tpkernels import cli
from tpkernels.launching import local_ranks
from tpkernels.testing.spawn import fork_server

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
TIMEOUT_S = 300  # seconds of work; minutes beside other jobs on two cores


def snippets(language: str) -> list[tuple[str, str]]:
    """(name, text) of every fenced block of a language in every document."""
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(rf"^```{language}\n(.*?)^```$", ROOT.joinpath(document).read_text(), re.M | re.S)
        found += [(f"{document}-{number}", block) for number, block in enumerate(blocks)]
    return found


def parametrise(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in pairs])


def run_python(*args: str, cwd: Path) -> str:
    """Run a Python command line with this checkout importable; its output."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv.pop(0); " \
        "runpy.run_path(sys.argv[0], run_name='__main__')"  # fmt: skip
    argv = [sys.executable, *args] if args[0] == "-m" else [sys.executable, "-c", code, str(ROOT), *args]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(script: Path) -> str:
    """Run a script, and the ranks that it launches, in forks of processes that have imported torch; its output."""
    output = script.with_suffix(".txt")
    process = fork_server().Process(target=be_the_script, args=(script, output))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


def be_the_script(script: Path, output: Path) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(script.parent)
    with mock.patch.object(local_ranks, "_new_interpreters", lambda: multiprocessing.get_context("fork")):
        runpy.run_path(str(script), run_name="__main__")


def test_every_document_with_code_is_seen() -> None:
    assert len([name for name, _ in snippets("python") if name.startswith("README")]) >= 2
    assert {name.split("-")[0] for name, _ in snippets("bash")} >= {"README.md", "CONTRIBUTING.md"}


@pytest.mark.gloo
@parametrise(snippets("python"))
def test_python_snippets_run_on_two_ranks_and_differ_by_rounding_only(text: str, tmp_path: Path) -> None:
    script = tmp_path / "swap.py"
    script.write_text(text)
    first = text == snippets("python")[0][1]  # as a reader runs it; the others without waiting for imports
    output = run_python(str(script), cwd=tmp_path) if first else run_forked(script)
    last = output.strip().splitlines()[-1]
    differences = ast.literal_eval(last[last.index("[") :])
    assert len(differences) == 2
    assert all(0 <= difference < 1e-5 for difference in differences), output


def command_lines() -> list[tuple[str, str]]:
    lines = [(name, line.strip()) for name, block in snippets("bash") for line in block.splitlines()]
    return [(f"{name}-{line}", line) for name, line in lines if line and not line.startswith("#")]


@pytest.mark.cpu
@parametrise(command_lines())
def test_shell_snippets_are_commands_that_exist(text: str) -> None:
    argv = shlex.split(text)
    check = CHECKS.get(argv[0])
    assert check is not None, f"no check knows the command {argv[0]!r}: teach this test to check it"
    check(argv[1:])


def check_quickstart(args: list[str]) -> None:
    argv = [sys.executable, str(ROOT / "quickstart"), *args, "--dry-run"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    if args[0] != "test":
        check_tpkernels(args)


def check_tpkernels(args: list[str]) -> None:
    cli.parse(args)


def check_torchrun(args: list[str]) -> None:
    assert args[:4] == ["--nproc-per-node", "2", "-m", "tpkernels"], args
    check_tpkernels(args[4:])


def check_pip(args: list[str]) -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    weights = re.search(r'^DEMO_WEIGHTS = "(.*?)"', ROOT.joinpath("quickstart").read_text(), re.M)
    assert args[0] == "install" and weights is not None
    if args[1] == "--no-deps":
        assert args[2:] == [weights[1]]
        return
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", args[1])
    assert extra and (extra[1] is None or extra[1] in project["optional-dependencies"]), args


def check_tool(args: list[str]) -> None:
    """Arguments of ruff, mypy and pytest in CONTRIBUTING: the paths among them exist."""
    for path in (argument for argument in args if argument.startswith("tests/")):
        assert ROOT.joinpath(path).exists(), path


CHECKS = {
    "./quickstart": check_quickstart,
    "tpkernels": check_tpkernels,
    "torchrun": check_torchrun,
    "pip": check_pip,
    ".venv/bin/ruff": check_tool,
    ".venv/bin/mypy": check_tool,
    ".venv/bin/python": check_tool,
}


@pytest.mark.gloo
def test_the_torchrun_line_of_the_readme_runs(tmp_path: Path) -> None:
    (line,) = (line for _, line in command_lines() if line.startswith("torchrun"))
    argv = shlex.split(line)
    output = run_python("-m", "torch.distributed.run", "--standalone", *argv[1:], cwd=ROOT)
    assert output.count("-> ") == 3, f"one answer per op, printed by one rank only:\n{output}"


def names_in_backticks() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", ROOT.joinpath(document).read_text(), flags=re.M | re.S)
        for name in re.findall(r"`([^`\n]+)`", text):
            yield document, name


@pytest.mark.cpu
def test_files_that_the_documents_name_exist() -> None:
    missing = []
    sources = [path for folder in ("tpkernels", "csrc", "tests") for path in ROOT.joinpath(folder).rglob("*.*")]
    for document, name in names_in_backticks():
        # There, sentences also name files beside others of their folder: `moves.py`.
        if document == "ARCHITECTURE.md" and re.fullmatch(r"(\w+/)*\w+\.(py|h|cpp)", name):
            if not any(path.as_posix().endswith(f"/{name}") for path in sources):
                missing.append(f"{document}: {name}")
        if re.fullmatch(r"(tpkernels|tests|benchmarks|docs|csrc)/[\w./-]*", name) and not ROOT.joinpath(name).exists():
            missing.append(f"{document}: {name}")
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", ROOT.joinpath(document).read_text()):
            if "://" not in target and not ROOT.joinpath(target).exists():
                missing.append(f"{document}: {target}")
    assert not missing, missing


@pytest.mark.cpu
def test_functions_that_the_documents_name_exist() -> None:
    missing = []
    for document, name in names_in_backticks():
        match = re.match(r"tpk\.([\w.]+)", name)
        found: object = tpk
        for part in match[1].split(".") if match else ():
            found = getattr(found, part, None)
        if found is None:
            missing.append(f"{document}: {name}")
    assert not missing, missing


@pytest.mark.cpu
def test_errors_that_the_documents_name_exist() -> None:
    text = ROOT.joinpath("ARCHITECTURE.md").read_text()
    table = text[text.index("### Errors") : text.index("### Determinism")]
    for name in re.findall(r"^\| `(\w+)`", table, re.M):
        assert hasattr(tpk.errors, name) or name == "ValueError", name
    for name in tpk.errors.__all__:
        if name not in ("TpKernelsError", "CommunicationError"):
            assert f"`{name}`" in table, f"{name} is missing from the table of errors"


@pytest.mark.cpu
def test_documents_name_no_private_place_and_no_placeholder() -> None:
    for document in (*DOCUMENTS, "quickstart", ".ci/run", "pyproject.toml"):
        text = ROOT.joinpath(document).read_text()
        for wrong in ("/work/", "/root/", "/tmp/", "TODO", "TBD", "XXX", "coming soon"):
            assert wrong not in text, f"{document} contains {wrong!r}"
