"""torch's convolutions cut in pairs: one gives this rank's channels, the other takes them and is summed.

::

    first     w_r = this rank's output channels of weight      y_r = convolve(x, w_r) + b_r        dx = all_reduce(dx_r)
    second    w_r = this rank's input channels of weight       z = all_reduce(convolve(y_r, w_r)) + b      dy_r complete

Between them stands what works on each channel by itself, on this rank's (:mod:`tpkernels.nn.sliced`).

It assumes that x is equal on all ranks, and that a plan has proven what stands between.  A convolution is cut in place:
it stays an instance of its class; its parameters are DTensors of their original shapes, and the bias of the second is
whole.

It refuses groups, code and weight norms of a convolution's own, fewer channels than would give each rank one, and
groups that give the same bits at every degree (``same_bits``): the bits of a convolution may depend on the number of
its channels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.convolution import channel_dims, channels_in, convolve, cut_kind, own_code, why_not_cut
from tpkernels.nn.normed_weight import weight_norm_of
from tpkernels.nn.parameters import local_parts, mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.ops import all_reduce, copy_to_group
from tpkernels.partition import chunk_sizes

__all__ = ["gives_channels", "pair_channels", "pair_dims", "takes_channels", "why_not_paired"]


def why_not_paired(module: nn.Module, world_size: int, *, inputs: bool) -> str | None:
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
    return None


def pair_dims(module: nn.Module, *, inputs: bool) -> dict[str, int | None]:
    """The dimension of each parameter that is cut; None for one that is whole."""
    given = channel_dims(module)
    return {"weight": 1 - given["weight"], "bias": None} if inputs else {**given}


def pair_channels(module: nn.Module, group: GroupLike, *, inputs: bool) -> nn.Module:
    """Cut a convolution of torch's as one of a pair, in place; returns it.

    A collective call: ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

    Args:
        inputs: it takes this rank's input channels, and is summed; otherwise it gives this rank's output channels.

    Raises:
        ValueError: it cannot be cut so (:func:`why_not_paired`).
    """
    mesh = tp_mesh(group, module)
    why = why_not_paired(module, mesh.size(), inputs=inputs)
    if why is not None:
        raise ValueError(f"{type(module).__name__} {why}")
    dims = pair_dims(module, inputs=inputs)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            wanted, dim = parameter.requires_grad, dims[name]
            module._parameters[name] = (
                replicate_parameter(parameter, mesh, requires_grad=wanted) if dim is None
                else shard_parameter(parameter, mesh, dim, requires_grad=wanted)
            )  # fmt: skip
    kind: Any = type(module)
    module.__class__ = cut_kind(kind, _take if inputs else _give, paired=True)
    return module


def gives_channels(module: nn.Module) -> bool:
    """Whether a call of ``module`` gives this rank's channels."""
    return getattr(type(module), "forward", None) is _give


def takes_channels(module: nn.Module) -> bool:
    """Whether a call of ``module`` takes this rank's channels."""
    return getattr(type(module), "forward", None) is _take


def _give(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    mesh, w, b = local_parts(self._parameters["weight"], self._parameters["bias"])
    channels_in(self, input, self.in_channels, mesh)
    refuse(mesh, "a convolution of a pair", "its bits may depend on the number of its channels")
    if mesh.size() > 1 and input.requires_grad and torch.is_grad_enabled():
        input = copy_to_group(input, mesh)
    return convolve(self, input, w, b, 1, output_size)


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
