"""The page of messages has an entry for each message that a user can meet, and no other entry.

A message is the text of an exception that the package or its compiled core makes, or a reason that a function returns
and another message or a table shows.  ``…`` stands for each value that is put in.  An entry names a message by a piece
of it, so that an entry may serve several that have the same cause.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import tpkernels as tpk
from tests.source_tree import modules

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/messages.md"
BUILT_IN = ("ValueError", "TypeError", "RuntimeError", "AttributeError", "IndexError", "KeyError", "ImportError",
            "OSError", "NotImplementedError")  # fmt: skip
OWN = ("LaunchError", "MissingPackage", "Missing", "FakeTensorLeft", "CudaError")
OF_COMMANDS = ("ArgumentTypeError", "NetlabError", "NetlabUnavailable")
TELLERS = ("refuse", "_refuse", "warn", "add_note", "cls")
"""Functions that raise, or warn of, what they are given; and classes of errors that are chosen at run time."""
REASONS = ("TransportFailure", "Lost", "Unproven", "Refused", "DoesNotRun")
"""Exceptions that are caught in the package, and whose text is put into the error of a call or the reason in a plan."""
SEEN = {*tpk.errors.__all__, *BUILT_IN, *OWN, *OF_COMMANDS, *TELLERS, *REASONS}
"""Where a user sees the text.  What other exceptions say is caught in the package, and is put into one of these."""
REASON = re.compile(r"why|reason|refus")
"""A function returns a reason if it may return None instead, or if its name says so; a variable, if its name does."""
CONSTANT = re.compile(r"_?[A-Z][A-Z_]+")
WORDS_OF_A_REASON = 3
"""A constant of so many words is a reason, and so is each value of a dict of them."""
NO_REASON = ("job_name", "_tie_kind")
"""Functions that return a text or None, and no reason."""
CAPTIONS = ("CAPTION", "_CAPTION", "HELP", "_STYLE", "TABLES", "MEANINGS", "STYLES", "PIP_LINES")
"""Constants that belong to a table, a page or a command line."""
PARTS = ("_ADVICE", "_VOID", "_DEALT", "NO_GRADIENT", "_DIFFERENTIABLE", "NO_DATA_FLOW")
"""Constants that are put into messages of their own files, which have entries as a whole."""
THROWN = re.compile(r'(?:throw \w[\w:]*\(|\bfail\(Failure|\braise_errno\(|\btext = )(?:"(?:[^"\\]|\\.)*"|[^;{"])*;')
"""A statement of C++ that makes the text of an error."""
UNSEEN = {
    "tpkernels/kernels": "operands are checked by the ops before a kernel gets them",
    "tpkernels/testing": "for the tests of this project and of backends",
    "tpkernels/backends/symmetric/tile_cache.py": "a file that cannot be read is measured again",
    "tpkernels/comm/job_identity.py": "caught where cards and notes are read",
    "tpkernels/comm/liveness.py": "caught where cards are read",
    "tpkernels/comm/presence.py": "a note that cannot be read is no note",
    "tpkernels/comm/records.py": "a record that cannot be read is no record",
}
"""Files whose messages reach nobody, and why.  csrc/cuda refuses only what no caller in the package gives it."""
LEAST_LETTERS = 9
"""An entry with fewer letters could serve messages that have nothing to do with it."""


class Message(NamedTuple):
    place: str
    text: str


Names = dict[str, list[str]]


def text_of(node: ast.expr, names: Names) -> str:
    """The literal text of an expression; ``names``: the texts that variables of the function have held so far."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join([text_of(part, names) for part in node.values])
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    return names.get(node.id, ["…"])[-1] if isinstance(node, ast.Name) else "…"


def texts_of(node: ast.expr, names: Names) -> list[str]:
    """All texts that the expression may have."""
    if isinstance(node, ast.IfExp):
        return texts_of(node.body, names) + texts_of(node.orelse, names)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in texts_of(value, names)]
    return names.get(node.id, ["…"]) if isinstance(node, ast.Name) else [text_of(node, names)]


def gives_reason(function: ast.FunctionDef) -> bool:
    if function.name in NO_REASON or function.returns is None:
        return False
    returns = ast.unparse(function.returns)
    return returns == "str | None" or (returns == "str" and REASON.search(function.name) is not None)


def sentences_of(node: ast.expr, names: Names) -> list[tuple[int, str]]:
    """The line and text of what a constant says, where that has the words of a reason."""
    values = node.values if isinstance(node, ast.Dict) else [node]
    texts = [(value.lineno, text_of(value, names)) for value in values]
    return [(line, text) for line, text in texts if len(text.split()) >= WORDS_OF_A_REASON]


