"""torch's convolutions cut in pairs: one gives this rank's channels, the other takes them and is summed.

::

    first     w_r = this rank's output channels of weight      y_r = convolve(x, w_r) + b_r        dx = all_reduce(dx_r)
    second    w_r = this rank's input channels of weight       z = all_reduce(convolve(y_r, w_r)) + b      dy_r complete

Between them stands what works on each channel by itself, on this rank's (:mod:`tpkernels.nn.sliced`).

It assumes that x is equal on all ranks, and that a plan has proven what stands between.  A convolution is cut in place:
it stays an instance of its class; its parameters are DTensors of their original shapes, and the bias of the second is
whole.  A first one of several *segments* (the halves of a gated linear unit) gives this rank's part of each, one after
the other, and has a module for each, ``part0``, ``part1``, ..., as packed linear layers have
(:mod:`tpkernels.nn.packed`).

It refuses groups, code and weight norms of a convolution's own, fewer channels than would give each rank one, and
groups that give the same bits at every degree (``same_bits``): the bits of a convolution may depend on the number of
its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.convolution import channel_dims, channels_in, convolve, cut_kind, fresh_like, own_code, why_not_cut
from tpkernels.nn.normed_weight import weight_norm_of
from tpkernels.nn.packed_parameter import PackedParameter
from tpkernels.nn.parameters import local_parts, mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.ops import all_reduce, copy_to_group
from tpkernels.partition import chunk_sizes, offsets

__all__ = ["gives_channels", "pair_channels", "pair_dims", "segments_given", "takes_channels", "why_not_paired"]


def why_not_paired(module: nn.Module, world_size: int, *, inputs: bool, segments: Sequence[int] = ()) -> str | None:
    """The reason why :func:`pair_channels` cannot cut ``module`` over so many ranks; None if it can."""
    why = why_not_cut(module, 1 if inputs else world_size)
    if why is not None:
        return why
    convolution = cast(_ConvNd, module)
    if own_code(module) is not None or weight_norm_of(module) is not None:
        return "has code of its own, or a weight that a norm makes, which are for whole channels"
    if convolution.groups > 1:
        return f"has {convolution.groups} groups of channels, and would be cut along its channels for all groups"
    if inputs and 0 in chunk_sizes(convolution.in_channels, world_size):
        return f"takes too few channels ({convolution.in_channels}) for {world_size} ranks"
    if segments and (inputs or min(segments) < 1 or sum(segments) != convolution.out_channels):
        return f"has {convolution.out_channels} output channels, which segments {list(segments)} do not make up"
    if any(0 in chunk_sizes(size, world_size) for size in segments):
        return f"has too few channels in one of its segments {list(segments)} for {world_size} ranks"
    return None


def pair_dims(module: nn.Module, *, inputs: bool) -> dict[str, int | None]:
    """The dimension of each parameter that is cut; None for one that is whole."""
    given = channel_dims(module)
    return {"weight": 1 - given["weight"], "bias": None} if inputs else {**given}


def pair_channels(module: nn.Module, group: GroupLike, *, inputs: bool, segments: Sequence[int] = ()) -> nn.Module:
    """Cut a convolution of torch's as one of a pair, in place; returns it.

    A collective call: ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

    Args:
        inputs: it takes this rank's input channels, and is summed; otherwise it gives this rank's output channels,
        segments: or its part of each of these, which make up the output channels.

    Raises:
        ValueError: it cannot be cut so (:func:`why_not_paired`).
    """
    mesh = tp_mesh(group, module)
    why = why_not_paired(module, mesh.size(), inputs=inputs, segments=segments)
    if why is not None:
        raise ValueError(f"{type(module).__name__} {why}")
    kind: Any = type(module)
    if len(segments) > 1:
        for index, part in enumerate(_parts_of(module, segments)):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = shard_parameter(
                        parameter, mesh, channel_dims(module)[name], requires_grad=parameter.requires_grad
                    )
            module.add_module(f"part{index}", part)
        del module._parameters["weight"], module._parameters["bias"]
        own = tuple(chunk_sizes(size, mesh.size())[mesh.get_local_rank()] for size in segments)
        module._tpk_segments, module._tpk_given = tuple(segments), own  # type: ignore[assignment]
        module.__class__ = _of_parts(kind)
        return module
    dims = pair_dims(module, inputs=inputs)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            wanted, dim = parameter.requires_grad, dims[name]
            module._parameters[name] = (
                replicate_parameter(parameter, mesh, requires_grad=wanted) if dim is None
                else shard_parameter(parameter, mesh, dim, requires_grad=wanted)
            )  # fmt: skip
    module.__class__ = cut_kind(kind, _take if inputs else _give, paired=True)
    return module


def gives_channels(module: nn.Module) -> bool:
    """Whether a call of ``module`` gives this rank's channels."""
    return getattr(type(module), "forward", None) in (_give, _give_parts)


