"""The feed-forward block on a mesh of two axes (Y, X): no rank holds a whole weight, nor a whole row of activations.

With M tokens, d_model = H1 and d_ff = H2, all cut evenly (they need not be), on rank (y, x)::

    step                            shape                       what travels
    x                               [M/Y, H1/X]                 (input)
    up.weight, down.weight          [H2/X, H1/Y], [H1/Y, H2/X]  (parameters, as nn.Linear lays them out)
    gather x over X                 [M/Y, H1]                   (X-1)/X of it arrive
    gather up.weight over Y         [H2/X, H1]                  (Y-1)/Y of it arrive
    u = act(x @ up^T)               [M/Y, H2/X]                 nothing
    gather down.weight over Y       [H1, H2/X]                  (Y-1)/Y of it arrive
    p = u @ down^T                  [M/Y, H1]                   nothing
    y = reduce-scatter p over X     [M/Y, H1/X]                 (X-1)/X of p arrive; y has the layout of x

With a gate ("swiglu", "geglu") gate and up are one parameter ``[2, H2, H1]``, cut as up is: one gather of x, one of the
weights and one GEMM serve both, backward too, and u = act(gate) * up.

Y is an axis of data parallelism: its ranks have different rows, and the weights' gradients are summed over it.  (8, 1)
is fully sharded data parallelism, (1, 4) a tensor parallelism whose activations are cut by features.  Every transfer
belongs to a GEMM that hides it: see :mod:`tpkernels.ops.mesh_matmul`.

:func:`mesh_mlp_bytes` computes what this moves, beside one-dimensional tensor parallelism.  These MiB arrive at
each of 8 ranks in forward and backward of one block, d_model 4096, d_ff 11008, bf16 (computed, not measured; a test
holds the function to the bytes that arrive)::

     tokens   2D (8, 1)   2D (4, 2)   2D (2, 4)   1D, 8 ranks   1D of 2, 4 replicas   1D of 4, 2 replicas
      2,048         452         204          94            70                   139                    73
      8,192         452         234         184           280                   169                   163
     32,768         452         354         544         1,120                   289                   523
    131,072         452         834       1,984         4,480                   769                 1,963

1D moves activations over all ranks, so the mesh wins once there are more tokens than weights.  Replicas of 1D move a
little less than the mesh, because they gather no weights; in return each holds Y times as much of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpkernels import dispatch, partition
from tpkernels.comm.groups import group_name
from tpkernels.nn.parameters import cut_parameter, local, mesh_of
from tpkernels.ops import copy_to_group
from tpkernels.ops.contract import ACTIVATIONS, GATED, activation_forward, gate_forward
from tpkernels.ops.mesh_matmul import Cut
from tpkernels.ops.registration import call
from tpkernels.partition import chunk_sizes

__all__ = ["MeshMLP2D", "MovedBytes", "mesh_mlp_bytes"]

Placements = tuple[Shard | Replicate, Shard | Replicate]


class _Part(nn.Module):
    """The parameters of one linear layer, under the names that ``nn.Linear`` has; of two, stacked in front."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linears: Sequence[nn.Linear], mesh: DeviceMesh, cut: tuple[int, int]) -> None:
        """``cut``: the dimensions of a linear's weight that are cut over Y and X."""
        super().__init__()
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        stacked = int(len(linears) > 1)
        y_cut, x_cut = (Shard(dim + stacked) for dim in cut)
        self.weight = _cut_parameter(_stack(weights), mesh, (y_cut, x_cut))
        bias = None if cast("Tensor | None", biases[0]) is None else _stack(biases)
        self.bias = None if bias is None else _cut_parameter(bias, mesh, (Replicate(), Shard(stacked)))

    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the weight as ``[out, in]``, and of the bias; of two linears one below the other."""
        weight, bias = cast(Tensor, local(self.weight)), local(self.bias)
        if weight.dim() == 2:
            return weight, bias
        return weight.flatten(0, 1), None if bias is None else bias.flatten()

    def extra_repr(self) -> str:
        weight = cast(DTensor, self.weight)
        return f"{tuple(weight.shape)}, of which {tuple(weight.to_local().shape)}, bias={self.bias is not None}"


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor unchanged; several stacked in a new first dimension, which is trained if the first one is."""
    if len(parameters) == 1:
        return parameters[0]
    for parameter in parameters:
        _refuse_cut(parameter)
    return torch.stack([parameter.detach() for parameter in parameters]).requires_grad_(parameters[0].requires_grad)


