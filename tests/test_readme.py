"""What the documents show runs, and what they name exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import tpkernels as tpk
from tests.forked_scripts import run_forked
from tests.launching.test_elastic import said
from tpkernels import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")))
JOBS = {
    "torchrun": "train.torchrun.sh",
    "slurm": "train.slurm",
    "mpi": "train.mpi.sh",
    "kubernetes": "train.pytorchjob.yaml",
    "ray": "ray_train.py",
}
"""Pages in docs/hosts, and the job file in examples/ that each shows."""
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *PAGES, *(f"docs/hosts/{name}.md" for name in JOBS))
README_LINES = 200
ELSEWHERE = "docs/trainers.md"
"""Run by tests/integrations/test_page.py: it needs packages, and a GPU where nobody turns accelerate's check off."""
RARELY = ("docs/keras.md", "docs/same-bits.md", "docs/state.md", "docs/training.md")
"""Their programs run with --full: 14 s of a core. What they call is called by tests/integrations/keras, tests/sharding
and tests/state, and by the examples of the docstrings."""
FOLDERS = "tpkernels|tests|benchmarks|docs|csrc|examples"
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


def run_by_page(name: str, argument: Any) -> Any:
    marks = [] if name.startswith("README") else [pytest.mark.slow("a second or two for each snippet of a page")]
    if name.startswith(RARELY):
        marks = [pytest.mark.full("a page that is rarely run: see RARELY")]
    return pytest.param(argument, id=name, marks=marks)


@pytest.mark.cpu
def test_the_readme_is_short() -> None:
    lines = ROOT.joinpath("README.md").read_text().splitlines()
    assert len(lines) <= README_LINES, f"{len(lines)} lines; what else there is to say has a page in docs/"


@pytest.mark.cpu
def test_every_document_with_code_is_seen() -> None:
    assert len([name for name, _ in snippets("python") if name.startswith("README")]) >= 2
    assert {name.split("-")[0] for name, _ in snippets("bash")} >= {"README.md", "CONTRIBUTING.md"}


def programs() -> list[tuple[str, str]]:
    """Snippets that start their own ranks."""
    return [(name, text) for name, text in snippets("python") if "__main__" in text]


def pages() -> list[tuple[str, list[str]]]:
    """The documents whose other snippets make one program together, run by each rank of a job."""
    found: dict[str, list[str]] = {}
    for name, text in snippets("python"):
        if "__main__" not in text and not name.startswith(ELSEWHERE):
            found.setdefault(name.rpartition("-")[0], []).append(text)
    return list(found.items())


@pytest.mark.gloo
@pytest.mark.parametrize("text", [run_by_page(name, text) for name, text in programs()])
def test_python_snippets_run_on_two_ranks_and_differ_by_rounding_only(text: str, tmp_path: Path) -> None:
    script = tmp_path / "swap.py"
    script.write_text(text)
    output = run_forked(script)
    last = output.strip().splitlines()[-1]
    if not last.endswith("True"):  # what a script says that compares bits
        differences = ast.literal_eval(last[last.index("[") :])
        assert len(differences) == 2
        assert all(0 <= difference < 1e-5 for difference in differences), output
    shown = shown_output(text)
    assert shown is None or masked(shown) == masked(output), output


PAGE = """
import contextlib, io
import tpkernels as tpk
BLOCKS = {blocks!r}
def main():
    names, printed = {{"__name__": "page"}}, []
    for number, block in enumerate(BLOCKS):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block, f"block {{number}} of the page", "exec"), names)
        printed.append(output.getvalue())
    return printed
if __name__ == "__main__":
    print(tpk.launch(main, 2)[0])
"""


