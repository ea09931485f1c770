"""Adapters of PEFT on a model of ``register()``: how they are merged.

PEFT cuts one half of an adapter as transformers cuts the layer below, and keeps the other half whole.  Its
``merge_and_unload`` multiplies the two, a DTensor and a plain tensor, which torch refuses ("got mixed torch.Tensor and
DTensor") outside of ``implicit_replication()``.  With ``safe_merge=True`` it assigns the sum to the ``data`` of a
DTensor, which torch drops without a word.  :func:`let_adapters_merge` puts the product into that context, and the sum
into its place.  A sum that is not finite on one rank is refused on all of them.  The halves of an adapter on a
convolution are convolutions, whose product torch does not know for DTensors: it is made of whole halves on every rank.

Assumes that PEFT is imported: it is what makes adapters.  It touches the names of PEFT's that :data:`NAMES` lists, and
refuses a PEFT that does not have them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from tpkernels.nn.gathering import gathered, true_everywhere
from tpkernels.packages import needed

__all__ = ["check_half", "is_adapter", "let_adapters_merge"]

KINDS = ("Linear", "_ConvNd")
"""Classes of ``peft.tuners.lora.layer``."""
NAMES = ("get_delta_weight", "merge")
"""Of each of them."""


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
    kinds: dict[str, Any] = {kind: getattr(layer, kind, None) for kind in KINDS}
    for kind, cls in kinds.items():
        missing = [name for name in NAMES if name not in vars(cls)] if cls is not None else NAMES
        if missing:
            raise ValueError(
                f"peft {peft.__version__} has no peft.tuners.lora.layer.{kind}.{missing[0]}, which adapters on a "
                "parallel model need"
            )
    products = {"Linear": _product, "_ConvNd": _product_of_convolutions}
    for kind, cls in kinds.items():
        cls.get_delta_weight, cls.merge = products[kind](cls.get_delta_weight), _merge(cls.merge)


def _product(real: Callable[[Any, str], Tensor]) -> Callable[[Any, str], Tensor]:
    """PEFT's ``get_delta_weight``, for halves of which a rank has a part."""

    @functools.wraps(real)
    def get_delta_weight(self: Any, adapter: str) -> Tensor:
        with implicit_replication():  # the plain half is the same on all ranks
            return real(self, adapter)

    return get_delta_weight


def _product_of_convolutions(real: Callable[[Any, str], Tensor]) -> Callable[[Any, str], Tensor]:
    """The same where both halves are convolutions; what it gives is cut as the weight below is."""

    @functools.wraps(real)
    def get_delta_weight(self: Any, adapter: str) -> Tensor:
        with _whole(self.lora_A[adapter]), _whole(self.lora_B[adapter]):
            product = real(self, adapter)
        weight = self.get_base_layer().weight
        return _like(weight, product) if isinstance(weight, DTensor) else product

    return get_delta_weight


@contextmanager
def _whole(half: nn.Module) -> Iterator[None]:
    """Let a module have all of its weight; a collective call."""
    part = half._parameters["weight"]
    assert part is not None
    half._parameters["weight"] = nn.Parameter(gathered(part), requires_grad=False)
    try:
        yield
    finally:
        half._parameters["weight"] = part


def _like(weight: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of what all ranks have, as it has a part of ``weight``."""
    mesh = weight.device_mesh
    same: DTensor = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return same.redistribute(placements=weight.placements)


def _merge(real: Callable[..., None]) -> Callable[..., None]:
    """PEFT's ``merge``, which keeps a sum of DTensors, and refuses one that is not finite on all ranks alike."""

    @functools.wraps(real)
    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if not safe_merge:
            with implicit_replication():
                return real(self, False, adapter_names)
        held = [
            x for x in (self.get_base_layer().weight, getattr(self.get_base_layer(), "bias", None)) if x is not None
        ]
        before, merged = [x.data.clone() for x in held], list(self.merged_adapters)
        with implicit_replication():
            real(self, False, adapter_names)
        if not all(true_everywhere(torch.isfinite(x.data)) for x in held):
            for x, values in zip(held, before, strict=True):
                x.data.copy_(values)
            self.merged_adapters[:] = merged
            raise ValueError(f"the merged weights would not be finite: one of the adapters {adapter_names} is broken")
        return None

    return merge
