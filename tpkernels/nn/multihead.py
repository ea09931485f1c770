"""``torch.nn.MultiheadAttention`` with its heads cut over the ranks: whole tensors go in and come out.

::

    q, k, v = this rank's heads of the three projections
    y       = all-reduce of softmax(q k^T / sqrt(head_dim) + mask) v @ w_out_r^T, plus bias

Dropout of attention weights draws other numbers on every rank; the rest is as in torch, for self- and cross-attention.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.packed_parameter import PackedParameter
from tpkernels.nn.parameters import tp_mesh
from tpkernels.nn.random import sharded_rng
from tpkernels.nn.row import RowParallelLinear
from tpkernels.nn.shared_input import run_together
from tpkernels.ops import all_gather
from tpkernels.partition import as_shard, offsets

__all__ = ["ParallelMultiheadAttention", "why_not_parallel"]

_PROJECTIONS = ("query", "key", "value")


def why_not_parallel(attention: nn.MultiheadAttention, world_size: int) -> str | None:
    """Why the heads of ``attention`` cannot be cut over ``world_size`` ranks, or None."""
    if attention.num_heads < world_size:
        return f"has {attention.num_heads} heads, fewer than there are ranks ({world_size})"
    if attention.head_dim == 1 and not as_shard(attention.num_heads, world_size):
        return f"has {attention.num_heads} heads of one feature, which torch.chunk does not deal to {world_size} ranks"
    if not attention._qkv_same_embed_dim:
        return "has keys or values of another width"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "adds keys and values of its own"
    return None


class ParallelMultiheadAttention(nn.Module):
    """Takes and gives what ``nn.MultiheadAttention`` does, equal on all ranks; made by :meth:`from_attention`.

    The packed projection becomes three layers ``query``, ``key`` and ``value``; ``out_proj`` keeps its name.

    Examples:
        >>> plain = nn.MultiheadAttention(16, 4, batch_first=True)
        >>> attention = tpk.nn.ParallelMultiheadAttention.from_attention(plain, mesh["tp"])
        >>> x = torch.ones(1, 5, 16)
        >>> attention(x, x, x, need_weights=False)[0].shape
        torch.Size([1, 5, 16])
    """

    in_proj_bias = None
    """torch's encoder layer takes this for a reason not to take the weights apart itself."""
    _qkv_same_embed_dim = True

    def __init__(self) -> None:
        raise TypeError("ParallelMultiheadAttention is made by from_attention")

    @classmethod
    def from_attention(
        cls, attention: nn.MultiheadAttention, group: GroupLike, *, implementation: str = "auto"
    ) -> Self:
        """The same attention, cut; ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

        Raises:
            ValueError: a rank would be without a head, or an option that is not there.
        """
        mesh = tp_mesh(group, attention)
        why = why_not_parallel(attention, mesh.size())
        if why is not None:
            raise ValueError(f"the nn.MultiheadAttention {why}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.embed_dim, module.num_heads, module.head_dim = (
            attention.embed_dim,
            attention.num_heads,
            attention.head_dim,
        )
        module.dropout, module.batch_first = attention.dropout, attention.batch_first
        weight = attention.in_proj_weight
        bias: nn.Parameter | None = attention._parameters["in_proj_bias"]
        for index, name in enumerate(_PROJECTIONS):
            linear = nn.Linear(module.embed_dim, module.embed_dim, bias=False, device="meta")
            start = index * module.embed_dim
            linear.weight = _rows(weight, start, module.embed_dim)
            linear.register_parameter("bias", None if bias is None else _rows(bias, start, module.embed_dim))
            column = ColumnParallelLinear.from_linear(linear, mesh, unit=module.head_dim, implementation=implementation)
            module.add_module(name, column)
        module.out_proj = RowParallelLinear.from_linear(
            attention.out_proj, mesh, unit=module.head_dim, implementation=implementation
        )
        return module.train(attention.training)

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    query: ColumnParallelLinear
    key: ColumnParallelLinear
    value: ColumnParallelLinear
    out_proj: RowParallelLinear

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the parameters live on."""
        return self.out_proj.mesh

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of each rank."""
        return tuple(size // self.head_dim for size in self.query.shard_sizes)

    @property
    def in_proj_weight(self) -> PackedParameter:
        """Shape, dtype and device of the packed weight, for ``get_model_state_dict``, which looks for its name."""
        parts = [getattr(self, name).weight for name in _PROJECTIONS]
        return PackedParameter.of("in_proj_weight", (3 * self.embed_dim, self.embed_dim), parts)

    def packed_parameters(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """As :meth:`PackedColumnParallelLinear.packed_parameters`."""
        kinds = ("weight",) if self.query.bias is None else ("weight", "bias")
        return {f"in_proj_{kind}": (0, tuple(f"{name}.{kind}" for name in _PROJECTIONS)) for kind in kinds}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``; masks are the whole model's, a mask per head too."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "attention whose heads are cut takes no nested tensors: pass padded ones with a key_padding_mask"
            )
        if key is query and value is query:
            runs: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
        else:
            runs = ((0,), (1, 2)) if value is key else ((0,), (1,), (2,))
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        layers, inputs = (self.query, self.key, self.value), (query, key, value)
        projected: list[Tensor] = []
        for run in runs:  # one sum of the gradient for all that read one tensor
            projected += run_together([layers[i] for i in run], inputs[run[0]], self.mesh, None)
        q, k, v = map(self._heads, projected)
        mask = self._mask(q, k, key_padding_mask, attn_mask, batched)
        if mask is None and is_causal:
            raise ValueError("is_causal=True is a hint about attn_mask, which must be given, too (as in torch)")
        rate = self.dropout if self.training else 0.0
        weights = None
        with sharded_rng(self.mesh) if rate else nullcontext():
            if need_weights:
                scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
                weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
                context = weights @ v
            else:  # as torch: its scores and their softmax are fp32 where numbers are bf16
                context = F.scaled_dot_product_attention(q, k, v, mask, rate)
        # The layout of the output is made before the projection, whose result is returned as it is, not as a view.
        if not batched:
            context, weights = context[0], None if weights is None else weights[0]
            y = self.out_proj(context.transpose(0, 1).flatten(1))
        elif self.batch_first:
            y = self.out_proj(context.transpose(1, 2).flatten(2))
        else:
            y = self.out_proj(context.permute(2, 0, 1, 3).flatten(2))
        return y, None if weights is None else self._shown(weights, average_attn_weights)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None, batched: bool
    ) -> Tensor | None:
        """Both masks as numbers to add, ``[B or 1, heads or 1, S, T]``."""
        total: Tensor | None = None
        if padding is not None:
            padding = padding if batched else padding.unsqueeze(0)
            total = _additive(padding, q.dtype)[:, None, None, :]
        if attention is not None:
            mask = _additive(attention, q.dtype)
            if mask.dim() == 3:  # one per batch and head
                mask = mask.view(q.shape[0], self.num_heads, *mask.shape[1:])
                rank = self.mesh.get_local_rank()
                mask = mask.narrow(1, offsets(self.heads)[rank], self.heads[rank])
            total = mask if total is None else total + mask
        return total

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        """All heads' weights ``[..., heads, S, T]``, or their mean."""
        whole = all_gather(weights.contiguous(), self.mesh, dim=-3, shard_sizes=self.heads, replicated_grad=True)
        return whole.mean(-3) if average else whole

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _rows(parameter: nn.Parameter, start: int, size: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().narrow(0, start, size), requires_grad=parameter.requires_grad)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zeros: Any = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    result: Tensor = zeros.masked_fill(mask, float("-inf"))
    return result