@pytest.mark.gloo
@pytest.mark.parametrize("blocks", [run_by_page(name, blocks) for name, blocks in pages()])
@pytest.mark.slow("12 s")
def test_pages_run_from_top_to_bottom_and_print_what_they_show(blocks: list[str], tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(PAGE.format(blocks=blocks))
    printed = ast.literal_eval(run_forked(script).strip().splitlines()[-1])
    for block, output in zip(blocks, printed, strict=True):
        shown = shown_output(block)
        assert shown is None or masked(shown) == masked(output), output
        assert "print(" not in block or shown is not None, f"a block prints, and the page does not show it:\n{block}"


def shown_output(snippet: str) -> str | None:
    """What a document says that a snippet prints: the block of text that follows it."""
    for document in DOCUMENTS:
        content = ROOT.joinpath(document).read_text()
        if f"```python\n{snippet}```\n\n```text\n" in content:
            return content.split(f"```python\n{snippet}```\n\n```text\n")[1].split("```")[0]
    return None


def masked(output: str) -> list[str]:
    """Lines without what another library, CPU or run may change: rounding errors, costs, and who is fastest.

    A plan names the implementations, together or with each module, and wraps its notes accordingly.
    """
    output = re.sub(r"\n {3}(?=\S)", " ", output)
    output = re.sub(r"; implementation: \w+|^implementation: \w+\n", "", output, flags=re.M)
    lines = [re.sub(r"\d\.\d+(e-\d+)?\b(?! KiB)", "#", line) for line in output.strip().splitlines()]
    return [re.sub(r"\b0\.0\b", "#", line.rstrip()).replace("shared_memory", "chunked      ") for line in lines]


def command_lines() -> list[tuple[str, str]]:
    lines = [(name, line.strip()) for name, block in snippets("bash") for line in block.splitlines()]
    return [(f"{name}-{line}", line) for name, line in lines if line and not line.startswith("#")]


@pytest.mark.cpu
@parametrise(command_lines())
def test_shell_snippets_are_commands_that_exist(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands look at files and devices while they are parsed: what the pages assume is there."""
    for file in ("path/to/config.json", "old.json", "train.py", "examples/keras_gemma_lora.py"):
        tmp_path.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(file).write_text("{}")
    tmp_path.joinpath("run/step-20").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    argv = without_variables(shlex.split(text))
    check = CHECKS.get(argv[0])
    assert check is not None, f"no check knows the command {argv[0]!r}: teach this test to check it"
    check(argv[1:])


def without_variables(argv: list[str]) -> list[str]:
    """The command behind settings of variables for it alone."""
    while argv and re.fullmatch(r"[A-Z_]+=.*", argv[0]):
        argv = argv[1:]
    return argv


def quickstart() -> ModuleType:
    loader = SourceFileLoader("quickstart", str(ROOT / "quickstart"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def check_quickstart(args: list[str]) -> None:
    command, extra, _, _ = quickstart().parse(args)
    if command != "test":
        check_tpkernels([command, *extra])


def check_tpkernels(args: list[str]) -> None:
    cli.parse(args)


def check_torchrun(args: list[str]) -> None:
    torchrun = get_args_parser().parse_args(args)
    if torchrun.module:
        assert torchrun.training_script == "tpkernels", args
        check_tpkernels(torchrun.training_script_args)
    else:
        check_python([torchrun.training_script, *torchrun.training_script_args])


def check_python(args: list[str]) -> None:
    """A script of the project with options that it has, or one that a page has told the reader to save."""
    if "/" not in args[0]:
        assert any(f"`{args[0]}`" in ROOT.joinpath(document).read_text() for document in DOCUMENTS), args
        return
    source = ROOT.joinpath(args[0]).read_text()
    for option in (argument for argument in args[1:] if argument.startswith("--")):
        assert f'"{option}"' in source, f"{args[0]} has no {option}"


def check_pip(args: list[str]) -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    alone = [packages[0] for of_extra in quickstart().WITHOUT_DEPENDENCIES.values() for packages in of_extra]
    assert args[0] == "install"
    if args[1] == "--no-deps":
        assert args[2] in alone and not args[3:]
        return
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", args[1])
    assert extra and (extra[1] is None or extra[1] in project["optional-dependencies"]), args


def check_tool(args: list[str]) -> None:
    """Arguments of ruff, mypy and pytest in CONTRIBUTING: the paths among them exist."""
    for path in (argument for argument in args if argument.startswith("tests/")):
        assert ROOT.joinpath(path).exists(), path


def check_export(args: list[str]) -> None:
    for assignment in args:
        name = assignment.partition("=")[0]
        assert name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"), name


def check_launcher(args: list[str]) -> None:
    """``srun`` and ``mpirun``, which need not be here: what they start."""
    check_python(args[args.index("python") + 1 :])


def check_mkdocs(args: list[str]) -> None:
    assert args in (["serve"], ["build", "--strict"]), args


def check_sbatch(args: list[str]) -> None:
    (script,) = args
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in ROOT.joinpath(script).read_text().splitlines() if line.startswith("srun")]
    assert lines
    for line in lines:
        check_launcher(line[1:])


CHECKS = {
    "./quickstart": check_quickstart,
    "tpkernels": check_tpkernels,
    "torchrun": check_torchrun,
    "python": check_python,
    "srun": check_launcher,
    "mpirun": check_launcher,
    "sbatch": check_sbatch,
    "mkdocs": check_mkdocs,
    "export": check_export,
    "pip": check_pip,
    ".venv/bin/ruff": check_tool,
    ".venv/bin/mypy": check_tool,
    ".venv/bin/python": check_tool,
}


@pytest.mark.gloo
def test_the_first_torchrun_line_of_the_documents_runs(tmp_path: Path) -> None:
    line = next(line for _, line in command_lines() if line.startswith("torchrun"))
    # The ranks are forks, which run a file and no module.
    _, *arguments = shlex.split(line.replace("-m tpkernels", str(ROOT / "tpkernels" / "__main__.py")))
    (text,) = said([["--standalone", *arguments]], tmp_path, "line")
    assert text.count("-> ") == 3, f"one answer per op, printed by one rank only:\n{text}"


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
        if (
            re.fullmatch(r"(tpkernels|tests|benchmarks|docs|csrc|examples)/[\w./-]*", name)
            and not ROOT.joinpath(name).exists()
        ):
            missing.append(f"{document}: {name}")
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", ROOT.joinpath(document).read_text()):
            if "://" not in target and not ROOT.joinpath(document).parent.joinpath(target).exists():
                missing.append(f"{document}: {target}")
    assert not missing, missing


@pytest.mark.cpu
def test_each_page_of_a_launcher_shows_its_job_file_and_that_is_well_formed() -> None:
    yaml = pytest.importorskip("yaml", reason='the site needs pip install ".[docs]"')
    assert {path.stem for path in ROOT.glob("docs/hosts/*.md")} == set(JOBS)
    for page, file in JOBS.items():
        text = ROOT.joinpath("examples", file).read_text()
        assert f"\n{text}```\n" in ROOT.joinpath("docs", "hosts", f"{page}.md").read_text(), page
        if file.endswith(".yaml"):
            for pods in yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"].values():
                (container,) = pods["template"]["spec"]["containers"]
                check_launcher([word.removeprefix("/") for word in container["command"]])
        elif not file.endswith(".py"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=TIMEOUT_S)


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
