"""torch's convolutions, each cut by itself along its output channels: whole tensors go in and come out.

Two that are cut as a pair are in :mod:`tpkernels.nn.paired_convolution`.

::

    w_r = this rank's output channels of weight,   y_r = convolve(x, w_r) + b_r
    y   = all_gather(y_r, channels)                dx  = all_reduce(dx_r);  dw_r and db_r are complete

    groups > 1:  a rank has whole groups and reads their input channels alone;  dx = all_gather(dx_r, channels)

It assumes that x is equal on all ranks, and that all compute the same from y.  A convolution is cut in place: it stays
an instance of its class, with its attributes and hooks, which speak of all channels; weight and bias are DTensors of
their original shapes, ``Shard``.  x may have a batch dimension or none.

On a group that gives the same bits at every degree (``same_bits``) each rank gathers weight and bias instead, and
computes all of y: the bits of a convolution may depend on the number of its channels.

Code of a subclass around ``super().forward`` goes on, and is given all channels; a weight that torch's weight norm
makes is cut, too (:mod:`tpkernels.nn.normed_weight`).  It refuses other parametrizations, groups that the ranks would
have to cut, and fewer channels than would give each rank one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from tpkernels.comm import agreement
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.comm.same_bits import same_bits_of
from tpkernels.nn.normed_weight import cut_norm, weight_norm_of
from tpkernels.nn.parameters import has_units, local_parts, mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.ops import all_gather, copy_to_group, shard
from tpkernels.ops.checks import DTYPES
from tpkernels.partition import chunk_sizes

__all__ = [
    "channel_dims",
    "channels_in",
    "convolve",
    "convolved",
    "cut_channels",
    "cut_kind",
    "fresh_like",
    "is_convolution",
    "own_code",
    "why_not_cut",
    "within_own_code",
]

convolved: ContextVar[Callable[[nn.Module, Tensor, Tensor], None] | None] = ContextVar("convolved", default=None)
"""Who is told of what a convolution that is cut, within code of its own, takes from that and gives to it."""
_CALLS: dict[bool, dict[int, Callable[..., Tensor]]] = {
    False: {1: F.conv1d, 2: F.conv2d, 3: F.conv3d},
    True: {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d},
}
"""By whether they are transposed, and by the number of spatial dimensions."""
_BASES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_GUARDED = ("forward", "_conv_forward", "_output_padding", "__call__", "_call_impl", "_wrapped_call_impl",
            "__getattr__", "__setattr__", "__getattribute__")  # fmt: skip
_TORCHS = {base: {name: getattr(base, name, None) for name in _GUARDED} for base in _BASES}
"""torch's own methods, from before anybody could replace them in its classes."""


def is_convolution(module: nn.Module) -> bool:
    """Whether a call of ``module`` computes what torch's convolution of its attributes does, or ends in one, within a
    ``forward`` of its own (:func:`own_code`)."""
    kind: Any = type(module)
    base: Any = next((base for base in _BASES if isinstance(module, base)), None)
    if base is None or "forward" in vars(module) or hasattr(kind, "bias"):
        return False
    if hasattr(kind, "weight") and weight_norm_of(module) is None:
        return False
    other = [name for name, known in _TORCHS[base].items() if getattr(kind, name, None) is not known]
    return not other or (other == ["forward"] and hasattr(kind, "_conv_forward"))


def own_code(module: nn.Module) -> type[nn.Module] | None:
    """torch's class under a convolution with a ``forward`` of its own (a pad before it); None for any other module.

    Such code may call ``super().forward`` and nothing else with the weight; who plans has to see to that.
    """
    base: Any = next((base for base in _BASES if isinstance(module, base)), None)
    return None if base is None or type(module).forward is _TORCHS[base]["forward"] else base


def within_own_code(module: nn.Module) -> bool:
    """Whether a convolution, whole or cut, is called by code of its own, which a call of the module runs."""
    within = getattr(type(module), "_tpk_within", None)
    return own_code(module) is not None if within is None else within


