"""Adapters of PEFT on a model of ``register()``: how they are merged.

PEFT cuts one half of an adapter as transformers cuts the layer below, and keeps the other half whole.  Its
``merge_and_unload`` multiplies the two, a DTensor and a plain tensor, which torch refuses ("got mixed torch.Tensor and
DTensor") outside of ``implicit_replication()``.  :func:`let_adapters_merge` puts the product into that context.

Assumes that PEFT is imported: it is what makes adapters.  It touches one name of PEFT's, listed in :data:`NAME`, and
refuses a PEFT that does not have it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from tpkernels.packages import needed

__all__ = ["check_half", "is_adapter", "let_adapters_merge"]

NAME = "peft.tuners.lora.layer.Linear.get_delta_weight"


def is_adapter(module_name: str) -> bool:
    """Whether a module that a style is asked for is half of an adapter, by the name that PEFT gives it."""
    return re.search(r"\.lora_[AB]\.", module_name) is not None


def check_half(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse half of an adapter whose parts do not make up the whole.

    PEFT 0.21 sizes it by what a rank holds of the layer below.  Where FSDP has cut that, too (``fsdp_size`` beside
    ``tp_size``), it is too small, with transformers' own styles as well.

    Raises:
        ValueError: a rank's part has another size than tensor parallelism gives it.
    """
    weight = module.weight
    if not isinstance(weight, DTensor) or not isinstance(weight.placements[0], Shard):
        return
    dim = weight.placements[0].dim
    parts = torch.empty(weight.shape[dim], device="meta").chunk(mesh.size())
    rank, held = mesh.get_local_rank(), weight.to_local().shape[dim]
    if held != (len(parts[rank]) if rank < len(parts) else 0):
        raise ValueError(
            f"PEFT gave this rank {held} of the {weight.shape[dim]} features of {name}, which {mesh.size()} ranks of "
            "tensor parallelism share: it does not know a layer that fsdp_size has cut, too; add adapters before "
            "prepare(), with replicas or without"
        )


@functools.lru_cache(maxsize=1)
def let_adapters_merge() -> None:
    """Let ``merge_and_unload`` multiply DTensors and plain tensors, in this process.

    Raises:
        ValueError: this PEFT has no :data:`NAME`.
    """
    with needed("peft", "merging adapters"):
        import peft
        from peft.tuners.lora import layer
    real: Callable[[Any, str], Tensor] | None = getattr(layer.Linear, "get_delta_weight", None)
    if real is None:
        raise ValueError(f"peft {peft.__version__} has no {NAME}, which adapters on a model of register() need")

    @functools.wraps(real)
    def get_delta_weight(self: Any, adapter: str) -> Tensor:
        with implicit_replication():  # the plain half is the same on all ranks
            return real(self, adapter)

    layer.Linear.get_delta_weight = get_delta_weight
