"""Arguments of a module that are whole and meet parts in it: the ranks' shares of their gradient are summed.

::

    module(..., name=a)   runs as   module(..., name=a on every rank, equal);   da = sum over ranks of da_r

The places at which a deformable attention samples are such: each rank adds its heads' offsets to them, and layers
outside of the module take them whole.  It assumes that a plan has proven that all that the module makes of ``a`` gives
a rank's share of the gradient and no more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.sliced_arguments import named_arguments, with_arguments
from tpkernels.ops import copy_to_group

__all__ = ["sum_argument_gradients"]


def sum_argument_gradients(module: nn.Module, names: Collection[str], mesh: DeviceMesh) -> None:
    """Sum the gradients of arguments ``names`` over the ranks, in each call of ``module`` from now on.

    What needs no gradient is not copied; the module is called with another tensor object all the same, as it is where
    gradients are needed: code may ask whether two arguments are one.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = named_arguments(module, args, kwargs)
        copies = {name: _copy(given[name], mesh) for name in names if isinstance(given.get(name), Tensor)}
        return with_arguments(module, args, kwargs, copies)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _copy(value: Tensor, mesh: DeviceMesh) -> Tensor:
    trained = value.requires_grad and torch.is_grad_enabled() and mesh.size() > 1
    return copy_to_group(value, mesh) if trained else value.view_as(value)
