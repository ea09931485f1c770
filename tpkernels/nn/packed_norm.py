"""torch's batch norms over this rank's part of each of several segments of channels.

::

    y_r = batch_norm(x_r)      x_r, y_r = this rank's channels of each segment, one after the other

It stands between convolutions of which the first gives such parts, because code takes its channels apart behind the
norm (:mod:`tpkernels.nn.paired_convolution`).  Each channel is normalised by itself, so nothing is sent, gradients are
complete, and a rank's running means are those of its channels.

The norm is cut in place: it stays an instance of its class, and has a module for each segment
(:mod:`tpkernels.nn.channel_parts`), with this rank's part of the parameters and of the running statistics; state is
saved as whole tensors.
It refuses modules that run other code than torch's batch norms do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from tpkernels.nn.channel_parts import joined, packed_parameters, parts_in, take_apart
from tpkernels.nn.parameters import local, shard_buffer
from tpkernels.partition import chunk_sizes, offsets

__all__ = ["check_packed_norm", "is_batch_norm", "norm_segments", "pack_norm"]

_FORWARD = _BatchNorm.forward
"""torch's own, from before anybody could replace it."""
_PARAMETERS = "weight", "bias"
_BUFFERS = "running_mean", "running_var"


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it is a batch norm that runs torch's code."""
    kind: Any = type(module)
    return isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and kind.forward is _FORWARD


def check_packed_norm(module: nn.Module, segments: Sequence[int], world_size: int) -> None:
    """Refuse what :func:`pack_norm` cannot cut."""
    fits = is_batch_norm(module) and sum(segments) == cast(_BatchNorm, module).num_features
    if not fits or any(0 in chunk_sizes(size, world_size) for size in segments):
        raise ValueError(
            f"{type(module).__name__} must be a batch norm over {sum(segments)} channels, of which {world_size} ranks "
            f"each have some in every one of its segments {list(segments)}"
        )


def pack_norm(module: nn.Module, segments: Sequence[int], mesh: DeviceMesh) -> nn.Module:
    """Let a batch norm work on this rank's part of each segment of its channels, in place; returns it.

    A collective call: ranks whose parameters differ take the first one's, or raise (:func:`init_weights`).

    Raises:
        ValueError: it is no batch norm, or the segments do not make up its channels, or leave a rank without any.
    """
    check_packed_norm(module, segments, mesh.size())
    take_apart(module, mesh, segments, dict.fromkeys(_PARAMETERS, 0))
    for name in _BUFFERS:
        whole = module._buffers.pop(name)
        for part, start, size in zip(parts_in(module), offsets(segments), segments, strict=True):
            lasting = name not in module._non_persistent_buffers_set
            own = None if whole is None else shard_buffer(whole.narrow(0, start, size), mesh, 0)
            part.register_buffer(name, own, persistent=lasting)
    kind: Any = type(module)
    module.__class__ = _packed_kind(kind)
    return module


def norm_segments(module: nn.Module) -> tuple[int, ...]:
    """How many channels a rank has of each segment of a norm that was packed; () of any other module."""
    packed = getattr(type(module), "_tpk_packed_norm", False)
    return cast("tuple[int, ...]", vars(module)["_tpk_own"]) if packed else ()


def _forward(self: Any, input: Tensor) -> Tensor:
    """As torch's ``_BatchNorm.forward``, with the parts of all segments."""
    self._check_input_dim(input)
    factor = 0.0 if self.momentum is None else self.momentum
    if self.training and self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
    means, variances = (_statistics(self, name) for name in _BUFFERS)
    by_batch = self.training or not (means or variances)
    kept = not self.training or self.track_running_stats
    mean, variance = (torch.cat(one) if one and kept else None for one in (means, variances))
    weight, bias = (joined(self, name) for name in _PARAMETERS)
    y = nn.functional.batch_norm(input, mean, variance, weight, bias, by_batch, factor, self.eps)
    if by_batch:
        for held, new in ((means, mean), (variances, variance)):
            for part, values in zip(held, () if new is None else new.split(self._tpk_own), strict=new is not None):
                part.copy_(values)
    return y


def _statistics(self: Any, name: str) -> list[Tensor]:
    """This rank's running statistics, of each segment; none where the norm keeps none."""
    held = [one for part in parts_in(self) if (one := part._buffers[name]) is not None]
    return [_here(one) if isinstance(one, DTensor) else one for one in held]


def _here(buffer: DTensor) -> Tensor:
    return buffer.to_local() if torch.compiler.is_compiling() else buffer._local_tensor


def _packed_parameters(self: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """As :meth:`PackedColumnParallelLinear.packed_parameters`, of the statistics as well."""
    first, parts = parts_in(self)[0]._buffers, range(len(self._tpk_segments))
    buffers = {name: (0, tuple(f"part{at}.{name}" for at in parts)) for name, one in first.items() if one is not None}
    return packed_parameters(self) | buffers


def _reset_running_stats(self: Any) -> None:
    if self.track_running_stats:
        for name, value in zip(_BUFFERS, (0, 1), strict=True):
            for part in _statistics(self, name):
                part.fill_(value)
        self.num_batches_tracked.zero_()


def _reset_parameters(self: Any) -> None:
    _reset_running_stats(self)
    with torch.no_grad():
        for name, value in zip(_PARAMETERS, (1, 0), strict=True):
            for held in (part._parameters[name] for part in parts_in(self)):
                if held is not None:
                    cast(Tensor, local(held)).fill_(value)


def _repr(self: Any) -> str:
    return f"{_BatchNorm.extra_repr(self)}, segments={'/'.join(map(str, self._tpk_segments))}"


_MEMBERS: dict[str, Any] = {
    "forward": _forward, "packed_parameters": _packed_parameters, "reset_parameters": _reset_parameters,
    "reset_running_stats": _reset_running_stats, "extra_repr": _repr, "_tpk_packed_norm": True,
}  # fmt: skip


@lru_cache(maxsize=256)
def _packed_kind(cls: Any) -> type[nn.Module]:
    """A subclass of ``cls`` that works on its part of each segment."""
    named = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), _MEMBERS | named))
