"""Ranks with an emulated GPU each, for the tests of `symmetric`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.backends.emulated import Emulation
from tests.cuda import emulator
from tests.kernels.interpreter import why_not
from tpkernels.testing.spawn import Pools


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Ranks in which Triton interprets, with products that do not depend on a row's place (interpreter.py)."""
    if why_not():
        pytest.skip(why_not())
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OPENBLAS_CORETYPE="Prescott"):
        made = Pools()
        yield made
        made.close()


@pytest.fixture(scope="package")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return Emulation(str(emulator.library()), str(tmp_path_factory.mktemp("emulated")))
