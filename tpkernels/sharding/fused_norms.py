"""Tie the rows and norms of a plan, so that a sum over the ranks and the norm behind it are one op.

It owns the choice of pairs that are of one block.  With sequence parallelism
:mod:`tpkernels.sharding.sequence_parallel` tells the ties how the residual is cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.fused_norm import fuse

__all__ = ["fuse_norms"]


def fuse_norms(
    fused: Sequence[tuple[str, str, float]], modules: Mapping[str, nn.Module], mesh: DeviceMesh, *, always: bool
) -> None:
    """Tie each row of ``fused``, a list of rows, norms and epsilons, to its norm; the layers are swapped already."""
    for row, norm, epsilon in fused if mesh.size() > 1 else ():
        fuse(modules[row], modules[norm], epsilon, same_block=_block(row) == _block(norm), always=always)


def _block(path: str) -> str:
    """The path up to its last number, a block's place in a list: ``layers.3`` of ``layers.3.mlp.down``."""
    found = re.match(r"(?:.*\.)?\d+(?=\.|$)", path)
    return found.group() if found is not None else ""
