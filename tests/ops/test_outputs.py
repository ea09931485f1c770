"""What a call returned is the caller's: later calls, which reuse buffers, leave it alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.ops.support import IMPLEMENTATIONS
from tpkernels.backends.point_to_point import workspace
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

ROWS, K, N = 768, 192, 160  # shards above workspace.MIN_BYTES, so that their buffers are reused


def _changed_outputs(implementation: str) -> list[str]:
    """Names of outputs that later calls changed."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for call in range(4):
        torch.manual_seed(100 * call + rank)
        x, w = torch.randn(ROWS, K), torch.randn(N, K)
        results = {
            "all_gather": tpk.all_gather(x, group),
            "reduce_scatter": tpk.reduce_scatter(x, group),
            "all_reduce": tpk.all_reduce(x, group),
            "matmul_reduce_scatter": tpk.matmul_reduce_scatter(x, w, group, implementation=implementation),
            "matmul_all_reduce": tpk.matmul_all_reduce(x, w, group, implementation=implementation),
        }
        y, whole = tpk.all_gather_matmul(x, w, group, return_gathered=True, implementation=implementation)
        features = tpk.all_gather_matmul(
            x, torch.randn(N, K * size), group, gather_dim=1, implementation=implementation
        )
        for name, output in {**results, "y": y, "whole": whole, "features": features}.items():
            kept.append((f"{name} of call {call}", output, output.clone()))
    if implementation != "shared_memory":  # whose two slots take turns: every call but the first two reuses one
        assert workspace.shared.idle_bytes > 0, "no buffer was reused, so this test shows nothing"
    return [name for name, output, copy in kept if not torch.equal(output, copy)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_outputs_are_unchanged_by_later_calls(ranks: Pools, world_size: int, implementation: str) -> None:
    assert ranks(world_size).run(_changed_outputs, implementation) == [[]] * world_size
