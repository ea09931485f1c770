from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc import exercises


@pytest.fixture(scope="session")
def built() -> Path:
    """The library of all kernels and their drivers."""
    return exercises.built("kernels.so", ["-O3"])


@pytest.fixture(scope="session")
def exercise() -> Path:
    """The program that plays random cases, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return exercises.built("exercise", exercises.SANITIZED)
