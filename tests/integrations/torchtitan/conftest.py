"""Of the tests of torchtitan, those of the version that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _is_older() -> bool:
    try:
        return version("torchtitan").split(".")[:2] == ["0", "2"]
    except PackageNotFoundError:
        return False


collect_ignore = ["test_torchtitan.py", "test_trainer.py"] if _is_older() else ["test_older.py"]
