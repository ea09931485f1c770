"""Key and value projections with fewer heads than ranks, or a number that does not divide: every rank has all weights.

::

    rows = weight rows of the heads that this rank's queries need
    y_r  = x @ weight[rows]^T + bias[rows],   dw = sum over ranks of what each rank's rows got

There are ``copies`` heads in all, dealt out as :func:`tpkernels.partition.unit_sizes` does; head i of them is head
``i * heads // copies`` of the model.

With ``same_bits`` they lie in blocks, and each block has rows and a share of the gradient of its own:
:mod:`tpkernels.nn.block_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import anywhere, same_bits_of
from tpkernels.nn.block_copies import copies_for_blocks
from tpkernels.nn.blocks import Blocks
from tpkernels.nn.parallel_linear import features_of
from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, tp_mesh
from tpkernels.nn.shared_input import SharedInput, run_together
from tpkernels.ops import copy_to_group
from tpkernels.ops.same_bits import check_parts
from tpkernels.partition import halves, offsets, unit_sizes

__all__ = ["CopiedHeadsLinear", "check_copies"]


def check_copies(name: str, out_features: int, heads: int, copies: int, world_size: int) -> None:
    """Refuse copies of heads that are no whole number of each, or leave a rank without any."""
    if heads < 1 or out_features % heads or copies % heads or copies < world_size:
        raise ValueError(
            f"{name}heads ({heads}) must divide out_features ({out_features}), and copies ({copies}) be a multiple of "
            f"heads, and at least one for each of {world_size} ranks"
        )


class CopiedHeadsLinear(nn.Module):
    """A replicated projection of ``heads`` heads that gives this rank its part of ``copies`` heads.

    x and y are as for :class:`ColumnParallelLinear` with ``copies`` heads of output features.  Parameters are
    replicated DTensors; their gradients are summed over the group, complete and equal on all ranks.

    Examples:
        >>> key = tpk.nn.CopiedHeadsLinear.from_linear(nn.Linear(8, 4), mesh["tp"], heads=1, copies=2)  # one on each
        >>> key(torch.ones(3, 8)).shape
        torch.Size([3, 4])
    """

    def __init__(self) -> None:
        raise TypeError("CopiedHeadsLinear is made by from_linear")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        group: GroupLike,
        *,
        heads: int,
        copies: int,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        implementation: str = "auto",
    ) -> Self:
        """The same layer; ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

        Raises:
            ValueError: ``heads`` divide neither features nor ``copies``, or a rank would have none of these.
        """
        mesh = tp_mesh(group, linear)
        in_features, out_features = features_of(linear)
        check_copies("", out_features, heads, copies, mesh.size())
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = in_features, out_features
        module.heads, module.copies = heads, copies
        module.sequence_parallel, module.sequence_dim = sequence_parallel, sequence_dim
        module.implementation = implementation
        module.transposed = not isinstance(linear, nn.Linear)
        module.blocks = Blocks.of(copies * (out_features // heads), out_features // heads, mesh)
        for name in ("weight", "bias"):
            parameter = getattr(linear, name)
            if parameter is not None:
                parameter = replicate_parameter(parameter, mesh, requires_grad=parameter.requires_grad)
            module.register_parameter(name, parameter)
        return module.train(linear.training)

    in_features: int
    out_features: int
    heads: int
    copies: int
    sequence_parallel: bool
    sequence_dim: int
    implementation: str
    transposed: bool
    blocks: Blocks | None
    """How the copies lie in the blocks of ``same_bits``, where they do not divide into them."""
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the parameters live on."""
        return mesh_of(self.weight)

    activation: str | None = None
    save_gathered = False
    shared: SharedInput | None = None
    """The layers that read the same tensor as this one, and run with it."""

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None, source: Tensor | None = None) -> Tensor:
        """``shard_sizes`` and ``source`` as for :class:`ColumnParallelLinear`."""
        if self.shared is not None:
            return self.shared.run(self, x, x if source is None else source, shard_sizes)
        return run_together([self], x, self.mesh, shard_sizes)[0]

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """The rows of this rank's heads, of weight and bias."""
        mesh = self.mesh
        rows = self._rows_by_blocks if same_bits_of(mesh) else self._rows
        weight = rows(self.weight, mesh)
        assert weight is not None
        return [(weight, rows(self.bias, mesh))]

    def of_places(self, y: Tensor) -> Tensor:
        """As of a column layer."""
        return y if self.blocks is None else self.blocks.taken(y, self.mesh)

    def block_widths(self) -> tuple[int, ...]:
        """As of a column layer."""
        return () if self.blocks is None else self.blocks.widths(self.mesh.get_local_rank(), self.mesh.size())

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The output."""
        y = self.of_places(outputs[0])
        if anywhere():
            check_parts(self.mesh, y, self.block_widths())
        return y

    def _rows(self, parameter: nn.Parameter | None, mesh: DeviceMesh) -> Tensor | None:
        """This rank's heads of a parameter, output features first."""
        if parameter is None:
            return None
        whole = cast(Tensor, local(parameter))
        if whole.requires_grad and torch.is_grad_enabled() and mesh.size() > 1:
            whole = copy_to_group(whole, mesh)
        if self.transposed and whole.dim() == 2:
            whole = whole.t()
        sizes, rank = unit_sizes(self.copies, mesh.size()), mesh.get_local_rank()
        return self._heads(whole, offsets(sizes)[rank], sizes[rank])

    def _rows_by_blocks(self, parameter: nn.Parameter | None, mesh: DeviceMesh) -> Tensor | None:
        """The same, block by block of ``same_bits``, with zeros in places that have no head."""
        if parameter is None:
            return None
        whole, features = cast(Tensor, local(parameter)), self.out_features // self.heads
        if self.transposed and whole.dim() == 2:
            whole = whole.t()
        same_bits = same_bits_of(mesh)
        counts = halves(self.copies, same_bits) if self.blocks is None else self.blocks.counts
        own = same_bits // mesh.size()
        rows = []
        for block, whole_of_block in enumerate(copies_for_blocks(whole, mesh, own), mesh.get_local_rank() * own):
            rows.append(self._heads(whole_of_block, offsets(counts)[block], counts[block]))
            free = counts[0] - counts[block]
            if free:
                rows.append(whole.new_zeros(free * features, *whole.shape[1:]))
        return torch.cat(rows)

    def _heads(self, whole: Tensor, first: int, count: int) -> Tensor:
        """The rows of ``count`` copies from number ``first`` on."""
        features = self.out_features // self.heads
        heads = [index * self.heads // self.copies for index in range(first, first + count)]
        if not heads:
            return whole.narrow(0, 0, 0)
        return torch.cat([whole.narrow(0, head * features, features) for head in heads])

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + f", heads={self.heads}, copies={self.copies}, sequence_parallel={self.sequence_parallel}"
