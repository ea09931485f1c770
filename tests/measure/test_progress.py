"""What is left of a measurement."""

from __future__ import annotations

import pytest

from tpkernels.measure.progress import remaining


@pytest.mark.cpu
def test_what_is_left_is_told_once_something_is_known() -> None:
    assert remaining(0, 10, 0.0) == ""
    assert remaining(1, 4, 10.0) == ", about 30 s left"
    assert remaining(2, 10, 60.0) == ", about 4 min left"
