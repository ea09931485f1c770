"""An edit of one line, and the tests that have to notice it."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    file: str
    """Below ``tpkernels/``."""
    old: str
    """Stands in the file once."""
    new: str
    tests: str
    """Arguments of pytest."""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.new.strip()}"
