"""Counts the bytes that really travel in a step of a parallelized model, as messages of the transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.nn.reference import tp_mesh, without_shared_memory
from tpkernels.backends.point_to_point import chunked, exchange
from tpkernels.comm import transport
from tpkernels.comm.groups import resolve


def bytes_of(step: Callable[[], object]) -> int:
    """Bytes that all ranks send in the second of two calls of ``step``; the first one agrees with the peers."""
    state = resolve(tp_mesh())
    without_shared_memory(state, "a test counts messages")
    state.agreed.clear()
    state.checked.clear()
    sent: Counter[str] = Counter()
    real = transport.exchange

    def counting(group: Any, tag: int, chunk: int, sends: Any, recvs: Any, *rest: Any) -> Any:
        sent["bytes"] += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        return real(group, tag, chunk, sends, recvs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        step()
        for module in (transport, exchange):
            patch.setattr(module, "exchange", counting)
        # What a machine's measured costs pick must not matter: sums that chunked makes in one round are more bytes.
        patch.setattr(chunked, "_in_one_round", lambda problem, costs: problem.world_size == 2)
        step()
    total = torch.tensor(sent["bytes"])
    dist.all_reduce(total)
    return int(total)
