"""Attention whose heads are cut over the ranks of a group.

::

    q, k, v = projections of this rank's heads; one gather of x, or one all-reduce of dx, serves the three
    c_h     = softmax(q_h k_g(h)^T / sqrt(head_dim) + mask) v_g(h),   g(h) = h * num_kv_heads // num_heads
    y       = reduce-scatter or all-reduce of c @ w_out_r^T, plus bias

It owns which heads a rank has, and which key and value heads they need.  Query heads are cut as ``torch.chunk`` cuts,
evenly or not (10 over 4 ranks: 3, 3, 3, 1).  Key and value heads are cut alike if every rank's queries need exactly the
heads that such a cut gives it.  Otherwise (fewer of them than ranks, or groups that straddle two ranks) every rank
keeps all of their weights and computes the heads that it needs, and the gradients are summed over the group.

Parameters have one dimension for heads, so that the cut is DTensor's ``Shard`` at every number of ranks:
``query.weight`` is ``[num_heads, head_dim, d_model]``, ``out.weight`` is ``[d_model, num_heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.nn.random import sharded_rng
from tpkernels.nn.rotary import apply_rotary
from tpkernels.ops import all_gather_matmul, copy_matmul, copy_to_group, matmul_all_reduce, matmul_reduce_scatter
from tpkernels.partition import chunk_sizes, offsets

__all__ = ["ParallelAttention"]


class _Heads(nn.Module):
    """The parameters of a projection to or from heads; cut over the ranks, or whole on every rank."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, mesh: DeviceMesh, cut: tuple[int | None, int | None]
    ) -> None:
        super().__init__()
        for name, tensor, dim in (("weight", weight, cut[0]), ("bias", bias, cut[1])):
            parameter = None
            if tensor is not None and dim is not None:
                parameter = shard_parameter(tensor, mesh, dim, requires_grad=tensor.requires_grad)
            elif tensor is not None:
                parameter = replicate_parameter(tensor, mesh, requires_grad=tensor.requires_grad)
            self.register_parameter(name, parameter)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, bias={self.bias is not None}"


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query self-attention with its heads cut over the ranks.

    x and y are ``[B, S, d_model]`` (``[S, B, d_model]`` for ``sequence_dim=0``), equal on all ranks; with
    ``sequence_parallel`` this rank's part of S.

    Args:
        num_heads: query heads; need not divide by the number of ranks.
        num_kv_heads: key and value heads, which divide ``num_heads``; default: as many.
        head_dim: default ``d_model / num_heads``.
        causal: each position sees itself and those before it.
        rotary_base: turn queries and keys by position (:func:`apply_rotary`) with this base; None: not at all.
        rotary_interleaved: which features make a pair.
        dropout: of attention weights in training; every rank draws its own, see :mod:`tpkernels.nn.random`.

    The others are as in :class:`ColumnParallelLinear`.  Under one seed the initial weights are those of ``nn.Linear``
    layers made in the order query, key, value, out.

    Examples:
        >>> attention = tpk.nn.ParallelAttention(16, 4, mesh["tp"], num_kv_heads=2, causal=True)
        >>> attention(torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 16])

    Raises:
        ValueError: bad arguments, with names and values.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        group: GroupLike,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        causal: bool = False,
        rotary_base: float | None = None,
        rotary_interleaved: bool = False,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if head_dim is None and (num_heads < 1 or d_model % num_heads):
            raise ValueError(f"d_model ({d_model}) must be a multiple of num_heads ({num_heads}), or pass head_dim")
        width = d_model // num_heads if head_dim is None else head_dim
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(num_heads, kv_heads, width, rotary_base, dropout, sequence_dim)
        sizes = (d_model, num_heads * width), (d_model, kv_heads * width), (d_model, kv_heads * width)
        linears = [
            nn.Linear(*size, bias, device=device, dtype=dtype) for size in (*sizes, (num_heads * width, d_model))
        ]
        super().__init__()
        self._set(num_heads, kv_heads, causal, rotary_base, rotary_interleaved, dropout)
        self._set_parallel(sequence_parallel, sequence_dim, save_gathered, implementation)
        self._take(linears, tp_mesh(group, device))

    @classmethod
    def from_linears(
        cls,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
        out: nn.Linear,
        group: GroupLike,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        causal: bool = False,
        rotary_base: float | None = None,
        rotary_interleaved: bool = False,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        implementation: str = "auto",
    ) -> Self:
        """The same attention, cut; weights are compared first (:func:`init_weights`); the linears stay."""
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or query.out_features % num_heads:
            raise ValueError(f"query's features ({query.out_features}) must be a multiple of num_heads ({num_heads})")
        width = query.out_features // num_heads
        _check_heads(num_heads, kv_heads, width, rotary_base, dropout, sequence_dim)
        for name, linear in (("key", key), ("value", value)):
            if linear.out_features != kv_heads * width:
                raise ValueError(
                    f"{name} has {linear.out_features} features, but num_kv_heads ({kv_heads}) of {width} are "
                    f"{kv_heads * width}"
                )
        if out.in_features != query.out_features:
            raise ValueError(f"out takes {out.in_features} features, but query has {query.out_features}")
        widths = {linear.in_features for linear in (query, key, value)}
        if len(widths) > 1:
            raise ValueError(f"query, key and value must take the same number of features, got {sorted(widths)}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._set(num_heads, kv_heads, causal, rotary_base, rotary_interleaved, dropout)
        module._set_parallel(sequence_parallel, sequence_dim, save_gathered, implementation)
        module._take([query, key, value, out], tp_mesh(group, query))
        return module.train(query.training)

    def _set(
        self, heads: int, kv_heads: int, causal: bool, base: float | None, interleaved: bool, dropout: float
    ) -> None:
        self.num_heads, self.num_kv_heads, self.causal = heads, kv_heads, causal
        self.rotary_base, self.rotary_interleaved, self.dropout = base, interleaved, dropout

    def _set_parallel(self, parallel: bool, dim: int, save_gathered: bool, implementation: str) -> None:
        dispatch.check_name("all_gather_matmul" if parallel else "matmul_all_reduce", implementation)
        self.sequence_parallel, self.sequence_dim = parallel, dim
        self.save_gathered, self.implementation = save_gathered, implementation

    def _take(self, linears: Sequence[nn.Linear], mesh: DeviceMesh) -> None:
        """Make this rank's parts of query, key, value and out the parameters."""
        query, key, value, out = linears
        self.d_model, self.head_dim = query.in_features, query.out_features // self.num_heads
        cut = 0 if self._kv_is_cut(mesh.size()) else None
        for name, linear, heads, dim in (
            ("query", query, self.num_heads, 0),
            ("key", key, self.num_kv_heads, cut),
            ("value", value, self.num_kv_heads, cut),
        ):
            weight, bias = _with_heads(linear.weight, 0, heads), _with_heads(linear.bias, 0, heads)
            self.add_module(name, _Heads(cast(Tensor, weight), bias, mesh, (dim, dim)))
        weight = cast(Tensor, _with_heads(out.weight, 1, self.num_heads))
        self.out = _Heads(weight, out.bias, mesh, (1, None))

    query: _Heads
    key: _Heads
    value: _Heads

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the parameters live on; its group is the one that communicates."""
        return mesh_of(self.query.weight)

    @property
    def heads(self) -> tuple[int, ...]:
        """Query heads of each rank."""
        return chunk_sizes(self.num_heads, self.mesh.size())

    def _kv_of(self, rank: int, world_size: int) -> list[int]:
        """The key and value head of each query head of a rank."""
        sizes = chunk_sizes(self.num_heads, world_size)
        first = offsets(sizes)[rank]
        return [head * self.num_kv_heads // self.num_heads for head in range(first, first + sizes[rank])]

    def _kv_is_cut(self, world_size: int) -> bool:
        """Whether a plain cut of key and value heads gives every rank those that its queries need."""
        sizes = chunk_sizes(self.num_kv_heads, world_size)
        parts = zip(offsets(sizes), sizes, strict=True)
        return all(
            sorted(set(self._kv_of(rank, world_size))) == list(range(start, start + size))
            for rank, (start, size) in enumerate(parts)
        )

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        shard_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """
        Args:
            attention_mask: True where a query sees a key, or numbers to add; broadcast to ``[B, heads, S, S]``; a mask
                by heads has this rank's.  Not with ``causal``.
            positions: ``[S]`` or ``[B, 1, S]`` for rotary embedding; default 0, 1, 2, ...
            shard_sizes: every rank's length of the sequence, needed where they are not all equal.
        """
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            self._refuse(f"x must be [B, S, {self.d_model}] (or [S, B, ...]), got shape {tuple(x.shape)}")
        if attention_mask is not None and self.causal:
            self._refuse("attention_mask is for causal=False: put the causal part into the mask")
        if shard_sizes is not None and not self.sequence_parallel:
            self._refuse(f"shard_sizes ({list(shard_sizes)}) cuts a sequence: it needs sequence_parallel=True")
        query, key, value = self._project(x, shard_sizes)
        context = self._attend(query, key, value, attention_mask, positions)
        return self._out(context, shard_sizes)

    def _refuse(self, message: str) -> NoReturn:
        """Raise, and tell the peers, which may be in the call already."""
        if self.mesh.size() > 1:
            agreement.refuse(resolve(self.mesh), "attention", message)
        raise ValueError(message)

    def _project(self, x: Tensor, shard_sizes: Sequence[int] | None) -> list[Tensor]:
        """Query, key and value ``[..., this rank's heads * head_dim]`` of the whole sequence."""
        mesh = self.mesh
        pairs = [self._rows(part, mesh) for part in (self.query, self.key, self.value)]
        weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
        options: dict[str, Any] = {"bias": biases, "implementation": self.implementation}
        if not self.sequence_parallel:
            return cast("list[Tensor]", copy_matmul(x, weights, mesh, **options))
        options |= {"gather_dim": self.sequence_dim, "shard_sizes": shard_sizes, "save_gathered": self.save_gathered}
        return cast("list[Tensor]", all_gather_matmul(x, weights, mesh, **options))

    def _rows(self, part: _Heads, mesh: DeviceMesh) -> tuple[Tensor, Tensor | None]:
        """This rank's rows of a projection; if every rank has the whole, the rows of the heads that this one needs."""
        weight, bias = cast(Tensor, local(part.weight)), local(part.bias)
        if part is self.query or self._kv_is_cut(mesh.size()):
            return _flat(weight), None if bias is None else _flat(bias)
        refuse(mesh, "attention whose key and value heads are copied", "a rank has more than its part of them")
        needed = sorted(set(self._kv_of(mesh.get_local_rank(), mesh.size())))
        low, high = (needed[0], needed[-1] + 1) if needed else (0, 0)
        tensors = [tensor if tensor is None else copy_to_group(tensor, mesh)[low:high] for tensor in (weight, bias)]
        assert tensors[0] is not None
        return _flat(tensors[0]), None if tensors[1] is None else _flat(tensors[1])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        mesh = self.mesh
        kv = self._kv_of(mesh.get_local_rank(), mesh.size())
        if not kv:
            return query  # no head and no feature, but a place in the graph
        dim = self.sequence_dim % 3
        # [B, heads, S, head_dim]
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).movedim((dim, 2), (2, 1)) for one in (query, key, value))
        if self.rotary_base is not None:
            at = torch.arange(q.shape[2], device=q.device) if positions is None else positions
            options = {"base": self.rotary_base, "interleaved": self.rotary_interleaved}
            q, k = (apply_rotary(one, at, **options) for one in (q, k))  # type: ignore[arg-type]
        index = [head - kv[0] for head in kv]
        if index != list(range(k.shape[1])):
            where = torch.tensor(index, device=k.device)
            k, v = k.index_select(1, where), v.index_select(1, where)
        rate = self.dropout if self.training else 0.0
        with sharded_rng(mesh) if rate else nullcontext():
            context = F.scaled_dot_product_attention(q, k, v, mask, rate, self.causal)
        return context.movedim((2, 1), (dim, 2)).flatten(-2)

    def _out(self, context: Tensor, shard_sizes: Sequence[int] | None) -> Tensor:
        weight, bias = _flat(cast(Tensor, local(self.out.weight)), 1), local(self.out.bias)
        if not self.sequence_parallel:
            return matmul_all_reduce(context, weight, self.mesh, bias=bias, implementation=self.implementation)
        return matmul_reduce_scatter(
            context,
            weight,
            self.mesh,
            bias=bias,
            scatter_dim=self.sequence_dim,
            shard_sizes=shard_sizes,
            implementation=self.implementation,
        )

    def extra_repr(self) -> str:
        text = f"d_model={self.d_model}, heads={'/'.join(map(str, self.heads))} of {self.head_dim}"
        text += f", num_kv_heads={self.num_kv_heads}{'' if self._kv_is_cut(self.mesh.size()) else ' on every rank'}"
        text += f", causal={self.causal}, sequence_parallel={self.sequence_parallel}"
        for name in ("rotary_base", "dropout"):
            text += f", {name}={getattr(self, name)}" if getattr(self, name) else ""
        return text


def _flat(tensor: Tensor, dim: int = 0) -> Tensor:
    """View heads and their features as one dimension."""
    shape = [*tensor.shape[:dim], -1 if tensor.numel() else 0, *tensor.shape[dim + 2 :]]
    return tensor.reshape(shape)


def _with_heads(tensor: Tensor | None, dim: int, heads: int) -> Tensor | None:
    """View one dimension of features as heads and features; the result is plain and keeps ``requires_grad``."""
    if tensor is None:
        return None
    with_heads: Tensor = tensor.detach().unflatten(dim, (heads, -1))
    return with_heads.requires_grad_(tensor.requires_grad)


def _check_heads(
    heads: int, kv_heads: int, width: int, rotary_base: float | None, dropout: float, sequence_dim: int
) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})")
    if width < 1 or (rotary_base is not None and width % 2):
        raise ValueError(f"head_dim must be at least 1, and even for rotary embedding, got {width}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if sequence_dim not in (-2, 0, 1, -3):
        raise ValueError(f"sequence_dim must be 0 (x is [S, B, d_model]) or -2 ([B, S, d_model]), got {sequence_dim}")
