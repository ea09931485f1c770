from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.csrc import exercises
from tpkernels.gemm.native import native


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has, which the core then uses."""
    module: Any = native()
    names = list(module.Isa.__members__)
    if names.index(request.param) > names.index(module.best_isa()):
        pytest.skip(f"this CPU has no {request.param}")
    module.force_isa(module.Isa.__members__[request.param])
    yield request.param
    module.force_isa(module.Isa.__members__[module.best_isa()])


@pytest.fixture(scope="session")
def built() -> Path:
    """The library of the drivers and of the installation's own objects of all kernels, which lie beside it."""
    return exercises.of_the_installation()


@pytest.fixture(scope="session")
def exercise() -> Path:
    """The program that plays random cases, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return exercises.built("exercise", exercises.SANITIZED)
