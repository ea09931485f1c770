"""A row layer whose input consists of several parts, each cut over the ranks: where code concatenates what is cut.

::

    x_r = [ part 0 of x, this rank's features | part 1, this rank's features | ... ]      y as of a row layer

There is one weight per part, each an ordinary ``Shard`` DTensor, as in :mod:`tpkernels.nn.packed`.  They are put
together for one product, so that ranks sum once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.packed_parameter import PackedParameter
from tpkernels.nn.parallel_linear import features_of
from tpkernels.nn.parameters import local_parts, mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.nn.row import RowParallelLinear
from tpkernels.partition import chunk_sizes, offsets

__all__ = ["PackedRowParallelLinear"]


class PackedRowParallelLinear(RowParallelLinear):
    """``y = x @ weight^T + bias`` whose input features are ``segments`` one after another, each cut over the ranks.

    x on rank r is the concatenation of its part of each segment; y is as for :class:`RowParallelLinear`.  The weights
    of the parts are those of submodules ``part0``, ``part1``, ...; in order they make up the packed one.

    Examples:
        >>> plain = torch.nn.Linear(12, 4)
        >>> out = tpk.nn.PackedRowParallelLinear.from_linear(plain, mesh["tp"], segments=(8, 4))
        >>> out(torch.ones(3, 6)).shape  # of this rank's 4 + 2 features
        torch.Size([3, 4])
    """

    segments: tuple[int, ...] = ()

    @classmethod
    def from_linear(  # type: ignore[override]  # its segments, and neither unit nor split_input
        cls,
        linear: nn.Module,
        group: GroupLike,
        *,
        segments: Sequence[int],
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        scatter_unit: int = 0,
        implementation: str = "auto",
    ) -> Self:
        """The same layer, cut; ``linear`` as for :meth:`RowParallelLinear.from_linear`.

        Raises:
            ValueError: ``segments`` do not add up to the input features.
        """
        in_features, out_features = features_of(linear)
        if sum(segments) != in_features or any(size < 1 for size in segments):
            raise ValueError(f"segments {list(segments)} must be positive and sum to in_features ({in_features})")
        mesh = tp_mesh(group, linear)
        refuse(mesh, "a row layer of several segments", "its sums over them are in no blocks")
        module = cls.__new__(cls)
        module.segments = tuple(segments)
        RowParallelLinear.__init__(
            module,
            in_features,
            out_features,
            mesh,
            bias=getattr(linear, "bias", None) is not None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            scatter_unit=scatter_unit,
            implementation=implementation,
            device="meta",
        )
        return module._take(linear, mesh)

    def _take(self, linear: nn.Module, mesh: DeviceMesh) -> Self:
        weight, bias = cast(nn.Parameter, linear.weight), cast("nn.Parameter | None", linear.bias)
        self.transposed = not isinstance(linear, nn.Linear)
        for index, part in enumerate(self._parts_of(weight, mesh)):
            held = nn.Module()
            held.register_parameter("weight", part)
            self.add_module(f"part{index}", held)
        whole = None if bias is None else replicate_parameter(bias, mesh, requires_grad=bias.requires_grad)
        self.register_parameter("bias", whole)
        return self.train(linear.training)

    def _parts_of(self, weight: Tensor, mesh: DeviceMesh) -> list[nn.Parameter]:
        """This rank's part of each segment of a whole weight."""
        dim, full = self._stored(1), weight.detach()
        pieces = zip(offsets(self.segments), self.segments, strict=True)
        return [
            shard_parameter(full.narrow(dim, start, size), mesh, dim, requires_grad=weight.requires_grad)
            for start, size in pieces
        ]

    def _weights(self) -> list[nn.Parameter]:
        parts = [cast(nn.Module, self._modules[f"part{index}"]) for index in range(len(self.segments))]
        return [cast(nn.Parameter, part._parameters["weight"]) for part in parts]

    @property
    def weight(self) -> PackedParameter:  # type: ignore[override]
        """What has the weight's shape, dtype and device, and can be merged with; see :class:`PackedParameter`."""
        shape = self.out_features, self.in_features
        return PackedParameter.of(
            "weight", shape[::-1] if self.transposed else shape, self._weights(), self._stored(1)
        )  # fmt: skip

    def packed_parameters(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """As :meth:`PackedColumnParallelLinear.packed_parameters`; the bias is one."""
        names = tuple(f"part{index}.weight" for index in range(len(self.segments)))
        return {"weight": (self._stored(1), names)}

    def _local_parts(self) -> tuple[DeviceMesh, Tensor, Tensor | None]:
        weights = self._weights()
        mesh, first, bias = local_parts(weights[0], self._parameters["bias"])
        matrix = torch.cat([first, *(local_parts(weight, None)[1] for weight in weights[1:])], self._stored(1))
        return mesh, matrix.t() if self.transposed else matrix, bias

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of(self._weights()[0])

    @property
    def sizes_taken(self) -> tuple[int, ...]:
        """Features of each segment that this rank takes."""
        mesh = self.mesh
        return tuple(chunk_sizes(size, mesh.size())[mesh.get_local_rank()] for size in self.segments)

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        world_size = self.mesh.size()
        return tuple(map(sum, zip(*(chunk_sizes(size, world_size) for size in self.segments), strict=True)))

    def reset_parameters(self) -> None:
        mine = self._weights()
        bias, mesh = self._parameters["bias"], self.mesh
        fresh = nn.Linear(
            self.in_features, self.out_features, bias is not None, device=mine[0].device, dtype=mine[0].dtype
        )
        with torch.no_grad():
            for part, new in zip(
                mine, self._parts_of(fresh.weight.t() if self.transposed else fresh.weight, mesh), strict=True
            ):
                part.copy_(new)
            if bias is not None:
                bias.copy_(replicate_parameter(fresh.bias, mesh))

    def _defer(self, *_: Any) -> None:
        """Its weight is put together in this call: no norm is computed together with its sum."""

    def _options(self) -> str:
        return f"{super()._options()}, segments={'/'.join(map(str, self.segments))}"
