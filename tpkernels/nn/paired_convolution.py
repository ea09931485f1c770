"""torch's convolutions cut in pairs: one gives this rank's channels, the other takes them and is summed.

::

    first     w_r = this rank's output channels of weight      y_r = convolve(x, w_r) + b_r        dx = all_reduce(dx_r)
    second    w_r = this rank's input channels of weight       z = all_reduce(convolve(y_r, w_r)) + b      dy_r complete

One that is the second of a pair and the first of another gives this rank's channels of its sum::

    both      w_r = this rank's input channels of weight       z_r = reduce_scatter(convolve(y_r, w_r)) + b_r

or, where that sends less, gathers what it takes, and computes its own output channels, as the first of a pair does::

    both      w_r = this rank's output channels of weight      z_r = convolve(all_gather(y_r), w_r) + b_r
                                                               dy_r = reduce_scatter(dy of z_r)

One in groups takes whole channels or this rank's, and gives this rank's or gathers them; nothing is summed::

    groups    w_r = the weight of this rank's groups      y_r = convolve(shard(x) or x_r, w_r) + b_r
              y = all_gather(y_r)

Between them stands what works on each channel by itself, on this rank's (:mod:`tpkernels.nn.sliced`).

It assumes that x is equal on all ranks, and that a plan has proven what stands between.  A convolution is cut in place:
it stays an instance of its class; its parameters are DTensors of their original shapes, and a bias that is added to
whole sums is whole.  A first one of several *segments* (the halves of a gated linear unit) gives this rank's part of
each, one after the other, and has a module for each (:mod:`tpkernels.nn.channel_parts`); so does one that gathers what
it takes.  Segments may be *copied*: every rank computes all of their channels, such as the one that
weighs all others, and has a share of their gradient, which is summed.  One that takes parts of several runs of channels
(a concatenation of what is cut) has modules for the runs of its weight; but one that gathers them puts the channels in
their order, and has one weight.

Code of a subclass around ``super().forward`` goes on, and meets a rank's channels: who plans has to see to that.  It
refuses groups of channels that ranks would cut, fewer channels than would give each rank one, and groups that give the
same bits at every degree (``same_bits``): the bits of a convolution may depend on the number of its channels.  A weight
that torch's weight norm makes is cut, too (:mod:`tpkernels.nn.normed_weight`); that of one in groups is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.channel_parts import (
    are_copied,
    joined,
    packed,
    packed_parameters,
    parts_in,
    parts_of,
    remember_parts,
    take_apart,
)
from tpkernels.nn.convolution import (
    channel_dims,
    channels_in,
    convolve,
    copy_fresh,
    cut_kind,
    fresh_like,
    why_not_cut,
)  # fmt: skip
from tpkernels.nn.normed_weight import cut_norm, norm_dim, weight_norm_of
from tpkernels.nn.parameters import local, local_parts, mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.nn.sliced import read_packed
from tpkernels.ops import all_gather, all_reduce, copy_to_group, reduce_scatter, shard
from tpkernels.partition import chunk_sizes, copied_places

__all__ = ["gives_channels", "pair_channels", "pair_dims", "segments_given", "segments_taken", "takes_channels",
           "why_not_paired"]  # fmt: skip


def why_not_paired(
    module: nn.Module, world_size: int, *, inputs: bool, outputs: bool, segments: Sequence[int] = (),
    taken: Sequence[int] = (), gathers: bool = False, copied: int = 0, behind: int = 0,
) -> str | None:  # fmt: skip
    """The reason why :func:`pair_channels` cannot cut ``module`` over so many ranks; None if it can."""
    grouped = isinstance(module, _ConvNd) and module.groups > 1
    why = why_not_cut(module, world_size if outputs or grouped else 1)
    if why is not None:
        return why
    convolution = cast(_ConvNd, module)
    normed = weight_norm_of(module)
    if normed is not None and grouped:
        return "has groups of channels, and a weight that a norm makes"
    dims = pair_dims(module, inputs=inputs and not gathers, outputs=outputs)
    if normed is not None and copied and norm_dim(normed) != dims["weight"]:
        return "has a weight of which a norm is over segments that every rank has whole, and others"
    if grouped and (segments or taken or gathers):
        return f"has {convolution.groups} groups of channels, which are in no segments and gather no input"
    if inputs and 0 in chunk_sizes(convolution.in_channels, world_size):
        return f"takes too few channels ({convolution.in_channels}) for {world_size} ranks"
    if segments and ((inputs and not gathers) or min(segments) < 1 or sum(segments) != convolution.out_channels):
        return f"has {convolution.out_channels} output channels, which segments {list(segments)} do not make up"
    if taken and (not inputs or min(taken) < 1 or sum(taken) != convolution.in_channels):
        return f"has {convolution.in_channels} input channels, which segments {list(taken)} do not make up"
    if len(segments) > 1 and len(taken) > 1:
        return "gives several segments, and takes several"
    places = copied_places(len(segments), copied, behind)
    for sizes in ([size for size, whole in zip(segments, places, strict=True) if not whole], taken):
        if any(0 in chunk_sizes(size, world_size) for size in sizes):
            return f"has too few channels in one of its segments {list(sizes)} for {world_size} ranks"
    return None


def pair_dims(module: nn.Module, *, inputs: bool, outputs: bool) -> dict[str, int | None]:
    """The dimension of each parameter that is cut; None for one that is whole."""
    given = channel_dims(module)
    if cast(_ConvNd, module).groups > 1:
        return {**given}
    return {"weight": 1 - given["weight"], "bias": 0 if outputs else None} if inputs else {**given}


def pair_channels(
    module: nn.Module, group: GroupLike, *, inputs: bool, outputs: bool, segments: Sequence[int] = (),
    taken: Sequence[int] = (), gathers: bool = False, copied: int = 0, behind: int = 0,
) -> nn.Module:  # fmt: skip
    """Cut a convolution of torch's as one of a pair, in place; returns it.

    A collective call: ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

    Args:
        inputs: it takes this rank's input channels, and is summed;
        outputs: it gives this rank's output channels, with ``inputs`` those of the sum,
        segments: or its part of each of these, which make up the output channels; but all of the last ``copied`` ones
            before those ``behind`` them;
        taken: it takes this rank's part of each of these, which make up the input channels;
        gathers: with ``inputs`` and ``outputs``, it gathers what it takes, and has its output channels of the weight.

    Raises:
        ValueError: it cannot be cut so (:func:`why_not_paired`).
    """
    mesh = tp_mesh(group, module)
    sizes: Any = {"segments": segments, "taken": taken, "copied": copied, "behind": behind}
    why = why_not_paired(module, mesh.size(), inputs=inputs, outputs=outputs, gathers=gathers, **sizes)
    if why is not None:
        raise ValueError(f"{type(module).__name__} {why}")
    kind: Any = type(module)
    dims = pair_dims(module, inputs=inputs and not gathers, outputs=outputs)
    runs, normed = (segments or (() if gathers else taken)), weight_norm_of(module)
    if normed is not None:
        cut_norm(normed, mesh, cast(int, dims["weight"]), runs, copied, behind)
    own = {} if normed is not None else {"weight": cast(int, dims["weight"])}
    if len(segments) > 1:
        take_apart(module, mesh, segments, own | {"bias": 0}, copied, behind)
        if normed is not None:  # behind the bias, as in the unsharded state
            module._modules["parametrizations"] = module._modules.pop("parametrizations")
        module.__class__ = _of_parts(kind, _gather_and_give_parts if gathers else _give, (*own, "bias"))
        return module
    if len(taken) > 1 and gathers:
        remember_parts(module, mesh, taken)
    elif len(taken) > 1:
        take_apart(module, mesh, taken, own)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            wanted, dim = parameter.requires_grad, dims[name]
            module._parameters[name] = (
                replicate_parameter(parameter, mesh, requires_grad=wanted) if dim is None
                else shard_parameter(parameter, mesh, dim, requires_grad=wanted)
            )  # fmt: skip
    whole, taking, both = (_give, _take, _take_and_give) if cast(_ConvNd, module).groups == 1 else _IN_GROUPS
    forward = (both if outputs else taking) if inputs else whole
    if gathers:
        module.__class__ = _paired_kind(kind, _gather_and_give)
    else:
        module.__class__ = _of_parts(kind, forward, tuple(own)) if len(taken) > 1 else _paired_kind(kind, forward)
    return module


def gives_channels(module: nn.Module) -> bool:
    """Whether a call of ``module`` gives this rank's channels."""
    giving = (_give, _take_and_give, *_GATHERING, _give_groups, _take_and_give_groups)
    return getattr(type(module), "_tpk_convolves", None) in giving


