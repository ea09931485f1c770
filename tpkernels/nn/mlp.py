"""The feed-forward block cut over the ranks: column layers, the activation, a row layer.

::

    "gelu" and the like    y = down(act(up(x)))
    "swiglu", "geglu"      y = down(act(gate(x)) * up(x)),  act = silu or gelu; gate, up and their product are one op
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.column import ColumnParallelLinear, ColumnParallelLinears
from tpkernels.nn.parameters import tp_mesh
from tpkernels.nn.row import RowParallelLinear
from tpkernels.ops.contract import ACTIVATIONS, GATED

__all__ = ["ParallelMLP"]


class ParallelMLP(nn.Module):
    """A feed-forward block; both its GEMMs hide their communication.

    Args:
        activation: None, "relu", "gelu", "gelu_tanh", "silu", or, with a gate, "swiglu" or "geglu".
        d_ff: hidden features; need not divide by the number of ranks.

    The rest is as in :class:`ColumnParallelLinear`.  Submodules: ``up`` and ``down``; with a gate ``gate_up`` (``gate``
    and ``up``) and ``down``.  x and y are ``[..., S_r, ..., d_model]`` with ``sequence_parallel``, equal on all ranks
    without.  Under one seed the initial weights are those of ``nn.Linear`` layers made in the order (gate,) up, down.

    Examples:
        >>> mlp = tpk.nn.ParallelMLP(8, 32, mesh["tp"], activation="swiglu")
        >>> mlp(torch.ones(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        group: GroupLike,
        *,
        activation: str | None = "gelu",
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_activation(activation)
        mesh = tp_mesh(group, device)
        self.activation = activation
        up: ColumnParallelLinear | ColumnParallelLinears
        if activation in GATED:
            up = ColumnParallelLinears(
                d_model,
                {"gate": d_ff, "up": d_ff},
                mesh,
                bias=bias,
                activation=activation,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                save_gathered=save_gathered,
                implementation=implementation,
                device=device,
                dtype=dtype,
            )
        else:
            up = ColumnParallelLinear(
                d_model,
                d_ff,
                mesh,
                bias=bias,
                activation=activation,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                save_gathered=save_gathered,
                implementation=implementation,
                device=device,
                dtype=dtype,
            )
        down = RowParallelLinear(
            d_ff,
            d_model,
            mesh,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        self._set(up, down)

    @classmethod
    def from_linears(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        group: GroupLike,
        *,
        gate: nn.Linear | None = None,
        activation: str | None = "gelu",
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        implementation: str = "auto",
    ) -> Self:
        """The same block, cut; copies this rank's parts, the linears stay as they are."""
        _check_activation(activation)
        if (gate is not None) != (activation in GATED):
            need = "needs a" if gate is None else "has no"
            raise ValueError(f"activation {activation!r} {need} gate; with a gate: {list(GATED)}")
        if up.out_features != down.in_features or up.in_features != down.out_features:
            raise ValueError(
                f"up ({up.in_features} -> {up.out_features}) and down ({down.in_features} -> {down.out_features}) "
                "do not fit"
            )
        if gate is not None and gate.out_features != up.out_features:
            raise ValueError(f"gate has {gate.out_features} output features, up has {up.out_features}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.activation = activation
        mesh = tp_mesh(group, up)
        first: ColumnParallelLinear | ColumnParallelLinears
        if gate is not None:
            first = ColumnParallelLinears.from_linears(
                {"gate": gate, "up": up},
                mesh,
                activation=activation,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                save_gathered=save_gathered,
                implementation=implementation,
            )
        else:
            first = ColumnParallelLinear.from_linear(
                up,
                mesh,
                activation=activation,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                save_gathered=save_gathered,
                implementation=implementation,
            )
        second = RowParallelLinear.from_linear(
            down,
            mesh,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            implementation=implementation,
        )
        module._set(first, second)
        return module

    def _set(self, up: ColumnParallelLinear | ColumnParallelLinears, down: RowParallelLinear) -> None:
        self.add_module("gate_up" if self.activation in GATED else "up", up)
        self.down = down

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """``shard_sizes``: every rank's length of the sequence, needed where they are not all equal."""
        layers: Any = self._modules  # attributes of a module cost microseconds in a call that finds cold caches
        hidden = layers["gate_up" if self.activation in GATED else "up"](x, shard_sizes=shard_sizes)
        y: Tensor = layers["down"](hidden, shard_sizes=shard_sizes)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _check_activation(activation: str | None) -> None:
    known = [*sorted(ACTIVATIONS), *GATED]
    if activation is not None and activation not in known:
        raise ValueError(f"activation must be None or one of {known}, got {activation!r}")
