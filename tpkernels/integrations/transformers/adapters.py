"""Adapters of PEFT on a model of ``register()``: how they are merged.

PEFT cuts one half of an adapter as transformers cuts the layer below, and keeps the other half whole.  Its
``merge_and_unload`` multiplies the two, a DTensor and a plain tensor, which torch refuses ("got mixed torch.Tensor and
DTensor") outside of ``implicit_replication()``.  With ``safe_merge=True`` it assigns the sum to the ``data`` of a
DTensor, which torch drops without a word.  :func:`let_adapters_merge` puts the product into that context, and the sum
into its place.  A sum that is not finite on one rank is refused on all of them.

Assumes that PEFT is imported: it is what makes adapters.  It touches the names of PEFT's that :data:`NAMES` lists, and
refuses a PEFT that does not have them.
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

from tpkernels.nn.gathering import true_everywhere
from tpkernels.packages import needed

__all__ = ["check_half", "is_adapter", "let_adapters_merge"]

NAMES = ("get_delta_weight", "merge")
"""Of ``peft.tuners.lora.layer.Linear``."""


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
    """Let ``merge_and_unload`` multiply DTensors and plain tensors, and keep what it made, in this process.

    Raises:
        ValueError: this PEFT has not all of :data:`NAMES`.
    """
    with needed("peft", "merging adapters"):
        import peft
        from peft.tuners.lora import layer
    missing = [name for name in NAMES if name not in vars(layer.Linear)]
    if missing:
        raise ValueError(
            f"peft {peft.__version__} has no peft.tuners.lora.layer.Linear.{missing[0]}, which adapters on a parallel "
            "model need"
        )
    product: Callable[[Any, str], Tensor] = layer.Linear.get_delta_weight
    real_merge: Callable[..., None] = layer.Linear.merge

    @functools.wraps(product)
    def get_delta_weight(self: Any, adapter: str) -> Tensor:
        with implicit_replication():  # the plain half is the same on all ranks
            return product(self, adapter)

    @functools.wraps(real_merge)
    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if not safe_merge:
            return real_merge(self, False, adapter_names)
        held = [
            x for x in (self.get_base_layer().weight, getattr(self.get_base_layer(), "bias", None)) if x is not None
        ]
        before, merged = [x.data.clone() for x in held], list(self.merged_adapters)
        real_merge(self, False, adapter_names)
        if not all(true_everywhere(torch.isfinite(x.data)) for x in held):
            for x, values in zip(held, before, strict=True):
                x.data.copy_(values)
            self.merged_adapters[:] = merged
            raise ValueError(f"the merged weights would not be finite: one of the adapters {adapter_names} is broken")
        return None

    layer.Linear.get_delta_weight, layer.Linear.merge = get_delta_weight, merge