def segments_given(module: nn.Module) -> tuple[int, ...]:
    """How many channels of each segment it gives; () where there is one."""
    return _own_segments(module, given=True)


def segments_taken(module: nn.Module) -> tuple[int, ...]:
    """How many channels of each segment it takes; () where there is one."""
    return _own_segments(module, given=False)


def _own_segments(module: nn.Module, *, given: bool) -> tuple[int, ...]:
    gives = not takes_channels(module) or getattr(type(module), "_tpk_convolves", None) is _gather_and_give_parts
    return cast("tuple[int, ...]", vars(module).get("_tpk_own", ())) if gives == given else ()


def takes_channels(module: nn.Module) -> bool:
    """Whether a call of ``module`` takes this rank's channels."""
    taking = (_take, _take_and_give, *_GATHERING, _take_groups, _take_and_give_groups)
    return getattr(type(module), "_tpk_convolves", None) in taking


def _give(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    mesh, w, b = _held(self)
    return convolve(self, _whole(self, input, mesh), w, b, 1, output_size)


def _held(self: Any) -> tuple[DeviceMesh, Tensor, Tensor | None]:
    """This rank's parts of the weight and of the bias; of several segments one after the other."""
    if (weight := self._parameters.get("weight")) is not None:
        return local_parts(weight, self._parameters["bias"])
    bias = local(self._parameters["bias"]) if "bias" in self._parameters else joined(self, "bias")
    made = self.weight if weight_norm_of(self) is not None else joined(self, "weight")
    return mesh_of(next(self.parameters())), cast(Tensor, made), bias


def _whole(self: Any, input: Tensor, mesh: DeviceMesh) -> Tensor:
    """All channels, of whose gradient each rank has a share."""
    channels_in(self, input, self.in_channels, mesh)
    refuse(mesh, "a convolution of a pair", "its bits may depend on the number of its channels")
    if mesh.size() > 1 and input.requires_grad and torch.is_grad_enabled():
        input = copy_to_group(input, mesh)
    return input


def _take(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    return _summed(self, input, output_size, lambda y, mesh, channels: all_reduce(y, mesh))


def _take_and_give(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    def scattered(y: Tensor, mesh: DeviceMesh, channels: int) -> Tensor:
        return reduce_scatter(y, mesh, dim=channels, shard_sizes=chunk_sizes(self.out_channels, mesh.size()))

    return _summed(self, input, output_size, scattered)


def _gather_and_give(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    return _of_gathered(self, input, output_size, vars(self).get("_tpk_segments", (self.in_channels,)))


def _gather_and_give_parts(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    return _of_gathered(self, input, output_size, (self.in_channels,))


_GATHERING = (_gather_and_give, _gather_and_give_parts)


def _of_gathered(self: Any, input: Tensor, output_size: list[int] | None, totals: Sequence[int]) -> Tensor:
    """What a rank makes of its output channels, of the input channels of all ranks, in segments of ``totals``."""
    mesh, w, b = _held(self)
    sizes = [chunk_sizes(total, mesh.size()) for total in totals]
    own = [sum(parts) for parts in zip(*sizes, strict=True)]
    channels = channels_in(self, input, own[mesh.get_local_rank()], mesh)
    refuse(mesh, "a convolution of a pair", "its bits may depend on the number of its channels")
    x = all_gather(input, mesh, dim=channels, shard_sizes=own)
    if len(totals) > 1:  # each rank's parts lie one after the other
        parts = x.split([size for rank in zip(*sizes, strict=True) for size in rank], channels)
        x = torch.cat([part for run in range(len(totals)) for part in parts[run :: len(totals)]], channels)
    return convolve(self, x, w, b, 1, output_size)


def _summed(
    self: Any, input: Tensor, output_size: list[int] | None, summed: Callable[[Tensor, DeviceMesh, int], Tensor]
) -> Tensor:
    """What all ranks make of their input channels, as ``summed`` brings it together, with the bias of what it gives."""
    mesh, w, b = _held(self)
    own = segments_taken(self) or (chunk_sizes(self.in_channels, mesh.size())[mesh.get_local_rank()],)
    told = None if torch.compiler.is_compiling() else read_packed.get()
    if b is not None and gives_channels(self) and told is not None:
        told(b, 0, (b.shape[0],), 0, 0)
    channels = channels_in(self, input, sum(own), mesh)
    refuse(mesh, "a convolution of a pair", "its sums over channels are in no blocks")
    if mesh.size() == 1:
        return convolve(self, input, w, b, 1, output_size)
    y = summed(convolve(self, input, w, None, 1, output_size), mesh, channels)
    return y if b is None else y + b.view(-1, *(1,) * (-1 - channels))


def _give_groups(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    return _by_groups(self, input, output_size, takes=False, gives=True)


def _take_groups(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    return _by_groups(self, input, output_size, takes=True, gives=False)


def _take_and_give_groups(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    return _by_groups(self, input, output_size, takes=True, gives=True)


_IN_GROUPS = (_give_groups, _take_groups, _take_and_give_groups)
"""What a convolution in groups computes, in the order of the others."""


def _by_groups(self: Any, input: Tensor, output_size: list[int] | None, *, takes: bool, gives: bool) -> Tensor:
    """This rank's groups of a whole tensor or of its part, or what all ranks make of theirs."""
    mesh, w, b = local_parts(self._parameters["weight"], self._parameters["bias"])
    taken = chunk_sizes(self.in_channels, mesh.size())
    own = taken[mesh.get_local_rank()]
    channels = channels_in(self, input, own if takes else self.in_channels, mesh)
    refuse(mesh, "a convolution of a pair", "its bits may depend on the number of its channels")
    if mesh.size() == 1:
        return convolve(self, input, w, b, self.groups, output_size)
    if not takes:
        input = shard(input, mesh, dim=channels, shard_sizes=taken)
    y = convolve(self, input, w, b, own * self.groups // self.in_channels, output_size)
    given = chunk_sizes(self.out_channels, mesh.size())
    return y if gives else all_gather(y, mesh, dim=channels, shard_sizes=given, replicated_grad=True)


def _paired_kind(cls: Any, forward: Callable[..., Tensor]) -> type[nn.Module]:
    return cut_kind(cls, forward, paired=True)


@lru_cache(maxsize=256)
def _of_parts(cls: Any, forward: Callable[..., Tensor], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of ``cls`` that gives, or takes, its part of each segment: the parameters ``names`` are packed."""
    named = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    stand_ins = {name: packed(name) for name in names}
    kind = _paired_kind(cls, forward)
    return cast("type[nn.Module]", type(cls.__name__, (kind,), _PACKED | stand_ins | named))


def _reset_parts(self: Any) -> None:
    """Initialise anew as torch does, equal to it under the first rank's seed; all ranks call it."""
    held = next(self.parameters())
    mesh, fresh = mesh_of(held), fresh_like(self, held, bias=self.bias is not None)
    with torch.no_grad():
        parts = parts_of(fresh, self._tpk_segments, self._tpk_dims)
        for part, new, whole in zip(parts_in(self), parts, are_copied(self), strict=True):
            for name, parameter in new.named_parameters():
                part._parameters[name].copy_(
                    replicate_parameter(parameter, mesh) if whole
                    else shard_parameter(parameter, mesh, self._tpk_dims[name])
                )  # fmt: skip
        copy_fresh(self, fresh, mesh)


def _repr_of_parts(self: Any) -> str:
    return f"{_ConvNd.extra_repr(self)}, segments={'/'.join(map(str, self._tpk_segments))}"


_PACKED: dict[str, Any] = {
    "packed_parameters": packed_parameters, "reset_parameters": _reset_parts, "extra_repr": _repr_of_parts,
}  # fmt: skip
"""What else a convolution of several segments has."""
