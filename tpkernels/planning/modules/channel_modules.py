"""Modules that can be cut by the channels in dimension 1 of what they take: convolutions, and what stands between.

It owns which modules are these.  A convolution over all channels may give a rank's channels, or take them and be
summed.  Other modules work on each channel, or each group of channels, by itself: batch and instance norms, group norms
and convolutions in groups.  A rank that has whole groups of the channels computes those as all of them would be, with
its part of the parameters and buffers, and its number of groups.

A module counts if a call runs torch's own code and nothing else hangs on it: hooks and parametrizations would see a
part, and a tensor that another module shares would be cut there, too.  Code of a convolution's own around
``super().forward(x)`` (a pad before it) is a part of the model around the convolution, and is proven as that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from tpkernels.nn.convolution import is_convolution, own_code
from tpkernels.nn.normed_weight import weight_norm_of
from tpkernels.planning.modules.own_code import calls_super
from tpkernels.planning.splits import share

__all__ = [
    "ChannelCall",
    "ChannelParts",
    "channels_in_groups",
    "channels_of",
    "is_batched",
    "parts_by_channel",
    "works_by_channel",
]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
          nn.GroupNorm)  # fmt: skip
_TORCHS = {base: {name: getattr(base, name) for name in ("forward", "__call__", "_call_impl")} for base in _NORMS}
"""torch's own methods, from before anybody could replace them in its classes."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_NORMS = "weight", "bias", "running_mean", "running_var"


@dataclass(frozen=True)
class ChannelCall:
    """One call of such a module in a recording, by the event that it begins with."""

    name: str
    stop: int
    """The first event behind it."""
    source: Any
    """Of the tensor that it takes."""
    result: Any
    taken: tuple[int, ...]
    given: tuple[int, ...]
    dtype: torch.dtype


class ChannelParts(NamedTuple):
    """What a rank has of a module that works by channels."""

    taken: int
    """All channels of what goes in,"""
    given: int
    """and of what comes out."""
    dims: Mapping[str, int]
    """Parameters and buffers that are cut, and the dimension."""
    numbers: Mapping[str, tuple[int, ...]]
    """Attributes that are other ones on a rank, with the value of each."""


def channels_of(module: nn.Module) -> tuple[int, int] | None:
    """Input and output channels of a convolution over all channels; None for any other module."""
    if not isinstance(module, _ConvNd) or module.groups > 1 or not _is_plain(module, normed=True):
        return None
    if not _convolves(module):
        return None
    return module.in_channels, module.out_channels


def channels_in_groups(module: nn.Module) -> tuple[int, int] | None:
    """Input and output channels of a convolution in groups of several channels; None for any other module."""
    if not isinstance(module, _ConvNd) or not works_by_channel(module) or module.groups == module.in_channels:
        return None
    return module.in_channels, module.out_channels


def works_by_channel(module: nn.Module) -> bool:
    """Whether it works on each channel, or each group of channels, by itself; within code of its own, on each channel,
    as calls of a parallel model can be followed there."""
    if isinstance(module, _ConvNd):
        alone = module.groups == module.in_channels == module.out_channels or own_code(module) is None
        return module.groups > 1 and alone and _is_plain(module) and _convolves(module)
    base: Any = next((base for base in _NORMS if isinstance(module, base)), None)
    kind: Any = type(module)
    return base is not None and _is_plain(module) and all(getattr(kind, k) is v for k, v in _TORCHS[base].items())


def _convolves(module: nn.Module) -> bool:
    """Whether it is a convolution as torch's are, or one of these within code that does not use the parameters."""
    base: Any = own_code(module)
    kind: Any = type(module)
    return is_convolution(module) and (base is None or calls_super(kind, base))


def _is_plain(module: nn.Module, *, normed: bool = False) -> bool:
    hooks = any(getattr(module, hooks) for hooks in _HOOKS)
    made = not any(is_lazy(one) for one in module.parameters(recurse=False))
    alone = not module._modules or (normed and weight_norm_of(module) is not None and len(module._modules) == 1)
    return made and not hooks and alone and "forward" not in vars(module)


def is_batched(module: nn.Module, x: Tensor) -> bool:
    """Whether dimension 1 of ``x`` are its channels."""
    if isinstance(module, _ConvNd):
        return x.dim() == len(module.kernel_size) + 2
    if isinstance(module, _InstanceNorm):
        return x.dim() == int(module._get_no_batch_dim()) + 1
    return x.dim() >= 2


def parts_by_channel(module: nn.Module, world_size: int) -> ChannelParts | None:
    """What each rank has of a module that :func:`works_by_channel`; None where groups would be cut."""
    if isinstance(module, _NormBase):
        channels = module.num_features  # an instance norm without a weight warns of another number
        numbers = {"num_features": share(channels, world_size)} if isinstance(module, _InstanceNorm) else {}
        return _parts_of_norm(module, channels, numbers)
    if isinstance(module, nn.GroupNorm):
        groups = _whole_groups(module.num_channels, module.num_groups, world_size)
        return None if groups is None else _parts_of_norm(module, module.num_channels, {"num_groups": groups})
    convolution = cast(_ConvNd, module)
    taken, given = convolution.in_channels, convolution.out_channels
    groups = _whole_groups(taken, convolution.groups, world_size)
    if groups is None or groups != _whole_groups(given, convolution.groups, world_size):
        return None
    dims = {name: 0 for name, one in module._parameters.items() if one is not None}
    return ChannelParts(taken, given, dims, {"groups": groups})


def _parts_of_norm(module: nn.Module, channels: int, numbers: Mapping[str, tuple[int, ...]]) -> ChannelParts:
    dims = {name: 0 for name in _OF_NORMS if isinstance(getattr(module, name, None), Tensor)}
    return ChannelParts(channels, channels, dims, numbers)


def _whole_groups(channels: int, groups: int, world_size: int) -> tuple[int, ...] | None:
    """How many groups each rank has, where the parts of ``channels`` are whole groups."""
    size = channels // groups
    parts = share(channels, world_size)
    return None if any(part % size for part in parts) else tuple(part // size for part in parts)