def read(node: ast.AST, names: Names, found: list[tuple[int, str]], reasoning: bool = False) -> None:
    """Add the line and the text of every message below ``node``, in the order of the source."""
    if isinstance(node, ast.FunctionDef):
        names, reasoning = dict(names), gives_reason(node)
    for child in ast.iter_child_nodes(node):
        read(child, names, found, reasoning)
    said: ast.expr | None = None
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        name = getattr(target, "id", getattr(target, "attr", ""))
        if isinstance(target, ast.Name):
            names[name] = [*names.get(name, []), *texts_of(node.value, names)]
        said = node.value if REASON.search(name) else None
        if CONSTANT.fullmatch(name) and name not in CAPTIONS + PARTS:
            found += sentences_of(node.value, names)
    elif isinstance(node, ast.Return) and reasoning:
        said = node.value
    elif isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in SEEN:
            said = node.args[-1 if called in ("refuse", "_refuse") else 0]
    if said is not None:
        found += [(said.lineno, text) for text in texts_of(said, names) if any(map(str.isalpha, text))]


def messages_of(tree: ast.Module, file: str) -> list[Message]:
    found: list[tuple[int, str]] = []
    read(tree, {}, found)
    return [Message(f"{file}:{line}", text) for line, text in found]


def messages_of_core(source: str, file: str) -> list[Message]:
    """The messages of a C++ source: the literals of each statement that makes one."""
    found: list[Message] = []
    for statement in THROWN.finditer(source):
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r'"\s*"', "", statement.group()))
        if any(map(str.isalpha, "".join(literals))):
            line = source.count("\n", 0, statement.start()) + 1
            found.append(Message(f"{file}:{line}", "…".join(literals)))
    return found


@functools.cache
def messages() -> tuple[Message, ...]:
    found: list[Message] = []
    for path, _, tree in modules(ROOT):
        file = path.as_posix()
        if not any(file == place or file.startswith(f"{place}/") for place in UNSEEN):
            found += messages_of(tree, file)
    for path in sorted((ROOT / "csrc").rglob("*.cpp")):
        found += messages_of_core(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    return tuple(found)


def entries(page: str) -> list[str]:
    """The pieces of messages that head the items of the page."""
    heads = re.findall(r"^- ((?:`[^`]+`,\s+)*`[^`]+`):\s", page, re.M)
    return [piece for head in heads for piece in re.findall(r"`([^`]+)`", head)]


def serves(entry: str, text: str) -> bool:
    """Whether the entry is a piece of the message; one of a few letters, which many have, has to be all of it."""
    at = 0
    for part in entry.split("…"):
        at = text.find(part, at) + len(part)
        if at < len(part):
            return False
    return entry == text or sum(map(str.isalpha, entry)) >= LEAST_LETTERS


def without_entry(page: str, said: Sequence[Message]) -> list[Message]:
    known = entries(page)
    return [message for message in said if not any(serves(entry, message.text) for entry in known)]


def test_every_message_has_an_entry() -> None:
    lacking = without_entry(PAGE.read_text(encoding="utf-8"), messages())
    assert not lacking, "\n".join(f"{place}: {text}" for place, text in lacking)


def test_a_message_without_an_entry_is_found() -> None:
    source = "def f(x):\n  what = f'the moon is {x}'\n  if x:\n    what = 'it is dark'\n  raise ValueError(what)"
    said = messages_of(ast.parse(source), "f.py")
    assert said == [Message("f.py:5", "the moon is …"), Message("f.py:5", "it is dark")]
    assert without_entry("- `the moon is …`: Look up.\n- `dark`: Wait.\n", said) == said[1:]


def test_reasons_and_messages_of_the_core_are_found() -> None:
    returned = "def f(x) -> str | None:\n  return None if x else f'no {x}'\ndef g() -> str:\n  return 'a text'"
    assert [message.text for message in messages_of(ast.parse(returned), "f.py")] == ["no …"]
    constant = 'NAME = "of two"\nDARK = "there is no moon"\n_BY_HOUR = {1: "it is too early", 2: "late"}\n'
    held = "class A:\n  def f(self):\n    self.reason: str = 'no stars'\n"
    said = messages_of(ast.parse(constant + held), "f.py")
    assert [message.text for message in said] == ["there is no moon", "it is too early", "no stars"]
    thrown = 'if (n < 0) {\n  throw std::range_error("n: " + std::to_string(n) +\n      "; " "one");\n}\nsay("two");'
    assert messages_of_core(thrown, "f.cpp") == [Message("f.cpp:2", "n: …; one")]


def test_every_entry_is_a_piece_of_a_message() -> None:
    known = entries(PAGE.read_text(encoding="utf-8"))
    assert len(known) > 300, "the items of the page are not found"
    wrong = [entry for entry in known if not any(serves(entry, message.text) for message in messages())]
    assert not wrong, wrong
