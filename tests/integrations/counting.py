"""How often our ops are called: what proves that a layer, a block or a style runs them."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

OF_LAYERS = (
    ("tpkernels.nn.column", "copy_matmul"),
    ("tpkernels.nn.shared_input", "copy_matmul"),
    ("tpkernels.nn.shared_input", "all_gather_matmul"),
    ("tpkernels.nn.row", "matmul_all_reduce"),
    ("tpkernels.nn.row", "matmul_reduce_scatter"),
    ("tpkernels.nn.embedding", "all_reduce"),
    ("tpkernels.nn.embedding", "reduce_scatter"),
    ("tpkernels.nn.cut_experts", "copy_grouped_matmul"),
    ("tpkernels.nn.cut_experts", "grouped_matmul_all_reduce"),
)
"""The modules that call an op, and its name there: those of our layers."""


@contextlib.contextmanager
def counted(ops: Sequence[tuple[str, str]] = OF_LAYERS) -> Iterator[collections.Counter[str]]:
    """How often each op is called within it, by its name."""
    counts: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        for module, name in ops:
            real: Callable[..., Any] = getattr(importlib.import_module(module), name)

            def call(*args: Any, real: Callable[..., Any] = real, name: str = name, **options: Any) -> Any:
                counts[name] += 1
                return real(*args, **options)

            stack.enter_context(mock.patch(f"{module}.{name}", functools.wraps(real)(call)))
        yield counts
