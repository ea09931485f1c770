"""A pytest plugin for continuous integration (`-p tests.require_all`): a skip is a failure.

A missing package or program must not turn tests off unnoticed where everything can be installed. Only what no
installation can bring, hardware and privileges, still skips, and what only a run with `--full` or `--slow` is to spend
time on.
"""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

MAY_SKIP = re.compile(r"CUDA device|this CPU has no|needs? root|CAP_\w+ missing|cores would need|--(full|slow): ")


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if MAY_SKIP.search(reason) is None:
        report.outcome = "failed"
        report.longrepr = f"{reason}\n(a skip for what could be installed is a failure here: tests/require_all.py)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report
