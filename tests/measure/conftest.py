"""Fixtures of the measuring tests."""

from __future__ import annotations

import pytest

from tpkernels.measure import netlab


@pytest.fixture(scope="session")
def lab_possible() -> None:
    """Skip where the network lab cannot be built. Tried for real: capabilities alone do not show a missing module."""
    reason = netlab.unavailable_reason()
    if reason is not None:
        pytest.skip(f"network lab: {reason}")
