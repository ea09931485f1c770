"""Ranks with an emulated GPU each, for the tests of `symmetric`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.emulated import Emulation
from tests.backends.interpreted_ranks import InterpretedPools
from tests.cuda import emulator
from tests.kernels.interpreter import why_not


@pytest.fixture(scope="package")
def pools() -> Iterator[InterpretedPools]:
    if why_not():
        pytest.skip(why_not())
    made = InterpretedPools()
    yield made
    made.close()


@pytest.fixture(scope="package")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return Emulation(str(emulator.library()), str(tmp_path_factory.mktemp("emulated")))
