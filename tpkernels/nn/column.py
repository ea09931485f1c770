"""Linear layers whose output features are cut over the ranks of a group, one or several on the same input.

::

    w_r = rows of weight,  y_r = activation(x @ w_r^T + b_r)

    sequence_parallel   x_r is a shard of the sequence, x = all_gather(x_r)        op: all_gather_matmul
    otherwise           x is equal on all ranks; backward dx = all_reduce(dx_r)    op: copy_matmul
    gather_output       y = all_gather(y_r, last dim), equal on all ranks
    gather_input        x_r is this rank's features, x = all_gather(x_r, last dim); backward dx_r = reduce_scatter(dx)

Parameters are DTensors, ``Shard(0)``.  Their gradients are local: no reduction over the group is left to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import anywhere, refuse
from tpkernels.nn.parallel_linear import ParallelLinear, features_of
from tpkernels.nn.parameters import tp_mesh
from tpkernels.nn.shared_input import SharedInput, run_gated, run_together
from tpkernels.ops import all_gather, copy_matmul
from tpkernels.ops.contract import ACTIVATIONS, GATED, activation_forward
from tpkernels.ops.same_bits import check_parts
from tpkernels.partition import chunk_sizes

__all__ = ["ColumnParallelLinear", "ColumnParallelLinears"]


class ColumnParallelLinear(ParallelLinear):
    """``y = activation(x @ weight^T + bias)`` with the output features cut over the ranks.

    =====================  ======================================  =================================================
    mode                   x on rank r                             y on rank r
    =====================  ======================================  =================================================
    default                ``[..., in]``, equal on all ranks       ``[..., out_r]``
    ``sequence_parallel``  ``[..., S_r, ..., in]``                 ``[..., S, ..., out_r]``
    ``gather_output``      as above                                ``[..., out]``, equal on all ranks
    ``gather_input``       ``[..., in_r]``                         ``[..., out_r]``
    =====================  ======================================  =================================================

    Args:
        group: ProcessGroup, one-dimensional DeviceMesh, or a mesh with a "tp" axis.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu", fused into the op.
        sequence_dim: the dimension of x that sequence parallelism cuts; -2 is S in ``[B, S, H]`` and ``[S, H]``, 0 is S
            in ``[S, B, H]``.
        gather_output: continue with the whole y on every rank; all ranks must then compute the same from it.
        save_gathered: keep the gathered x for the backward pass instead of gathering it again.
        gather_input: take this rank's features of x, as ``torch.chunk`` cuts them: the layer begins a pair where a
            stream of parts goes on beside it.  The gathered x is kept for the backward pass.
        unit: features that stay together, for example a head's.  Where ``torch.chunk`` of the features would cut them,
            the units are cut as it cuts, and the parameters have a dimension for them: weight ``[units, unit, in]``,
            bias ``[units, unit]`` (10 units over 4 ranks: 3, 3, 3, 1).  Where that leaves a rank without any, they are
            dealt out evenly (10 over 8: 2, 2, 1, ...), and every rank has places for as many as the first.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.

    Examples:
        >>> up = tpk.nn.ColumnParallelLinear(8, 32, mesh["tp"], activation="gelu")
        >>> up(torch.ones(4, 8)).shape  # 16 of 32 features
        torch.Size([4, 16])

    Raises:
        ValueError: bad arguments, with names and values.

    Initialised as ``nn.Linear`` is: under the same seed on every rank the gathered weight equals ``nn.Linear``'s.
    """

    cut_dim = 0
    shared: SharedInput | None = None
    """The layers that read the same tensor as this one, and run with it."""
    sum_input_gradient = True
    """Not where a plan has the sum of x's gradient further up, together with that of other uses of x."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        activation: str | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        gather_output: bool = False,
        save_gathered: bool = False,
        gather_input: bool = False,
        unit: int = 1,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(f"activation must be None or one of {sorted(ACTIVATIONS)}, got {activation!r}")
        self.gather_input = gather_input
        super().__init__(
            in_features,
            out_features,
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            unit=unit,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        self.activation, self.gather_output, self.save_gathered = activation, gather_output, save_gathered
        if gather_input:
            if sequence_parallel or gather_output or save_gathered:
                raise ValueError("gather_input goes with none of sequence_parallel, gather_output and save_gathered")
            refuse(self.mesh, "a column layer with gather_input", "features of its input are in no blocks")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        group: GroupLike,
        *,
        activation: str | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        gather_output: bool = False,
        save_gathered: bool = False,
        gather_input: bool = False,
        unit: int = 1,
        implementation: str = "auto",
    ) -> Self:
        """The same layer, cut: copies this rank's rows with dtype, device and ``requires_grad``; ``linear`` stays.

        ``linear`` is an ``nn.Linear``, or a layer with a weight ``[in, out]`` and a bias, such as GPT-2's Conv1D, whose
        weight keeps that shape.  Ranks whose weights differ take the first one's, or raise (:func:`init_weights`).
        """
        mesh = tp_mesh(group, linear)
        module = cls(
            *features_of(linear),
            mesh,
            bias=getattr(linear, "bias", None) is not None,
            activation=activation,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            gather_output=gather_output,
            save_gathered=save_gathered,
            gather_input=gather_input,
            unit=unit,
            implementation=implementation,
            device="meta",
        )
        return module._take(linear, mesh)

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None, source: Tensor | None = None) -> Tensor:
        """``shard_sizes``: every rank's length of the sequence, needed where they are not all equal.

        ``source``: the tensor that layers of one :class:`SharedInput` were called with, where x was made from it.
        """
        if self.gather_input:
            return self._of_parts(x, shard_sizes)
        if shard_sizes is not None or x.shape[-1] != self.in_features:
            self.check(x, shard_sizes)
        if self.shared is not None and self.shared.has_use(self):
            return self.shared.run(self, x, x if source is None else source, shard_sizes)
        if not self.sum_input_gradient:
            return F.linear(x, *self.parts()[0])
        if self.sequence_parallel or self.gather_output or x.dim() == 1:
            return run_together([self], x, self.mesh, shard_sizes)[0]
        mesh, weight, bias = self._local_parts()
        y: Tensor = copy_matmul(
            x, weight, mesh, bias=bias, activation=self.activation, implementation=self.implementation
        )
        y = self.of_places(y)
        check_parts(mesh, y, self.block_widths())
        return y

    @property
    def taken_sizes(self) -> tuple[int, ...]:
        """Features of x that each rank takes; none where it takes all."""
        return chunk_sizes(self.in_features, self.mesh.size()) if self.gather_input else ()

    def _of_parts(self, x: Tensor, shard_sizes: Sequence[int] | None) -> Tensor:
        """The output for this rank's features of x."""
        mesh, sizes = self.mesh, self.taken_sizes
        own = sizes[mesh.get_local_rank()]
        if shard_sizes is not None or x.shape[-1] != own:
            self._check_input(x, own, "with gather_input it takes this rank's part of them", shard_sizes)
        if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # sent as the product takes it
        x = all_gather(x, mesh, dim=-1, shard_sizes=sizes, implementation=self.implementation)
        return self.of_places(activation_forward(self.activation, F.linear(x, *self.parts()[0])))

    def check(self, x: Tensor, shard_sizes: Sequence[int] | None) -> None:
        """Refuse an x of other features, on every rank."""
        self._check_input(x, self.in_features, "a column layer takes all of them", shard_sizes)

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """This rank's part of the weight, ``[out_r, in]``, and of the bias."""
        _, weight, bias = self._local_parts()
        return [(weight, bias)]

    def of_places(self, y: Tensor) -> Tensor:
        """This rank's features of a product with its weight: without those of places that hold none."""
        return y if self.blocks is None else self.blocks.taken(y, self.mesh)

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The output, gathered if the layer is to gather it."""
        (y,) = outputs
        y = self.of_places(y)
        if anywhere() and not self.gather_output:
            check_parts(self.mesh, y, self.block_widths())
        if not self.gather_output or self.mesh.size() == 1:
            return y
        return all_gather(y, self.mesh, dim=-1, shard_sizes=self.shard_sizes, replicated_grad=True)

    def _op(self) -> str:
        if self.gather_input:
            return "all_gather"
        return "all_gather_matmul" if self.sequence_parallel else "matmul_all_reduce"

    def _options(self) -> str:
        text = f", activation={self.activation!r}" if self.activation else ""
        takes = f", takes={'/'.join(map(str, self.taken_sizes))}" if self.gather_input else ""
        return text + (", gather_output=True" if self.gather_output else takes)


class ColumnParallelLinears(nn.Module):
    """Several column layers on one input: one gather feeds all their GEMMs (query, key and value; gate and up).

    ``out_features`` maps names to sizes; ``forward`` returns the outputs in that order, and each layer is a submodule
    under its name (``qkv.query.weight``), of which only the parameters are used: its hooks do not run.  ``unit`` is one
    number for all, or one per name.  With the activation "swiglu" or "geglu" there are two layers of one size, and
    ``forward`` returns ``act(first) * second``.  Everything else is as in :class:`ColumnParallelLinear`.

    Examples:
        >>> qkv = tpk.nn.ColumnParallelLinears(8, {"query": 8, "key": 4, "value": 4}, mesh["tp"])
        >>> [y.shape[1] for y in qkv(torch.ones(4, 8))]
        [4, 2, 2]
    """

    gated: str | None = None
    """The activation that makes one output of the two."""

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        group: GroupLike,
        *,
        bias: bool = True,
        activation: str | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        unit: int | Mapping[str, int] = 1,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        mesh = tp_mesh(group, device)
        _check_names(out_features, unit)
        self.gated = _gated(activation, out_features)
        for name, size in out_features.items():
            layer = ColumnParallelLinear(
                in_features,
                size,
                mesh,
                bias=bias,
                activation=None if self.gated else activation,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                save_gathered=save_gathered,
                unit=unit if isinstance(unit, int) else unit.get(name, 1),
                implementation=implementation,
                device=device,
                dtype=dtype,
            )
            self.add_module(name, layer)

    @classmethod
    def from_linears(
        cls,
        linears: Mapping[str, nn.Linear],
        group: GroupLike,
        *,
        activation: str | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        unit: int | Mapping[str, int] = 1,
        implementation: str = "auto",
    ) -> Self:
        """The same layers, cut; all must take the same number of features."""
        widths = {name: linear.in_features for name, linear in linears.items()}
        if len(set(widths.values())) > 1:
            raise ValueError(f"layers on one input must take the same number of features, got {widths}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        mesh = tp_mesh(group, next(iter(linears.values()), None))
        _check_names(linears, unit)
        module.gated = _gated(activation, {name: linear.out_features for name, linear in linears.items()})
        for name, linear in linears.items():
            layer = ColumnParallelLinear.from_linear(
                linear,
                mesh,
                activation=None if module.gated else activation,
                sequence_parallel=sequence_parallel,
                sequence_dim=sequence_dim,
                save_gathered=save_gathered,
                unit=unit if isinstance(unit, int) else unit.get(name, 1),
                implementation=implementation,
            )
            module.add_module(name, layer)
        return module

    @property
    def layers(self) -> list[ColumnParallelLinear]:
        """The layers in the order of the outputs."""
        return [cast(ColumnParallelLinear, child) for child in self._modules.values()]

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None) -> list[Tensor] | Tensor:
        """One output per layer, or the gated one; ``shard_sizes`` as for one layer."""
        layers = self.layers
        layers[0].check(x, shard_sizes)
        if self.gated:
            return layers[0].of_places(run_gated(layers, self.gated, x, layers[0].mesh, shard_sizes))
        return run_together(layers, x, layers[0].mesh, shard_sizes)


def _gated(activation: str | None, out_features: Mapping[str, int]) -> str | None:
    """The activation if it is gated and there are two layers of one size for it."""
    if activation not in GATED:
        return None
    if len(out_features) != 2 or len(set(out_features.values())) != 1:
        raise ValueError(
            f"activation {activation!r} takes two layers of one size, gate and up, got {dict(out_features)}"
        )
    return activation


def _check_names(names: Mapping[str, object], unit: int | Mapping[str, int]) -> None:
    if not names:
        raise ValueError("out_features must name at least one output")
    for name in names:
        if hasattr(ColumnParallelLinears, name):
            raise ValueError(f"{name!r} cannot name an output: ColumnParallelLinears has an attribute of that name")
    unknown = [] if isinstance(unit, int) else [name for name in unit if name not in names]
    if unknown:
        raise ValueError(f"unit names {unknown}, but the outputs are {list(names)}")
