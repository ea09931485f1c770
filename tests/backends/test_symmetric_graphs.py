"""`symmetric` and CUDA graphs: memory that they would take away, and replays beside other calls; on emulated GPUs.

What is played: the pool that torch opens while a graph is warmed up, whether a stream records, and a replay, which is a
call with the slots and the memory that were current when it was captured.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

pytest.importorskip("triton")

from tests.backends import emulated
from tests.backends.contract import JUDGES
from tests.backends.emulated import EmulatedDevice, Emulation
from tests.backends.test_symmetric import case_of
from tpkernels.comm.groups import resolve
from tpkernels.comm.symmetric_channels import SymmetricChannels
from tpkernels.dispatch import OPS
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 120.0


def left_in_the_pool(emulation: Emulation, faulty: bool) -> list[str]:
    """What outlives a warm-up in which the group is set up and every op is called for the first time."""
    fault = mock.patch.object(emulated, "outside_of_pools", lambda make: make())
    with emulation.group() as made:
        group = resolve(made)
        assert group.symmetric is not None
        before, device = group.symmetric, group.symmetric.device
        assert isinstance(device, EmulatedDevice)
        with device.warming_up() as left:
            with fault if faulty else mock.patch.dict({}):
                channels = SymmetricChannels(group, device)
                channels.checks_first_use = True
                group.symmetric = channels
                for op in OPS:
                    JUDGES["values"](case_of(op), made)
        for op in OPS:
            JUDGES["values"](case_of(op, call=1), made)
        group.symmetric = before
        channels.check()
        channels.close()
    return left


@pytest.mark.parametrize("faulty", [False, True], ids=["as it is", "tables from the pool"])
def test_a_warm_up_leaves_nothing_in_the_pool_of_its_graph(pools: Pools, emulation: Emulation, faulty: bool) -> None:
    for left in pools(2).run(left_in_the_pool, replace(emulation, timeout=20.0), faulty, timeout=PATIENCE_S):
        assert bool(left) is faulty, left
        if faulty:  # the state, flags, and tables of both kinds of GEMM
            assert "torch.uint8[32]" in left and sum("int64" in text for text in left) >= 3, left
