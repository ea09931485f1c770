from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc import exercises


@pytest.fixture(scope="session")
def built() -> Path:
    """The library of the drivers and of the installation's own objects of all kernels, which lie beside it."""
    return exercises.of_the_installation()


@pytest.fixture(scope="session")
def exercise() -> Path:
    """The program that plays random cases, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return exercises.built("exercise", exercises.SANITIZED)
