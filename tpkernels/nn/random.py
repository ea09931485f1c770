"""Random numbers by region: equal on all ranks where activations are, different where every rank has its own part.

A dropout mask over a replicated activation must be the same on all ranks, or they stop being replicas.  Over a shard
(heads, hidden features, a part of the sequence) it must differ, or the model repeats one mask.  torch's default
generator, seeded alike on the ranks of a group, serves the former.  For the latter, :func:`sharded_rng` gives a seed
that is drawn from the default generator and mixed with the rank.

No second state has to be saved.  The draw advances the default generators of all ranks alike, and
``torch.utils.checkpoint``, which restores the default generator before it computes again, thereby restores the seeds of
all regions inside.  (Megatron-LM keeps named generator states instead, and needs a checkpoint function that knows them:
``megatron/core/tensor_parallel/random.py``.)

It assumes one seed on all ranks of the group (``torch.manual_seed(seed + data_parallel_rank)``) and equal draws since;
:func:`check_rng` says whether that holds.  ``tpk.parallelize``, and every layer that is made by hand, puts generators
that differ in step with the first rank's, or raises (:mod:`tpkernels.nn.same_weights`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpkernels.comm.groups import GroupLike, process_group, resolve
from tpkernels.comm.same_bits import refuse
from tpkernels.ops.agreed_call import exchange

__all__ = ["Dropout", "check_rng", "sharded_rng"]

_MASK = (1 << 64) - 1


@contextmanager
def sharded_rng(group: GroupLike) -> Iterator[None]:
    """Inside, torch's default generators (CPU, current CUDA device) are this rank's own; outside, ranks share them.

    All ranks of the group must enter it in the same order.  With one rank it does nothing, so that results equal those
    of the model without tensor parallelism.  Not for regions that are compiled or captured into a CUDA graph.

    Examples:
        >>> with tpk.nn.sharded_rng(mesh["tp"]):
        ...     mine = torch.rand(4)
        >>> both = tpk.all_gather(mine, mesh["tp"])
        >>> bool((both[:4] == both[4:]).any())
        False
    """
    refuse(group, "sharded_rng", "each rank draws numbers of its own")
    pg = process_group(group)
    if pg.size() == 1:
        yield
        return
    shared = int(torch.randint(torch.iinfo(torch.int64).max, (), dtype=torch.int64))
    # Not asked of the group alone: gloo serves CUDA tensors as well, and needs no GPU.
    on_gpu = resolve(pg).backends.own_device == "cuda" or torch.cuda.is_initialized()
    devices = [torch.cuda.current_device()] if on_gpu else []
    with torch.random.fork_rng(devices=devices):
        seed = _mix(shared, pg.rank())
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def _mix(seed: int, rank: int) -> int:
    """Seeds of neighbouring ranks share no bits: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = (seed + (rank + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1  # generators take 63 bits


class Dropout(nn.Dropout):
    """``nn.Dropout`` for activations between tensor-parallel layers.

    Args:
        sharded: the input is this rank's part of something (with sequence parallelism: of the sequence), not a replica.

    Examples:
        >>> drop = tpk.nn.Dropout(0.5, mesh["tp"], sharded=True)  # another mask on each rank
        >>> drop.eval()(torch.ones(3))
        tensor([1., 1., 1.])
    """

    def __init__(self, p: float, group: GroupLike, *, sharded: bool) -> None:
        super().__init__(p)
        self.group, self.sharded = group, sharded

    def forward(self, x: Tensor) -> Tensor:
        if not (self.sharded and self.training and self.p):
            return super().forward(x)
        with sharded_rng(self.group):
            return super().forward(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sharded={self.sharded}"


def check_rng(group: GroupLike) -> None:
    """Compare the ranks' default CPU generators; a collective call.

    Examples:
        >>> tpk.nn.check_rng(mesh["tp"])

    Raises:
        ValueError: they differ, on every rank: replicas would drop out different elements.
    """
    mine = hashlib.blake2b(bytes(torch.get_rng_state().tolist()), digest_size=8).hexdigest()
    states = [str(said["state"]) for said in exchange(resolve(group), "check_rng", {"state": mine})]
    if len(set(states)) > 1:
        raise ValueError(
            f"the default generators of the group's ranks differ (digests by rank: {states}): seed them alike, and "
            "draw what only some ranks need inside sharded_rng"
        )
