"""Every flag of every command refuses a bad value while the command line is parsed, and says what to write."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tpkernels import cli, flags
from tpkernels.measure import links

CHOICE = "no-such-choice"
GIVEN = {"plan": ["{model}"], "verify": ["{model}"], "run": ["{model}"]}
"""What a command cannot do without."""


def commands() -> dict[str, argparse.ArgumentParser]:
    parsers = {}
    for command in cli.COMMANDS:
        parsers[command.name] = argparse.ArgumentParser(prog=f"tpkernels {command.name}")
        command.load()[0](parsers[command.name])
    return parsers


def bad_values(action: argparse.Action) -> list[str]:
    """Values that the type must refuse, for each type that a flag may have; a new type needs a line here."""
    if action.choices is not None:
        return [CHOICE]
    kind = getattr(action.type, "__qualname__", None) or getattr(action.type, "func", None)
    numbers = ["-1", "many", "1.5", ""]
    known = {
        "at_least.<locals>.parse": numbers,
        "power_of_two.<locals>.parse": [*numbers, "3", "12"],
        "positive": ["0", "-1", "inf", "nan", "soon", ""],
        "device": ["gpu", "cuda"],
        "tokens": ["8", "8x", "0x7", "3x-1", "axb", "1x2x3", ""],
        "existing_file": ["nosuch", "{folder}"],
        "existing_folder": ["nosuch", "{file}"],
        "new_file": ["nosuch/x.json", "{folder}", "{file}/x", ""],
        "new_folder": ["{file}", "{file}/below", ""],
        "_override": ["lm_head", "=replicate", "lm_head="],
        "_shape": ["3x3", "0x1x1", "axbxc"],
        "source": ["missing.json", "nosuch_module:f", "json:nosuch", "{folder}", "./nosuch"],
        links._written: ["3foo", "-1gbit", "fast"],
    }
    assert kind in known, f"{action.option_strings or action.dest}: no bad values are known for the type {kind}"
    return known[kind]


def flag_cases() -> list[tuple[str, str, str, str]]:
    """The command, the flag ("" for a positional argument), what the error calls it, and a bad value."""
    found = []
    for name, parser in commands().items():
        for action in parser._actions:
            if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction | argparse._HelpAction):
                continue
            if action.nargs == argparse.REMAINDER:
                continue  # another program's
            said = "/".join(action.option_strings) or str(action.metavar or action.dest)
            found += [(name, flag, said, bad) for flag in action.option_strings or [""] for bad in bad_values(action)]
    return found


@pytest.mark.cpu
def test_a_bad_value_of_any_flag_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "file").write_text("x")
    (tmp_path / "config.json").mkdir()
    (tmp_path / "model.json").write_text("{}")
    places = {"folder": str(tmp_path), "file": str(tmp_path / "file"), "model": str(tmp_path / "model.json")}
    parsers = commands()
    cases = flag_cases()
    assert len(cases) > 150
    for command, flag, called, bad in cases:
        value = bad.format(**places)
        before = [word.format(**places) for word in GIVEN.get(command, [])]
        with pytest.raises(SystemExit) as stop:
            parsers[command].parse_args([f"{flag}={value}", *before] if flag else [value])
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2, (command, flag, bad, said)
        assert f"error: argument {called}: " in said and "invalid" not in said.replace("invalid choice", ""), said


@pytest.mark.cpu
def test_every_command_takes_one_name_for_its_number_of_ranks() -> None:
    for name, parser in commands().items():
        names = {
            word for action in parser._actions if action.help != argparse.SUPPRESS for word in action.option_strings
        }
        assert not names & {"--nproc", "--world", "--world-size"}, name
        assert ("--tp" in names) == (name != "doctor"), name
        if name not in ("doctor", "bench", "train-demo"):
            given = [word.format(model=__file__) for word in GIVEN.get(name, [])]
            assert parser.parse_args(["--nproc", "3", *given]).tp == 3, name


@pytest.mark.cpu
def test_good_values_are_taken(tmp_path: Path) -> None:
    assert flags.new_file(str(tmp_path / "new.json")) and flags.new_folder(str(tmp_path / "a" / "b"))
    assert flags.existing_file(__file__) and flags.existing_folder(str(tmp_path))
    assert flags.positive("0.5") == 0.5 and flags.at_least(0)("0") == 0 and flags.device("cpu") == "cpu"
    assert not list(tmp_path.iterdir()), "looking must not make anything"


@pytest.mark.cpu
def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for kind in (flags.new_file, flags.new_folder):
        with pytest.raises(argparse.ArgumentTypeError, match="rights"):
            kind(str(tmp_path / "x"))


def needs_a_width(width: int) -> None:
    raise AssertionError(width)


@pytest.mark.cpu
def test_a_function_that_takes_arguments_is_no_model_to_plan() -> None:
    from tpkernels.integrations import named_models

    with pytest.raises(ValueError, match=r"is called without arguments: missing a required argument: 'width'; name a"):
        named_models.meta_model(f"{__name__}:needs_a_width")


@pytest.mark.cpu
def test_a_name_that_the_hub_cannot_be_asked_for_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from tpkernels.integrations import named_models

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot be asked \(Name or service not known\)"):
        named_models.source("no-such-model")
