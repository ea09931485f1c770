"""A column layer whose output consists of several parts, each cut over the ranks: packed query-key-value, gate and up.

::

    y_r = [ part 0 of x @ W^T, this rank's features | part 1, this rank's features | ... ]

Some parts, the last ones or ones with others behind them, may be *copied*: every rank has all of their weights, and
their gradients are summed.  So it is with the one key and value that all queries share (multi-query attention), or with
what all heads of a state space read (Mamba 2), which every rank computes, and with heads of keys and values that do not
divide as the queries do, of which a rank computes those that its queries need.

There is one parameter per part, each an ordinary ``Shard`` DTensor, or a replicated one.  A single parameter, cut
within its parts, cannot be expressed by checkpoints and ``full_tensor()``: the shards of query, key and value would be
taken for consecutive features.  One gather, or one all-reduce of dx, serves all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import anywhere, refuse
from tpkernels.nn.column import ColumnParallelLinear, ColumnParallelLinears
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.packed_parameter import PackedParameter
from tpkernels.nn.parallel_linear import features_of
from tpkernels.nn.parameters import tp_mesh
from tpkernels.nn.shared_input import SharedInput, run_together
from tpkernels.ops.same_bits import check_parts
from tpkernels.partition import copied_places

__all__ = ["PackedColumnParallelLinear"]


class PackedColumnParallelLinear(ColumnParallelLinears):
    """``y = x @ weight^T + bias`` whose output features are ``segments`` one after another, each cut over the ranks.

    x and y are as for :class:`ColumnParallelLinear`; y on rank r is the concatenation of its part of each segment.  The
    parts are submodules ``part0``, ``part1``, ...; their parameters in order make up the packed ones.

    Examples:
        >>> qkv = tpk.nn.PackedColumnParallelLinear(8, {"query": 8, "key": 4, "value": 4}, mesh["tp"])
        >>> qkv(torch.ones(3, 8)).shape  # 4 + 2 + 2 features
        torch.Size([3, 8])
    """

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        group: GroupLike,
        *,
        segments: Sequence[int],
        units: Sequence[int] = (),
        copied: int = 0,
        behind: int = 0,
        copied_heads: int = 1,
        copies: int = 0,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        save_gathered: bool = False,
        implementation: str = "auto",
    ) -> Self:
        """The same layer, cut; ``linear`` as for :meth:`ColumnParallelLinear.from_linear`, ``units`` one per segment.

        Every rank has the last ``copied`` segments before those ``behind`` them whole; of ``copied_heads`` each, if
        these are several, it computes its part of ``copies``, as :class:`CopiedHeadsLinear` does.

        Raises:
            ValueError: ``segments`` do not add up to the output features, or are not made of ``units``; no segment is
                cut.
        """
        _, out_features = features_of(linear)
        if sum(segments) != out_features or any(size < 1 for size in segments):
            raise ValueError(f"segments {list(segments)} must be positive and sum to out_features ({out_features})")
        places = copied_places(len(segments), copied, behind)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.copied, module.behind = (0, 0) if copies else (copied, behind)
        module.sequence_parallel, module.sequence_dim = sequence_parallel, sequence_dim
        module.save_gathered, module.implementation = save_gathered, implementation
        mesh = tp_mesh(group, linear)
        if module.copied:
            refuse(mesh, "a packed layer whose key and value all queries share", "a rank sums over all of its queries")
        start = 0
        for index, (size, unit) in enumerate(zip(segments, units or (1,) * len(segments), strict=True)):
            part = _part(linear, start, size)
            options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim}
            options["implementation"] = implementation
            if not places[index]:
                layer: nn.Module = ColumnParallelLinear.from_linear(
                    part, mesh, unit=unit, save_gathered=save_gathered, **options
                )
            else:
                layer = CopiedHeadsLinear.from_linear(
                    part, mesh, heads=copied_heads, copies=copies or mesh.size(), **options
                )
            module.add_module(f"part{index}", layer)
            start += size
        return module.train(linear.training)

    sequence_parallel: bool
    sequence_dim: int
    save_gathered: bool
    implementation: str
    copied: int = 0
    behind: int = 0
    """How many segments every rank computes whole, and how many are behind these."""
    activation: str | None = None
    shared: SharedInput | None = None
    """The layers that read the same tensor as this one, and run with it."""

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(layer.out_features for layer in self.layers)

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the parameters live on."""
        return self.layers[0].mesh

    @property
    def weight(self) -> PackedParameter:
        """What has the weight's shape, dtype and device, and can be merged with; see :class:`PackedParameter`."""
        first = self.layers[0]
        shape = sum(self.segments), first.in_features
        parts = [layer.weight for layer in self.layers]
        return PackedParameter.of("weight", shape[::-1] if first.transposed else shape, parts, int(first.transposed))

    @property
    def bias(self) -> PackedParameter | None:
        """The same for the bias."""
        parts = [layer.bias for layer in self.layers if layer.bias is not None]
        return PackedParameter.of("bias", (sum(self.segments),), parts) if parts else None

    def packed_parameters(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The parameters of the layer that was cut: along which dimension which of this one's make them up."""
        parts = range(len(self.layers))
        features = 1 if self.layers[0].transposed else 0
        packed = {"weight": (features, tuple(f"part{index}.weight" for index in parts))}
        if self.layers[0].bias is not None:
            packed["bias"] = 0, tuple(f"part{index}.bias" for index in parts)
        return packed

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None, source: Tensor | None = None) -> Tensor:
        """``shard_sizes`` and ``source`` as for :class:`ColumnParallelLinear`."""
        first_cut = copied_places(len(self.layers), self.copied, self.behind).index(False)
        self.layers[first_cut].check(x, shard_sizes)
        if self.shared is None:
            return self._packed(run_together(self.layers, x, self.mesh, shard_sizes))
        return self.shared.run(self, x, x if source is None else source, shard_sizes)

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """This rank's part of each segment's weight and bias."""
        return [part for layer in self.layers for part in layer.parts()]

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The output: this rank's parts of the segments."""
        return self._packed([layer.of_places(output) for layer, output in zip(self.layers, outputs, strict=True)])

    def _packed(self, outputs: list[Tensor]) -> Tensor:
        if anywhere():
            for output, layer in zip(outputs, self.layers, strict=True):
                check_parts(self.mesh, output, layer.block_widths(), by_rows=True)
        return torch.cat(outputs, dim=-1)


def _part(linear: nn.Module, start: int, size: int) -> nn.Module:
    """Output features ``[start, start + size)`` of a layer, as views of its weight and bias."""
    transposed = not isinstance(linear, nn.Linear)
    in_features, _ = features_of(linear)
    # An nn.Linear says "weight [out, in]" to those who take it apart, any other module says "[in, out]".
    part: nn.Module = nn.Module() if transposed else nn.Linear(in_features, size, device="meta")
    for name in ("weight", "bias"):
        parameter = getattr(linear, name)
        if parameter is None:
            part.register_parameter(name, None)
            continue
        dim = parameter.dim() - 1 if transposed else 0
        view = nn.Parameter(parameter.detach().narrow(dim, start, size), requires_grad=parameter.requires_grad)
        part.register_parameter(name, view)
    return part.train(linear.training)