class MeshMLP2D(nn.Module):
    """``y = down(act(up(x)))`` on a mesh of two axes (Y, X); x and y are ``[..., H1/X]``, other rows for each y.

    With a gate ``y = down(act(gate(x)) * up(x))``.

    ==================  ==================================  ============================
    parameter           shape of the whole                  cut over Y, X
    ==================  ==================================  ============================
    ``up.weight``       ``[d_ff, d_model]``                 ``Shard(1)``, ``Shard(0)``
    ``up.bias``         ``[d_ff]``                          ``Replicate()``, ``Shard(0)``
    ``gate_up.weight``  ``[2, d_ff, d_model]``              ``Shard(2)``, ``Shard(1)``  (with a gate, instead of up)
    ``gate_up.bias``    ``[2, d_ff]``                       ``Replicate()``, ``Shard(1)``
    ``down.weight``     ``[d_model, d_ff]``                 ``Shard(0)``, ``Shard(1)``
    ``down.bias``       ``[d_model]``                       ``Replicate()``, ``Shard(0)``
    ==================  ==================================  ============================

    Args:
        mesh: a DeviceMesh of two axes, the first of which is Y (other rows), the second X (features).
        activation: None, "relu", "gelu", "gelu_tanh", "silu", or, with a gate, "swiglu" or "geglu".
        num_slices: slices of a weight's gather, of which all but the first hide behind a GEMM; default: by size.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`, for the fused GEMMs.

    Sizes are cut as ``torch.chunk`` cuts (``module.features`` are x's over X), and need not divide evenly; all rows of
    one y must be the same on its X ranks, and their number may differ between y.

    Gradients of the parameters are sums over Y: where every y has a loss of its own rows, the gradients are those of
    the losses' sum, and there is nothing left to reduce.  A new module's weights equal those of ``nn.Linear`` made
    under the same seed in the order (gate,) up, down.

    Examples:
        >>> block = tpk.nn.MeshMLP2D.from_linears(nn.Linear(8, 32), nn.Linear(32, 8), tpk.init(dp=1, tp=2))
        >>> features = tpk.array_split(torch.ones(4, 8), 2, dim=1)[rank]  # of all rows: there is one y
        >>> block(features).shape, block.down.weight.to_local().shape
        (torch.Size([4, 4]), torch.Size([8, 16]))

    Raises:
        ValueError: bad arguments, with names and values; x of other features (the peers raise GroupMismatch).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        mesh: DeviceMesh,
        *,
        activation: str | None = "gelu",
        bias: bool = True,
        num_slices: int | None = None,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("d_ff", d_ff)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        _check(mesh, activation, num_slices, implementation)
        wide = 2 if activation in GATED else 1  # (gate,) up
        first = [nn.Linear(d_model, d_ff, bias, device=device, dtype=dtype) for _ in range(wide)]
        down = nn.Linear(d_ff, d_model, bias, device=device, dtype=dtype)
        self._take(first, down, mesh, activation, num_slices, implementation)

    @classmethod
    def from_linears(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        mesh: DeviceMesh,
        *,
        gate: nn.Linear | None = None,
        activation: str | None = "gelu",
        num_slices: int | None = None,
        implementation: str = "auto",
    ) -> Self:
        """The same block, cut; copies this rank's parts, compared first (:func:`init_weights`); the linears stay."""
        _check(mesh, activation, num_slices, implementation)
        if (gate is not None) != (activation in GATED):
            raise ValueError(f"activation {activation!r} {'needs a' if gate is None else 'has no'} gate")
        if up.out_features != down.in_features or up.in_features != down.out_features:
            raise ValueError(
                f"up ({up.in_features} -> {up.out_features}) and down ({down.in_features} -> {down.out_features}) "
                "do not fit"
            )
        if gate is not None and (gate.weight.shape, gate.bias is None) != (up.weight.shape, up.bias is None):
            raise ValueError(
                f"gate ({gate.in_features} -> {gate.out_features}, bias={gate.bias is not None}) must be as up is "
                f"({up.in_features} -> {up.out_features}, bias={up.bias is not None})"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take([up] if gate is None else [gate, up], down, mesh, activation, num_slices, implementation)
        return module.train(up.training)

    def _take(
        self,
        first: Sequence[nn.Linear],
        down: nn.Linear,
        mesh: DeviceMesh,
        activation: str | None,
        num_slices: int | None,
        implementation: str,
    ) -> None:
        self.d_model, self.d_ff = down.out_features, down.in_features
        self.activation, self.num_slices, self.implementation = activation, num_slices, implementation
        self.add_module("gate_up" if len(first) > 1 else "up", _Part(first, mesh, (1, 0)))
        self.down = _Part([down], mesh, (0, 1))

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh (Y, X) that the parameters live on."""
        return mesh_of(self.down.weight)

    @property
    def features(self) -> tuple[int, ...]:
        """Features of x and y that each rank of X holds."""
        return chunk_sizes(self.d_model, self.mesh.size(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.activation in GATED:
            wide = self._layer("gather_both_matmul", x, cast(_Part, self.gate_up), 1)
            gate, up = wide.tensor_split(2, dim=-1)
            hidden = gate_forward(self.activation, gate, up)
        else:
            hidden = activation_forward(self.activation, self._layer("gather_both_matmul", x, cast(_Part, self.up), 1))
        return self._layer("gather_matmul_scatter", hidden, self.down, 0)

    def _layer(self, op: str, x: Tensor, part: _Part, w_dim: int) -> Tensor:
        mesh, (weight, bias) = self.mesh, part.matrices()
        y_group, x_group = mesh.get_group(0), mesh.get_group(1)
        if bias is not None and bias.requires_grad:
            bias = copy_to_group(bias, y_group)  # other rows on each y: the gradient is their sum
        y_sizes = chunk_sizes(self.d_model, mesh.size(0))
        slices = self.num_slices or self._auto_slices(x.element_size(), mesh)
        names = group_name(x_group), group_name(y_group)
        cut = Cut(*names, w_dim, list(self.features), list(y_sizes), slices, self.implementation)
        y: Tensor = call(op, x, weight, bias, cut)
        return y

    def _auto_slices(self, itemsize: int, mesh: DeviceMesh) -> int:
        """The number of slices, from sizes that all ranks know: that of chunks for what one rank of Y sends."""
        if mesh.size(0) == 1:
            return 1
        shares = -(-self.d_model // mesh.size(0)), -(-self.d_ff // mesh.size(1))
        return partition.num_chunks(min(shares), max(shares) * itemsize)

    def extra_repr(self) -> str:
        y, x = self.mesh.shape
        text = f"d_model={self.d_model}, d_ff={self.d_ff}, mesh=({y}, {x}), activation={self.activation!r}"
        return text + (f", implementation={self.implementation!r}" if self.implementation != "auto" else "")


def _check(mesh: object, activation: str | None, num_slices: int | None, implementation: str) -> None:
    _check_mesh(mesh)
    known = [*sorted(ACTIVATIONS), *GATED]
    if activation is not None and activation not in known:
        raise ValueError(f"activation must be None or one of {known}, got {activation!r}")
    if num_slices is not None and num_slices < 1:
        raise ValueError(f"num_slices must be at least 1, got {num_slices}")
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        dispatch.check_name(op, implementation)


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        what = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ValueError(f"mesh must be a DeviceMesh of two axes (Y, X), got {what}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {torch.distributed.get_rank()} is not part of the mesh {mesh}")


def _refuse_cut(full: Tensor) -> None:
    if isinstance(full, DTensor):
        raise ValueError(f"the linear's parameter is a DTensor already (placements {full.placements})")


def _cut_parameter(full: Tensor, mesh: DeviceMesh, placements: Placements) -> nn.Parameter:
    """This rank's part of ``full``, which is compared over both axes; only that part is copied."""
    _refuse_cut(full)
    return cut_parameter(full, mesh, placements, requires_grad=full.requires_grad, tp_axis=1)


# --- what it moves ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that arrive at one rank in one call of the block, by what they are; computed, not measured."""

    activations: int
    weights: int
    gradients: int
    """Of weights; of biases nothing is counted."""

    @property
    def total(self) -> int:
        return self.activations + self.weights + self.gradients


def mesh_mlp_bytes(
    tokens: int,
    d_model: int,
    d_ff: int,
    y: int,
    x: int,
    *,
    gated: bool = False,
    itemsize: int = 2,
    backward: bool = True,
) -> dict[str, MovedBytes]:
    """What one rank receives for a block on ``y * x`` ranks and ``tokens`` rows of all of them; sizes that divide.

    ``"2d"`` is :class:`MeshMLP2D` on the mesh (y, x).  ``"1d"`` is :class:`ParallelMLP` with sequence parallelism over
    all ranks.  ``"1d x dp"`` is it over x ranks, with the gradients of y replicas summed by a ring all-reduce.
    ``gated``: a weight more, and no activations more.
    Reductions count what arrives at their owner: the partial sums of all others.

    Examples:
        >>> moved = tpk.nn.mesh_mlp_bytes(4096, 1024, 4096, 2, 2)
        >>> sorted(moved)
        ['1d', '1d x dp', '2d']
    """
    ranks, unit = y * x, itemsize
    rows, weight = tokens // y * d_model, d_model * d_ff
    over_x = rows * (x - 1) // x  # one gather or scatter of a y's activations
    over_y = weight // x * (y - 1) // y  # one gather or scatter of an x's weight
    over_all = tokens * d_model * (ranks - 1) // ranks
    # forward: x, y.  backward: dy for both of down's gradients, dx, and x again for up's
    matrices = 3 if gated else 2
    activations, weights, gradients = (5, 2 * matrices, matrices) if backward else (2, matrices, 0)
    return {
        "2d": MovedBytes(activations * over_x * unit, weights * over_y * unit, gradients * over_y * unit),
        "1d": MovedBytes(activations * over_all * unit, 0, 0),
        "1d x dp": MovedBytes(activations * over_x * unit, 0, gradients * 2 * over_y * unit),
    }
