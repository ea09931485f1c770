"""The interpreter's workers, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter(full: bool) -> Iterator[Interpreter]:
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):  # it makes scalars of arrays with one element, which numpy 2.4 refuses
        pytest.skip(f"the interpreter of Triton {triton} does not work with numpy {numpy}: install triton>=3.7")
    workers = Interpreter(4 if full else 3)
    yield workers
    workers.close()
