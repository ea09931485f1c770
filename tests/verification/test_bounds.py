"""The judge of whole models: what is over every bound."""

from __future__ import annotations

import pytest
import torch

from tpkernels.verification.bounds import worst_ratio

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_over_every_bound(wrong: float) -> None:
    exact, size = torch.zeros(3, dtype=torch.float64), torch.full((3,), 1e9, dtype=torch.float64)
    assert worst_ratio(torch.tensor([0.0, 1.0, 0.0]), exact, size) < 1
    assert worst_ratio(torch.tensor([0.0, wrong, 0.0]), exact, size) == float("inf")


def test_another_shape_is_over_every_bound() -> None:
    assert worst_ratio(torch.zeros(2), torch.zeros(3).double(), torch.ones(3).double()) == float("inf")
