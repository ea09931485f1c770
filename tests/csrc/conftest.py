from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.exercises import SANITIZED, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of all kernels and their drivers."""
    return build(tmp_path_factory.mktemp("kernels"), "kernels.so", ["-O3"])


@pytest.fixture(scope="session")
def exercise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that plays random cases, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return build(tmp_path_factory.mktemp("exercise"), "exercise", SANITIZED)
