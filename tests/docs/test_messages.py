"""The page of messages has an entry for each message that a user can meet, and no other entry.

A message is the text of an exception that the package makes, with ``…`` for each value that is put in.  An entry names
one by a piece of it, so that an entry may serve several that have the same cause.
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
BUILT_IN = ("ValueError", "TypeError", "RuntimeError", "AttributeError", "IndexError", "ImportError", "OSError")
OWN = ("LaunchError", "MissingPackage", "Missing", "FakeTensorLeft", "CudaError")
OF_COMMANDS = ("ArgumentTypeError", "NetlabError", "NetlabUnavailable")
TELLERS = ("refuse", "_refuse", "warn", "cls")
"""Functions that raise, or warn of, what they are given; and classes of errors that are chosen at run time."""
SEEN = {*tpk.errors.__all__, *BUILT_IN, *OWN, *OF_COMMANDS, *TELLERS}
"""Where a user sees the text.  What other exceptions say is caught in the package, and is put into one of these."""
UNSEEN = {
    "tpkernels/kernels": "operands are checked by the ops before a kernel gets them",
    "tpkernels/testing": "for the tests of this project and of backends",
    "tpkernels/backends/shared_memory/rendezvous.py": "what a connection says is read by segments.py, which catches it",
    "tpkernels/backends/symmetric/tile_cache.py": "a file that cannot be read is measured again",
    "tpkernels/comm/job_identity.py": "caught where cards and notes are read",
    "tpkernels/comm/liveness.py": "caught where cards are read",
    "tpkernels/comm/presence.py": "a note that cannot be read is no note",
    "tpkernels/comm/records.py": "a record that cannot be read is no record",
    "tpkernels/planning/experts.py": "experts that cannot be tried on samples stay whole, for this reason",
    "tpkernels/planning/fake_answers.py": "a model that fails on fake tensors becomes the reason in a plan",
    "tpkernels/planning/opaque_modules.py": "the same",
    "tpkernels/planning/session.py": "the same",
    "tpkernels/planning/trace.py": "the same",
}
"""Files whose messages reach nobody, and why."""
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


def read(node: ast.AST, names: Names, found: list[tuple[int, str]]) -> None:
    """Add the line and the text of every message below ``node``, in the order of the source."""
    if isinstance(node, ast.FunctionDef):
        names = dict(names)
    for child in ast.iter_child_nodes(node):
        read(child, names, found)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        names[name] = [*names.get(name, []), text_of(node.value, names)]
    if isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in SEEN:
            given = node.args[-1 if called in ("refuse", "_refuse") else 0]
            held = names.get(given.id) if isinstance(given, ast.Name) else None
            texts = [text_of(given, names)] if held is None else held
            found += [(node.lineno, text) for text in texts if any(map(str.isalpha, text))]


def messages_of(tree: ast.Module, file: str) -> list[Message]:
    found: list[tuple[int, str]] = []
    read(tree, {}, found)
    return [Message(f"{file}:{line}", text) for line, text in found]


@functools.cache
def messages() -> tuple[Message, ...]:
    found: list[Message] = []
    for path, _, tree in modules(ROOT):
        file = path.as_posix()
        if not any(file == place or file.startswith(f"{place}/") for place in UNSEEN):
            found += messages_of(tree, file)
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


def test_every_entry_is_a_piece_of_a_message() -> None:
    known = entries(PAGE.read_text(encoding="utf-8"))
    assert len(known) > 300, "the items of the page are not found"
    wrong = [entry for entry in known if not any(serves(entry, message.text) for message in messages())]
    assert not wrong, wrong
