"""Embeddings whose table is cut by its rows: each rank looks up its own rows, and the sum over the ranks is exact.

It owns which tables can be cut, and the calls of ``Embedding`` and ``ReversibleEmbedding`` on a part.  The head of a
``ReversibleEmbedding`` is the same table: it makes this rank's logits, which are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut, even_cut
from tpkernels.ops import all_gather, all_reduce, copy_matmul, copy_to_group

__all__ = ["lookup", "table_cuts", "why_table_stays_whole"]


def _is_table(layer: Any) -> bool:
    keras = backend.keras_module()
    return type(layer) is keras.layers.Embedding or _is_reversible(layer)


def _is_reversible(layer: Any) -> bool:
    """Keras's own class, or KerasHub's of the same name."""
    keras = backend.keras_module()
    kind = type(layer)
    known = kind.__module__.startswith(("keras.", "keras_hub."))
    return isinstance(layer, keras.layers.Embedding) and kind.__name__ == "ReversibleEmbedding" and known


def table_cuts(layer: Any, world_size: int) -> dict[str, Cut] | None:
    """Cuts of the table by its rows, of its LoRA factor, and of a head that is not tied; None for other layers."""
    if not _is_table(layer) or getattr(layer, "quantization_mode", None) is not None:
        return None
    dims = [(backend.table_of(layer), 0)]
    if layer.lora_enabled:
        dims.append((layer.lora_embeddings_a, 0))
    if _is_reversible(layer) and not layer.tie_weights:
        dims.append((layer.reverse_embeddings, 1))
    return {v.path: even_cut(backend.plain_shape(v), dim, world_size) for v, dim in dims}


def why_table_stays_whole(layer: Any, world_size: int, layers: Iterable[Any]) -> str | None:
    """The reason not to cut a table that could be, or None."""
    rows, features = backend.plain_shape(backend.table_of(layer))
    own = set(map(id, backend.variables_of(layer)))
    for other in layers:
        if other is not layer and own & set(map(id, backend.variables_of(other))):
            return f"shares a weight with {other.name}"
    if rows < world_size:
        return f"has fewer rows ({rows}) than there are ranks"
    if rows <= features:
        return f"a table of {rows} rows is cheaper than a sum"
    return None


def lookup(layer: Any, cut: Cut, rank: int, group: Any) -> Callable[..., Any]:
    """The call of a table of which this rank has the rows of ``cut``."""
    keras = backend.keras_module()
    ((start, stop),) = cut.ranges[rank]
    total = cut.shape[0]

    def table() -> Tensor:
        weight: Tensor = backend.table_of(layer).value
        if not layer.lora_enabled:
            return weight
        b = copy_to_group(layer.lora_embeddings_b.value, group)
        scaled = (layer.lora_alpha / layer.lora_rank) * torch.matmul(layer.lora_embeddings_a.value, b)
        weight = (weight + scaled).to(backend.torch_dtype(layer.compute_dtype))
        return weight

    def look_up(ids: Any) -> Any:
        if ids.dtype not in (torch.int32, torch.int64):
            ids = keras.ops.cast(ids, "int32")
        weight = table()
        if ids.is_meta:
            return keras.ops.cast(torch.nn.functional.embedding(ids, weight), layer.compute_dtype)
        ids = torch.where(ids < 0, ids + total, ids)
        if not torch.compiler.is_compiling() and not ids.is_cuda and ids.numel():
            low, high = ids.min().item(), ids.max().item()
            if low < 0 or high >= total:
                raise IndexError(f"ids from {low} to {high} are not all in a table of {total} rows ({layer.name})")
        others = (ids < start) | (ids >= stop)
        rows = torch.nn.functional.embedding((ids - start).masked_fill(others, 0), weight)
        out = all_reduce(rows.masked_fill(others.unsqueeze(-1), 0), group)
        return keras.ops.cast(out, layer.compute_dtype)

    def head(x: Any) -> Any:
        weight = table() if layer.tie_weights else layer.reverse_embeddings.value.t()
        if layer.reverse_dtype is not None:
            x, weight = keras.ops.cast(x, layer.reverse_dtype), keras.ops.cast(weight, layer.reverse_dtype)
        if x.is_meta:
            logits: Any = x.new_empty((*x.shape[:-1], total))
        else:
            part = copy_matmul(x, weight.to(x.dtype).contiguous(), group)
            logits = all_gather(part, group, dim=-1, shard_sizes=cut.sizes, replicated_grad=True)
        cap = getattr(layer, "logit_soft_cap", None)
        return logits if cap is None else keras.ops.multiply(keras.ops.tanh(keras.ops.divide(logits, cap)), cap)

    if not _is_reversible(layer):
        return lambda inputs: look_up(inputs)

    def call(inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            return head(inputs)
        out = look_up(inputs)
        if layer.mask_zero:
            backend.set_mask(out, keras.ops.not_equal(inputs, 0))
        return out

    return call
