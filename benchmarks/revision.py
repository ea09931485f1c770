"""Which code a row of results comes from."""

from __future__ import annotations

import datetime
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["commit", "now"]


@cache
def commit() -> str:
    """As the run began: it goes on with what it has imported, whatever happens to the checkout meanwhile."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--short", "-uno") else "")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
