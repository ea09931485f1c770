"""What stands for a packed weight computes part by part, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tpkernels.nn.packed_parameter import PackedParameter

pytestmark = pytest.mark.cpu


def packed(*sizes: int, features: int = 3) -> PackedParameter:
    parts = [torch.randn(size, features, generator=torch.Generator().manual_seed(size)) for size in sizes]
    return PackedParameter.of("weight", (sum(sizes), features), parts)


def whole(tensor: PackedParameter) -> torch.Tensor:
    return torch.cat(tensor.parts, tensor.along)


def test_an_adapter_is_merged_into_the_parts() -> None:
    """As PEFT does: with a product, scaled, transposed, added in place or assigned."""
    base, last, first = packed(2, 4), packed(2, 4, features=2), torch.randn(2, 3)
    delta = last @ first * 0.5
    assert delta.shape == (6, 3) and torch.equal(whole(delta), whole(last) @ first * 0.5)
    assert delta.T.shape == (3, 6) and torch.equal(whole(delta.T), whole(delta).T)
    expected = whole(base) + whole(delta)
    copy = base.data.clone()
    copy += delta
    assert torch.isfinite(copy).all() and not torch.equal(whole(base), expected)
    base.data = copy
    assert torch.equal(whole(base), expected)
    base.data += delta
    assert torch.equal(whole(base), expected + whole(delta))


def test_what_is_not_done_part_by_part_is_refused() -> None:
    weight = packed(2, 4)
    for wrong in (lambda: weight.sum(), lambda: weight.T.sum(), lambda: weight.sub(1)):
        with pytest.raises(TypeError, match="has no values of its own"):
            wrong()
    with pytest.raises(TypeError, match="what has other parts"):
        weight.data.add_(packed(4, 2))
    assert (weight.shape, weight.dtype, weight.device.type) == ((6, 3), torch.float32, "cpu")