def segments_given(module: nn.Module) -> tuple[int, ...]:
    """How many channels of each segment it gives; () where there is one."""
    return cast("tuple[int, ...]", vars(module).get("_tpk_given", ()))


def takes_channels(module: nn.Module) -> bool:
    """Whether a call of ``module`` takes this rank's channels."""
    return getattr(type(module), "forward", None) is _take


def _give(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    mesh, w, b = local_parts(self._parameters["weight"], self._parameters["bias"])
    return convolve(self, _whole(self, input, mesh), w, b, 1, output_size)


def _give_parts(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    held = [local_parts(part._parameters["weight"], part._parameters["bias"]) for part in _parts(self)]
    mesh, dims = held[0][0], channel_dims(self)
    w = torch.cat([weight for _, weight, _ in held], dims["weight"])
    biases = [bias for _, _, bias in held if bias is not None]
    b = torch.cat(biases) if biases else None
    return convolve(self, _whole(self, input, mesh), w, b, 1, output_size)


def _whole(self: Any, input: Tensor, mesh: DeviceMesh) -> Tensor:
    """All channels, of whose gradient each rank has a share."""
    channels_in(self, input, self.in_channels, mesh)
    refuse(mesh, "a convolution of a pair", "its bits may depend on the number of its channels")
    if mesh.size() > 1 and input.requires_grad and torch.is_grad_enabled():
        input = copy_to_group(input, mesh)
    return input


def _take(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    weight = self._parameters["weight"]
    mesh, w, b = local_parts(weight, self._parameters["bias"])
    own = chunk_sizes(self.in_channels, mesh_of(weight).size())[mesh.get_local_rank()]
    channels = channels_in(self, input, own, mesh)
    refuse(mesh, "a convolution of a pair", "its sums over channels are in no blocks")
    if mesh.size() == 1:
        return convolve(self, input, w, b, 1, output_size)
    y = all_reduce(convolve(self, input, w, None, 1, output_size), mesh)
    return y if b is None else y + b.view(-1, *(1,) * (-1 - channels))


@lru_cache(maxsize=256)
def _of_parts(cls: Any) -> type[nn.Module]:
    """A subclass of ``cls`` that gives its part of each segment."""
    named = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cut_kind(cls, _give_parts, paired=True),), _PACKED | named))


def _parts_of(convolution: nn.Module, segments: Sequence[int]) -> list[nn.Module]:
    """A module for each segment, with views of its weight and bias."""
    dims, made = channel_dims(convolution), []
    for start, size in zip(offsets(segments), segments, strict=True):
        part = nn.Module()
        for name, whole in convolution._parameters.items():
            view = None if whole is None else whole.detach().narrow(dims[name], start, size)
            wanted = whole is not None and whole.requires_grad
            part.register_parameter(name, None if view is None else nn.Parameter(view, requires_grad=wanted))
        made.append(part.train(convolution.training))
    return made


def _parts(self: Any) -> list[Any]:
    return [self._modules[f"part{index}"] for index in range(len(self._tpk_segments))]


def _packed_parameters(self: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """As :meth:`PackedColumnParallelLinear.packed_parameters`."""
    names = [name for name, one in _parts(self)[0]._parameters.items() if one is not None]
    parts = range(len(self._tpk_segments))
    return {name: (channel_dims(self)[name], tuple(f"part{index}.{name}" for index in parts)) for name in names}


def _reset_parts(self: Any) -> None:
    """Initialise anew as torch does, equal to it under the first rank's seed; all ranks call it."""
    weight = _parts(self)[0]._parameters["weight"]
    fresh = fresh_like(self, weight, bias=_parts(self)[0]._parameters["bias"] is not None)
    with torch.no_grad():
        for part, new in zip(_parts(self), _parts_of(fresh, self._tpk_segments), strict=True):
            for name, parameter in new.named_parameters():
                part._parameters[name].copy_(shard_parameter(parameter, mesh_of(weight), channel_dims(self)[name]))


def _packed(name: str) -> property:
    """What has the parameter's shape, dtype and device, and can be merged with."""

    def read(self: Any) -> PackedParameter | None:
        parts = [one for part in _parts(self) if (one := part._parameters[name]) is not None]
        if not parts:
            return None
        dim, shape = channel_dims(self)[name], list(parts[0].shape)
        shape[dim] = sum(self._tpk_segments)
        return PackedParameter.of(name, shape, parts, dim)

    return property(read)


def _repr_of_parts(self: Any) -> str:
    return f"{_ConvNd.extra_repr(self)}, segments={'/'.join(map(str, self._tpk_segments))}"


_PACKED: dict[str, Any] = {
    "weight": _packed("weight"), "bias": _packed("bias"), "packed_parameters": _packed_parameters,
    "reset_parameters": _reset_parts, "extra_repr": _repr_of_parts,
}  # fmt: skip
"""What else a convolution of several segments has."""
