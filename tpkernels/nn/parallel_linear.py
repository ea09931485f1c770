"""What column and row layers share: sizes, DTensor parameters, initialisation, checks, description.

A new layer is initialised as ``nn.Linear`` would be, from torch's generator.  Ranks whose weights differ take the first
rank's, or raise (:mod:`tpkernels.nn.same_weights`).  Layers look up their parameters at each call, so that every change
of them is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels import dispatch
from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.nn.blocks import Blocks
from tpkernels.nn.parameters import (
    check_unit,
    has_units,
    local_parts,
    mesh_of,
    replicate_parameter,
    shard_parameter,
    shard_places,
    shard_units,
    tp_mesh,
)
from tpkernels.ops.main_grad import with_sink
from tpkernels.partition import as_shard, chunk_sizes

__all__ = ["ParallelLinear", "features_of"]


class ParallelLinear(nn.Module):
    """Base class of :class:`ColumnParallelLinear` and :class:`RowParallelLinear`; not for direct use."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    cut_dim: int
    """The dimension of ``[out, in]`` that is cut: 0 for columns of the product, 1 for its contraction."""
    transposed = False
    """The weight is kept as ``[in, out]``, as the Conv1D of Hugging Face's GPT-2 keeps it."""
    by_unit = False
    """What is cut has a dimension for units and one for what is in them: ``[units, unit]`` instead of ``[out]``."""
    gather_input = False
    """It takes this rank's part of the features that it needs all of."""
    blocks: Blocks | None = None
    """How what is cut lies in the blocks of ``same_bits``, where it does not divide into them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool,
        sequence_parallel: bool,
        sequence_dim: int,
        unit: int,
        implementation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.unit, self.implementation = unit, implementation
        dispatch.check_name(self._op(), implementation)
        mesh = tp_mesh(group, device)
        cut, total = ("out_features", out_features) if self.cut_dim == 0 else ("in_features", in_features)
        check_unit(cut, total, unit)
        self.blocks = Blocks.of(total, unit, mesh)
        self.by_unit = self.blocks is not None or has_units(total, unit, mesh.size())
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), mesh)

    def _take(self, linear: nn.Module, mesh: DeviceMesh) -> Self:
        """Make this rank's part of ``linear`` the parameters."""
        weight, bias = cast(nn.Parameter, linear.weight), cast("nn.Parameter | None", linear.bias)
        self.transposed = not isinstance(linear, nn.Linear)
        for name, parameter in linear.named_parameters():
            if isinstance(parameter, DTensor):
                raise ValueError(f"the linear's {name} is a DTensor already (placements {parameter.placements})")
        self.weight = self._shard(weight, mesh, self._stored(self.cut_dim))
        if bias is None:
            self.register_parameter("bias", None)
        elif self.cut_dim == 0:
            self.bias = self._shard(bias, mesh, 0)
        else:
            self.bias = replicate_parameter(bias, mesh, requires_grad=bias.requires_grad)
        return self.train(linear.training)

    def _stored(self, dim: int) -> int:
        """The weight's dimension that is dimension ``dim`` of ``[out, in]``."""
        return 1 - dim if self.transposed else dim

    def _shard(self, full: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
        trained, full = full.requires_grad, full.detach()
        if self.blocks is not None:
            return shard_places(full.unflatten(dim, (-1, self.unit)), mesh, dim, self.blocks, requires_grad=trained)
        if self.by_unit:
            return shard_units(full.unflatten(dim, (-1, self.unit)), mesh, dim, requires_grad=trained)
        return shard_parameter(full, mesh, dim, requires_grad=trained)

    def parameters_by_unit(self) -> dict[str, int]:
        """Which parameters have a dimension for units, and the one before which dimension of the plain layer's."""
        if not self.by_unit:
            return {}
        weight = {"weight": self._stored(self.cut_dim)}
        return weight if self.bias is None or self.cut_dim == 1 else weight | {"bias": 0}

    def units_held(self) -> tuple[int, ...]:
        """How many units there are in each run of places: a rank's, or with ``blocks`` a block's."""
        if self.blocks is not None:
            return self.blocks.counts
        return tuple(size // self.unit for size in self.shard_sizes)

    @property
    def has_free_places(self) -> bool:
        """Whether a run of places has fewer units than places: the first of its own."""
        units = self.units_held()
        return self.blocks is not None or (self.by_unit and not as_shard(sum(units), len(units)))

    def _flat(self, local: Tensor, dim: int, parameter: Tensor, mesh: DeviceMesh) -> Tensor:
        """A rank's part of a parameter without the dimension for units, and without places that hold none, but for
        those of ``blocks``, whose products have one size."""
        units = local.shape[dim] if self.blocks is not None else self.units_held()[mesh.get_local_rank()]
        if units == local.shape[dim]:
            return with_sink(local.flatten(dim, dim + 1), parameter)
        return local.narrow(dim, 0, units).flatten(dim, dim + 1)  # its main_grad has another shape: autograd pads

    def _local_parts(self) -> tuple[DeviceMesh, Tensor, Tensor | None]:
        """The mesh, this rank's part of the weight, ``[out, in]``, and the bias that it adds: its part where it is cut.

        Straight from the dictionary: ``self.weight`` of a module costs 10 us in a call that finds cold caches.
        """
        parameters = self._parameters
        weight = cast(nn.Parameter, parameters["weight"] if "weight" in parameters else self.weight)  # parametrised
        bias = parameters["bias"] if "bias" in parameters else self.bias
        mesh, matrix, vector = local_parts(weight, bias)
        if self.by_unit:
            matrix = self._flat(matrix, self._stored(self.cut_dim), weight, mesh)
            vector = vector if vector is None or self.cut_dim == 1 else self._flat(vector, 0, cast(Tensor, bias), mesh)
        return mesh, matrix.t() if self.transposed else matrix, vector

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the parameters live on; its group is the one that communicates."""
        return mesh_of(self.weight)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Features that each rank holds: of the output of a column layer, of the input of a row layer."""
        total = self.out_features if self.cut_dim == 0 else self.in_features
        if self.blocks is not None:
            return self.blocks.sizes(self.mesh.size())
        return chunk_sizes(total, self.mesh.size(), self.unit)

    def block_widths(self) -> tuple[int, ...]:
        """Features of each of this rank's blocks of ``same_bits``, where they are not all alike; else nothing."""
        return () if self.blocks is None else self.blocks.widths(self.mesh.get_local_rank(), self.mesh.size())

    def reset_parameters(self) -> None:
        """Initialise anew like ``nn.Linear``, equal to it under the first rank's seed; all ranks call it."""
        weight, bias = self.weight, self.bias
        fresh = nn.Linear(
            self.in_features, self.out_features, bias is not None, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            full = fresh.weight.t() if self.transposed else fresh.weight
            weight.copy_(self._shard(full, self.mesh, self._stored(self.cut_dim)))
            if bias is not None:
                cut = self.cut_dim == 0
                part = self._shard(fresh.bias, self.mesh, 0) if cut else replicate_parameter(fresh.bias, self.mesh)
                bias.copy_(part)

    def extra_repr(self) -> str:
        sizes = "/".join(map(str, self.shard_sizes))
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += f", shards={sizes}, sequence_parallel={self.sequence_parallel}{self._options()}"
        return text + (f", implementation={self.implementation!r}" if self.implementation != "auto" else "")

    def _op(self) -> str:
        raise NotImplementedError

    def _options(self) -> str:
        return ""

    def _check_input(self, x: Tensor, features: int, why: str, shard_sizes: Sequence[int] | None) -> None:
        if shard_sizes is not None and not self.sequence_parallel:
            self._refuse(f"shard_sizes ({list(shard_sizes)}) cuts a sequence: it needs sequence_parallel=True")
        if x.shape[-1] != features:
            mesh = self.mesh
            self._refuse(
                f"{type(self).__name__}({self.in_features}, {self.out_features}) takes {features} features on rank "
                f"{mesh.get_local_rank()} of {mesh.size()}, got x of shape {tuple(x.shape)}: {why}"
            )

    def _refuse(self, message: str) -> NoReturn:
        """Raise, and tell the peers where the forward pass communicates: they may be in the call already."""
        mesh = self.mesh
        if mesh.size() > 1 and (self.sequence_parallel or self.cut_dim == 1 or self.gather_input):
            agreement.refuse(resolve(mesh), self._op(), message)
        raise ValueError(message)


def features_of(linear: nn.Module) -> tuple[int, int]:
    """Input and output features of an ``nn.Linear``, or of a layer whose weight is ``[in, out]`` (GPT-2's Conv1D)."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not hasattr(linear, "bias"):
        raise ValueError(f"a linear layer has a weight of two dimensions and a bias or None, got {linear}")
    rows, columns = weight.shape
    return rows, columns
