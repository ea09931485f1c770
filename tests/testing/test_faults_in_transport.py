"""Chunks corrupted on their way through a real transport: the op runs on, and the numeric check names the place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm.transport import Transfer
from tpkernels.testing.expected import check_all_gather_matmul, check_matmul_reduce_scatter
from tpkernels.testing.faults import corrupt_receives
from tpkernels.testing.numeric import BoundExceeded
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WORLD, M, N, K = 3, 24, 20, 32


def lose_what_rank_one_sends(transfer: Transfer) -> None:
    if transfer.peer == 1:
        transfer.tensor.zero_()


def gather(corrupt: Callable[[Transfer], None] | None, implementation: str) -> str | None:
    """What the check says about rank 0's output while its received chunks are corrupted."""
    group, rank = dist.group.WORLD, dist.get_rank()
    shards = [payload((M, K), rank=r, name="x") for r in range(WORLD)]
    weight = payload((N, K), rank=rank, name="w")
    with corrupt_receives(corrupt) if corrupt and rank == 0 else nullcontext():
        y = tpk.all_gather_matmul(shards[rank], weight, group, implementation=implementation)
    try:
        check_all_gather_matmul(y, torch.cat(shards), weight)
    except BoundExceeded as error:
        return f"{error.box[0]} {error}"
    return None


def reduce(stale: bool, implementation: str) -> list[str | None]:
    """Two calls; on rank 0 the second receives what the first did."""
    group, rank = dist.group.WORLD, dist.get_rank()
    w_parts = [payload((N, K), rank=r, name="w") for r in range(WORLD)]
    earlier: dict[tuple[int, int], torch.Tensor] = {}

    def keep_or_replace(transfer: Transfer) -> None:
        key = (transfer.peer, transfer.chunk)
        if key in earlier:
            transfer.tensor.copy_(earlier[key])
        earlier[key] = transfer.tensor.clone()

    said: list[str | None] = []
    with corrupt_receives(keep_or_replace) if stale and rank == 0 else nullcontext():
        for call in range(2):
            x_parts = [payload((M, K), rank=r, call=call, name="x") for r in range(WORLD)]
            y = tpk.matmul_reduce_scatter(x_parts[rank], w_parts[rank], group, implementation=implementation)
            try:
                check_matmul_reduce_scatter(y, x_parts, w_parts, rank=rank)
            except BoundExceeded as error:
                said.append(str(error))
            else:
                said.append(None)
    return said


def test_a_lost_chunk_is_caught_in_the_rows_of_its_sender(ranks: Pools) -> None:
    assert ranks(WORLD).run(gather, None, "chunked") == [None] * WORLD
    first, *others = ranks(WORLD).run(gather, lose_what_rank_one_sends, "chunked")
    assert others == [None] * (WORLD - 1)
    assert first is not None and first.startswith(f"({M}, {2 * M}) all_gather_matmul: {M * N} of {WORLD * M * N}")


def test_a_stale_chunk_is_caught_on_the_rank_that_received_it(ranks: Pools) -> None:
    assert ranks(WORLD).run(reduce, False, "chunked") == [[None, None]] * WORLD
    (first_call, second_call), *others = ranks(WORLD).run(reduce, True, "chunked")
    assert others == [[None, None]] * (WORLD - 1)
    assert first_call is None
    assert second_call is not None and "matmul_reduce_scatter on rank 0" in second_call
