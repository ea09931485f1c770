"""Make the remaining parameters of a tensor-parallel model DTensors, too, without touching its code.

Optimizers and ``clip_grad_norm_`` refuse a mix of DTensors and plain tensors, or compute a wrong norm of it.
:func:`replicate_parameters` therefore turns a module's parameters into replicated DTensors.  It gives the module a
class of its own whose attributes of those names are the local tensors, so that its ``forward`` computes as before.

For the user, ``module.weight`` is now the local tensor, a view without ``.grad``.  The parameter itself is what
``named_parameters()`` and ``state_dict()`` give, as with ``torch.nn.utils.parametrize``.  The technique is that of
torchtitan's ``simple_fsdp.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, tp_mesh
from tpkernels.nn.retired import retires_parameters
from tpkernels.ops import copy_to_group

__all__ = ["BY_BLOCKS", "Converted", "local_property", "replicate_parameters"]

BY_BLOCKS = "_tpkernels_sequence_blocks"
"""Of a module that runs block by block of a sequence: who knows the block (``copy_of``)."""


Converted = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""What plain parameters became, by their ids; holds the plain ones so that ids stay theirs."""


@retires_parameters
def replicate_parameters(
    module: nn.Module,
    group: GroupLike,
    *,
    sequence_parallel: bool = False,
    recurse: bool = True,
    converted: Converted | None = None,
) -> nn.Module:
    """Turn all plain parameters of ``module`` and its submodules into replicated DTensors, in place; returns it.

    Args:
        sequence_parallel: the module works on this rank's part of the sequence, so that its gradients are sums over
            the group (one all-reduce per parameter and use).  Without it every rank must compute the same gradient.
        recurse: its submodules', too; without it only the parameters that are its own.
        converted: the same dictionary in several calls keeps parameters tied that modules of different calls share.

    Parameters that are DTensors stay as they are.  A parameter that several modules share stays shared.

    Examples:
        >>> norm = tpk.nn.replicate_parameters(nn.LayerNorm(8), mesh["tp"], sequence_parallel=True)
        >>> [type(parameter).__name__ for parameter in norm.parameters()]
        ['DTensor', 'DTensor']
    """
    mesh = tp_mesh(group, module)
    converted = {} if converted is None else converted
    for owner in module.modules() if recurse else [module]:
        names = []
        for name, parameter in list(owner._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in converted:
                copy = replicate_parameter(parameter, mesh, requires_grad=parameter.requires_grad)
                converted[id(parameter)] = parameter, copy
            owner._parameters[name] = converted[id(parameter)][1]
            names.append(name)
        if names:
            owner.__class__ = _local_view(type(owner), tuple(names), sequence_parallel)  # type: ignore[arg-type]
    return module


@lru_cache(maxsize=256)
def _local_view(cls: type[nn.Module], names: tuple[str, ...], sum_gradients: bool) -> type[nn.Module]:
    """A subclass of ``cls`` whose attributes ``names`` are the parameters' local tensors."""
    members: dict[str, Any] = {name: local_property(name, sum_gradients) for name in names}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))


def local_property(name: str, sum_gradients: bool) -> property:
    """The local tensor of the parameter ``name``; ``sum_gradients``: its gradient is summed over the ranks."""

    def read(self: nn.Module) -> Tensor | None:
        parameter: Tensor | None = self._parameters[name]
        if not isinstance(parameter, DTensor):  # a caller put a plain tensor in its place (functional_call)
            return parameter
        if len(parameter.placements) > 1:  # on a mesh of several axes: at rest in FSDP2, which asks for it itself
            return parameter
        if not torch.is_grad_enabled():
            return local(parameter)
        tensor = parameter.to_local()
        if not sum_gradients or not tensor.requires_grad:
            return tensor
        if BY_BLOCKS in self.__dict__:
            return cast(Tensor, self.__dict__[BY_BLOCKS].copy_of(parameter, tensor))
        refuse(mesh_of(parameter), "a module with sequence_parallel", "its gradients are sums over each rank's part")
        if parameter.device_mesh.size() == 1:
            return tensor
        # A sum over ranks has a dimension: a parameter that is one number gets one on its way.
        return copy_to_group(tensor.reshape(tensor.shape or (1,)), mesh_of(parameter)).reshape(tensor.shape)

    return property(read)
