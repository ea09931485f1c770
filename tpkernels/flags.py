"""Command-line values: each type refuses a bad one while the line is parsed, and says what to write instead.

A command that runs for minutes must not find at its end that a file cannot be written, nor hand to its ranks a number
that they will refuse.  The types look at files and folders, and at whether torch sees a GPU; they change nothing.
"""

from __future__ import annotations

import argparse
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "add_device",
    "add_json",
    "add_override",
    "add_tp",
    "at_least",
    "device",
    "existing_file",
    "existing_folder",
    "new_file",
    "new_folder",
    "positive",
    "power_of_two",
    "tokens",
]

DEVICES = ("auto", "cpu", "cuda")


def at_least(least: int, what: str = "a whole number") -> Callable[[str], int]:
    """The type of a whole number from ``least`` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"takes {what}, got {text!r}") from None
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def power_of_two(least: int) -> Callable[[str], int]:
    """The type of a power of two from ``least`` on."""

    def parse(text: str) -> int:
        value = at_least(least)(text)
        if value & (value - 1):
            raise ArgumentTypeError(f"must be a power of two, got {value}")
        return value

    return parse


def positive(text: str) -> float:
    """The type of a finite number above 0: seconds, a learning rate."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"takes a number, got {text!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def tokens(text: str) -> tuple[int, int]:
    """The type of a batch and a length of its sequences, as ``8x2048``."""
    batch, separator, length = text.partition("x")
    if not (separator and batch.isdecimal() and length.isdecimal() and int(batch) and int(length)):
        raise ArgumentTypeError(f"takes a batch and a length as 8x2048, got {text!r}")
    return int(batch), int(length)


def device(text: str) -> str:
    """The type of ``--device``: "cpu", or "cuda" where torch finds a GPU; "auto" becomes one of them."""
    if text not in DEVICES:
        raise ArgumentTypeError(f"must be one of {', '.join(DEVICES)}, got {text!r}")
    if text == "cpu":
        return text
    import torch

    found = torch.cuda.is_available()
    if text == "cuda" and not found:
        raise ArgumentTypeError("torch finds no CUDA device here (tpkernels doctor says why); write --device cpu")
    return "cuda" if found else "cpu"


def existing_file(text: str) -> str:
    """The type of a file that is read."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; name a file")
    if not path.is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    if not os.access(path, os.R_OK):
        raise ArgumentTypeError(f"{text} cannot be read with this user's rights")
    return text


def existing_folder(text: str) -> str:
    """The type of a folder that is read."""
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"{text} is {'a file' if Path(text).exists() else 'not there'}; name a folder")
    return text


def new_file(text: str) -> str:
    """The type of a file that is written at the end: its folder is there, and takes it."""
    path = Path(text)
    if not text or path.is_dir():
        raise ArgumentTypeError(f"{text or 'an empty name'} is {'a folder' if text else 'no file'}; name a file")
    _check_writable(path.parent, text)
    if path.exists() and not os.access(path, os.W_OK):
        raise ArgumentTypeError(f"{text} is there already and cannot be written with this user's rights")
    return text


def new_folder(text: str) -> str:
    """The type of a folder that is made where it is missing: the first folder above it that exists takes it."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise ArgumentTypeError(f"{text or 'an empty name'} is not a folder; name a folder, new or existing")
    there = path
    while not there.exists():
        there = there.parent
    _check_writable(there, text)
    return text


def _check_writable(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise ArgumentTypeError(f"there is no folder {folder} to write {what} to; make it first: mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentTypeError(f"the folder {folder} cannot be written with this user's rights")


def _override(text: str) -> tuple[str, str]:
    """The type of ``--override PATTERN=STYLE``."""
    pattern, separator, style = text.partition("=")
    if not (separator and pattern and style):
        raise ArgumentTypeError(f"takes PATTERN=STYLE, for example *.lm_head=replicate, got {text!r}")
    return pattern, style


def add_tp(parser: argparse.ArgumentParser, default: int | None, meaning: str) -> None:
    """``--tp N``, the one name of the number of ranks; ``--nproc`` and ``--world`` are understood, too."""
    parser.add_argument("--tp", type=at_least(1), default=default, metavar="N", help=meaning)
    parser.add_argument("--nproc", "--world", dest="tp", type=at_least(1), default=argparse.SUPPRESS,
                        metavar="N", help=argparse.SUPPRESS)  # fmt: skip


def add_device(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    parser.add_argument(
        "--device", type=device, default=default, metavar="{auto,cpu,cuda}",
        help=f"default {default}; auto: cuda where torch finds a GPU",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser, content: str) -> None:
    parser.add_argument("--json", type=new_file, metavar="FILE", help=content)


def add_override(parser: argparse.ArgumentParser) -> None:
    """``--override PATTERN=STYLE``, repeatable; ``dict(options.override)`` is what ``make_plan`` takes."""
    parser.add_argument(
        "--override", action="append", type=_override, default=[], metavar="PATTERN=STYLE",
        help="for example *.lm_head=replicate; repeatable",
    )  # fmt: skip
