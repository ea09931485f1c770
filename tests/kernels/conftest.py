"""The interpreter's workers, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import Interpreter, why_not


@pytest.fixture(scope="session")
def interpreter(full: bool) -> Iterator[Interpreter]:
    if why_not():
        pytest.skip(why_not())
    workers = Interpreter(4 if full else 3)
    yield workers
    workers.close()