def why_not_cut(module: nn.Module, world_size: int, same_bits: int = 0) -> str | None:
    """The reason why :func:`cut_channels` cannot cut ``module`` over so many ranks; None if it can."""
    held = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    normed = weight_norm_of(module)
    if normed is not None:
        if same_bits:
            return "has a weight that a norm makes, which same_bits is not proven for"
        held["weight"] = cast(nn.Parameter, normed.original1)
    if not is_convolution(module) or not {"weight"} <= held.keys() <= {"weight", "bias"}:
        return "is no convolution as torch's are: it has code, hooks or parameters of its own"
    convolution = cast(_ConvNd, module)
    if any(isinstance(parameter, DTensor) or is_lazy(cast(Tensor, parameter)) for parameter in held.values()):
        return "has parameters that are parallel, or have no shape yet"
    if held["weight"].dtype not in DTYPES:
        return f"has weights of {held['weight'].dtype}"
    taken, given, groups = convolution.in_channels, convolution.out_channels, convolution.groups
    units = groups if groups > 1 else given
    if 0 in chunk_sizes(units, world_size):
        return f"has too few {'groups of ' if groups > 1 else ''}channels ({units}) for {world_size} ranks"
    if groups > 1 and any(has_units(total, total // groups, world_size) for total in (taken, given)):
        return f"has {groups} groups of channels, which do not divide over {world_size} ranks"
    dims = channel_dims(module)
    if same_bits and any(parameter.shape[dims[name]] % same_bits for name, parameter in held.items()):
        return f"has {given} channels, no multiple of same_bits ({same_bits})"
    return None


def channel_dims(module: nn.Module) -> dict[str, int]:
    """The dimension of each parameter that is cut; a transposed convolution's weight is ``[in, out / groups, ...]``."""
    convolution = cast(_ConvNd, module)
    return {"weight": 1 if convolution.transposed and convolution.groups == 1 else 0, "bias": 0}


def cut_channels(module: nn.Module, group: GroupLike) -> nn.Module:
    """Cut a convolution of torch's by its output channels, in place; returns it.

    A collective call: ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

    Raises:
        ValueError: it cannot be cut so (:func:`why_not_cut`).
    """
    mesh = tp_mesh(group, module)
    why = why_not_cut(module, mesh.size(), same_bits_of(mesh) if weight_norm_of(module) is not None else 0)
    if why is not None:
        raise ValueError(f"{type(module).__name__} {why}")
    dims, normed = channel_dims(module), weight_norm_of(module)
    if normed is not None:
        cut_norm(normed, mesh, dims["weight"])
    for name, parameter in module._parameters.items():
        if parameter is not None:
            wanted = parameter.requires_grad
            module._parameters[name] = shard_parameter(parameter, mesh, dims[name], requires_grad=wanted)
    kind: Any = type(module)
    module.__class__ = cut_kind(kind, _forward)
    return module


@lru_cache(maxsize=256)
def cut_kind(cls: type[nn.Module], forward: Callable[..., Tensor], *, paired: bool = False) -> type[nn.Module]:
    """A subclass of ``cls`` in which ``forward`` is what torch's is, within any code of its own.

    ``paired``: one that takes or gives parts, for which no whole one can stand in.
    """
    base: Any = next(base for base in _BASES if issubclass(cls, base))
    own = cls.forward is not _TORCHS[base]["forward"]

    def conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What torch's ``forward`` calls, which code of a subclass calls; weight and bias are the module's own."""
        y = forward(self, input)
        if (told := None if torch.compiler.is_compiling() else convolved.get()) is not None:
            told(self, input, y)
        return y

    called: dict[str, Any] = {"_conv_forward": conv_forward} if own else {"forward": forward}

    def new(made: Any, *args: Any, **kwargs: Any) -> Any:
        """PEFT calls the class of a layer for the halves of its adapter: these are whole. A copy has no arguments."""
        if paired and (args or kwargs):
            raise ValueError(
                f"this {cls.__name__} is cut in a pair, and an adapter of whole channels does not fit beside it: add "
                'adapters before parallelize(), or plan it with overrides={NAME: "channels"}'
            )
        return cls(*args, **kwargs) if args or kwargs else object.__new__(made)

    called |= {"_tpk_convolves": staticmethod(forward), "_tpk_within": own}
    members = called | {"__new__": new, "reset_parameters": _reset_parameters, "extra_repr": _extra_repr}
    named = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members | named))


def _forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    weight, bias = _stored(self), self._parameters["bias"]
    mesh, w, b = local_parts(weight, bias)
    if "weight" not in self._parameters:
        w = self.weight  # this rank's channels of what its parametrization makes
    channels = channels_in(self, input, self.in_channels, mesh)
    world_size = mesh.size()
    if world_size == 1:
        return convolve(self, input, w, b, self.groups, output_size)
    given = chunk_sizes(self.out_channels, world_size)
    if same_bits_of(mesh):
        dim = channel_dims(self)["weight"]
        sizes = chunk_sizes(weight.shape[dim], world_size)
        w = all_gather(w, mesh, dim=dim, shard_sizes=sizes, replicated_grad=True)
        b = None if b is None else all_gather(b, mesh, shard_sizes=given, replicated_grad=True)
        return convolve(self, input, w, b, self.groups, output_size)
    groups = 1
    if self.groups > 1:
        taken = chunk_sizes(self.in_channels, world_size)
        input = shard(input, mesh, dim=channels, shard_sizes=taken)
        groups = input.shape[channels] * self.groups // self.in_channels
    elif input.requires_grad and torch.is_grad_enabled():
        input = copy_to_group(input, mesh)
    y = convolve(self, input, w, b, groups, output_size)
    return all_gather(y, mesh, dim=channels, shard_sizes=given, replicated_grad=True)


def channels_in(self: Any, x: Tensor, expected: int, mesh: DeviceMesh) -> int:
    """The dimension of the channels of ``x``, counted from the last, if there are as many as ``expected``."""
    spatial = len(self.kernel_size)
    channels = -1 - spatial
    if x.dim() not in (spatial + 1, spatial + 2) or x.shape[channels] != expected:
        _refuse(mesh, f"{type(self).__name__}({self.in_channels}, {self.out_channels}) takes x of {spatial} spatial "
                      f"dimensions behind {expected} channels, got {tuple(x.shape)}")  # fmt: skip
    return channels


def convolve(self: Any, x: Tensor, w: Tensor, b: Tensor | None, groups: int, output_size: list[int] | None) -> Tensor:
    """What torch's ``forward`` computes, with other parameters."""
    spatial = w.dim() - 2
    call = _CALLS[self.transposed][spatial]
    if self.transposed:
        padding = self._output_padding(
            x, output_size, self.stride, self.padding, self.kernel_size, spatial, self.dilation
        )
        return call(x, w, b, self.stride, self.padding, padding, groups, self.dilation)
    if self.padding_mode == "zeros":
        return call(x, w, b, self.stride, self.padding, self.dilation, groups)
    x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
    return call(x, w, b, self.stride, 0, self.dilation, groups)


def _stored(self: Any) -> Tensor:
    """The parameter that is cut: the weight, or what its norm makes it of."""
    weight: Tensor | None = self._parameters.get("weight")
    return self.parametrizations["weight"]._parameters["original1"] if weight is None else weight


def _refuse(mesh: DeviceMesh, message: str) -> NoReturn:
    """Raise, and tell the peers, which may be in the call already."""
    if mesh.size() > 1:
        agreement.refuse(resolve(mesh), "all_gather", message)
    raise ValueError(message)


def fresh_like(convolution: Any, weight: Tensor, *, bias: bool) -> nn.Module:
    """A whole one of torch's with new weights, where ``weight`` is and of its dtype."""
    base: Any = next(base for base in _BASES if isinstance(convolution, base))
    fresh: nn.Module = base(
        convolution.in_channels, convolution.out_channels, convolution.kernel_size, groups=convolution.groups,
        bias=bias, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    return fresh


def _reset_parameters(self: Any) -> None:
    """Initialise anew as torch does, equal to it under the first rank's seed; all ranks call it."""
    weight, bias = _stored(self), self._parameters["bias"]
    copy_fresh(self, fresh_like(self, weight, bias=bias is not None), mesh_of(weight))


@torch.no_grad()
def copy_fresh(self: Any, fresh: nn.Module, mesh: DeviceMesh) -> None:
    """Give its own parameters what they hold of those of a whole one; torch leaves a weight alone that is made of
    others."""
    for name, parameter in fresh.named_parameters():
        if name in self._parameters:
            placement = self._parameters[name].placements[-1]
            whole = not isinstance(placement, Shard)
            made = replicate_parameter(parameter, mesh) if whole else shard_parameter(parameter, mesh, placement.dim)
            self._parameters[name].copy_(made)


def _extra_repr(self: Any) -> str:
    base: Any = next(base for base in _BASES if isinstance(self, base))
    weight: Any = _stored(self)
    cut = weight.placements[-1].dim
    sizes = chunk_sizes(weight.shape[cut] if self.groups == 1 else self.out_channels, mesh_of(weight).size())
    return f"{base.extra_repr(self)}, shards={'/'.join(map(str, sizes))}"
