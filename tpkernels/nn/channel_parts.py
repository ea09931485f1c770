"""What a module that is cut holds for each of several segments: a module of its own, ``part0``, ``part1``, ...

Each has the parameters that are cut, this rank's part of the segment or, where the segment is *copied*, all of it.  The
names of these parameters in the unsharded model are told by :func:`packed_parameters`, as packed linear layers tell
them (:mod:`tpkernels.nn.packed`).

It assumes that whoever takes a module apart gives it a class that reads the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.packed_parameter import PackedParameter
from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, shard_parameter
from tpkernels.ops import copy_to_group
from tpkernels.partition import chunk_sizes, copied_places, offsets

__all__ = ["are_copied", "joined", "packed", "packed_parameters", "parts_in", "parts_of", "remember_parts",
           "segments_copied", "take_apart"]  # fmt: skip


def take_apart(
    module: nn.Module, mesh: DeviceMesh, segments: Sequence[int], dims: Mapping[str, int], copied: int = 0,
    behind: int = 0,
) -> None:  # fmt: skip
    """Put a module for each segment in the place of the parameters that are cut along ``dims``."""
    places = copied_places(len(segments), copied, behind)
    for index, part in enumerate(parts_of(module, segments, dims)):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                wanted = parameter.requires_grad
                part._parameters[name] = (
                    replicate_parameter(parameter, mesh, requires_grad=wanted) if places[index]
                    else shard_parameter(parameter, mesh, dims[name], requires_grad=wanted)
                )  # fmt: skip
        module.add_module(f"part{index}", part)
    for name in dims:
        del module._parameters[name]
    vars(module).update(_tpk_dims=dict(dims))
    remember_parts(module, mesh, segments, copied, behind)


def remember_parts(
    module: nn.Module, mesh: DeviceMesh, segments: Sequence[int], copied: int = 0, behind: int = 0
) -> None:
    """Note down the segments, and how much of each this rank has."""
    places, ranks, rank = copied_places(len(segments), copied, behind), mesh.size(), mesh.get_local_rank()
    parts = zip(segments, places, strict=True)
    own = tuple(size if whole else chunk_sizes(size, ranks)[rank] for size, whole in parts)
    vars(module).update(_tpk_segments=tuple(segments), _tpk_own=own, _tpk_copied=(copied, behind))


def parts_of(module: nn.Module, segments: Sequence[int], dims: Mapping[str, int]) -> list[nn.Module]:
    """A module for each segment, with views of the parameters that have these ``dims``."""
    made = []
    for start, size in zip(offsets(segments), segments, strict=True):
        part = nn.Module()
        for name, dim in dims.items():
            whole = module._parameters[name]
            view = None if whole is None else whole.detach().narrow(dim, start, size)
            wanted = whole is not None and whole.requires_grad
            part.register_parameter(name, None if view is None else nn.Parameter(view, requires_grad=wanted))
        made.append(part.train(module.training))
    return made


def parts_in(self: Any) -> list[Any]:
    """The modules of a module that was taken apart."""
    return [self._modules[f"part{index}"] for index in range(len(self._tpk_segments))]


def segments_copied(module: nn.Module) -> tuple[int, int]:
    """Of the segments of a module: how many every rank has whole, and how many are behind these."""
    return cast("tuple[int, int]", vars(module).get("_tpk_copied", (0, 0)))


def are_copied(self: Any) -> tuple[bool, ...]:
    """For each segment: whether every rank has it whole."""
    return copied_places(len(self._tpk_segments), *segments_copied(self))


def joined(self: Any, name: str) -> Tensor | None:
    """This rank's parts of a parameter, of each segment one after the other; None where there is no such one.

    Those of a segment that all ranks have have a share of its gradient each."""
    held = [one for part in parts_in(self) if (one := part._parameters[name]) is not None]
    if not held:
        return None
    parts = [cast(Tensor, local(one)) for one in held]
    if torch.is_grad_enabled() and mesh_of(held[0]).size() > 1:
        whole, mesh = are_copied(self), mesh_of(held[0])
        parts = [copy_to_group(one, mesh) if copied and one.requires_grad else one
                 for one, copied in zip(parts, whole, strict=True)]  # fmt: skip
    return torch.cat(parts, self._tpk_dims[name])


def packed_parameters(self: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """As :meth:`PackedColumnParallelLinear.packed_parameters`."""
    names = [name for name, one in parts_in(self)[0]._parameters.items() if one is not None]
    parts = range(len(self._tpk_segments))
    return {name: (self._tpk_dims[name], tuple(f"part{index}.{name}" for index in parts)) for name in names}


def packed(name: str) -> property:
    """What has the parameter's shape, dtype and device, and can be merged with."""

    def read(self: Any) -> PackedParameter | None:
        parts = [one for part in parts_in(self) if (one := part._parameters[name]) is not None]
        if not parts:
            return None
        dim, shape = self._tpk_dims[name], list(parts[0].shape)
        shape[dim] = sum(self._tpk_segments)
        return PackedParameter.of(name, shape, parts, dim)

    return property(read)
