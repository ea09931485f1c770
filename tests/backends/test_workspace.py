"""Buffers are reused when they fit, bounded in total, and never handed out twice."""

from __future__ import annotations

import pytest
import torch

from tpkernels.backends.point_to_point.workspace import MIN_BYTES, Workspace

pytestmark = pytest.mark.cpu

ROWS = MIN_BYTES // 4


def _like(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


def test_a_buffer_that_was_given_back_is_taken_again_in_another_shape_and_dtype() -> None:
    workspace = Workspace()
    first = workspace.take((ROWS, 4), _like())
    address = first.data_ptr()
    workspace.give(first)
    second = workspace.take((ROWS * 2, 3), _like(torch.bfloat16))
    assert second.data_ptr() == address
    assert second.shape == (ROWS * 2, 3) and second.dtype == torch.bfloat16 and second.is_contiguous()
    assert workspace.idle_bytes == 0


def test_a_buffer_in_use_is_never_handed_out() -> None:
    workspace = Workspace()
    tensors = [workspace.take((ROWS, 2), _like()) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2]]


def test_a_buffer_more_than_twice_too_large_stays_for_a_larger_call() -> None:
    workspace = Workspace()
    large = workspace.take((ROWS, 16), _like())
    workspace.give(large)
    assert workspace.take((ROWS, 2), _like()).data_ptr() != large.data_ptr()
    assert workspace.take((ROWS, 12), _like()).data_ptr() == large.data_ptr()


def test_idle_bytes_are_bounded_and_the_oldest_buffer_goes_first() -> None:
    workspace = Workspace(max_idle_bytes=5 * MIN_BYTES)
    old, new = workspace.take((ROWS * 3,), _like()), workspace.take((ROWS * 4,), _like())
    workspace.give(old)
    workspace.give(new)
    assert workspace.idle_bytes == 4 * MIN_BYTES
    assert workspace.take((ROWS * 4,), _like()).data_ptr() == new.data_ptr()


def test_small_and_empty_tensors_are_left_to_malloc() -> None:
    workspace = Workspace()
    for shape in ((0, 7), (3, 5)):
        tensor = workspace.take(shape, _like())
        assert tensor.shape == shape
        workspace.give(tensor)
    assert workspace.idle_bytes == 0
