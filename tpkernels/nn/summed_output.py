"""A layer that stays whole, and whose output goes into work on parts: the ranks' shares of its gradient are summed.

::

    y on every rank, equal;   dy = sum over ranks of what each rank's parts give

It assumes that all that is made of y gives a rank's share of the gradient and no more, which a plan has proven.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parameters import tp_mesh
from tpkernels.ops import copy_to_group

__all__ = ["sum_output_gradient"]


def sum_output_gradient(module: nn.Module, group: GroupLike) -> None:
    """Sum the gradient of what ``module`` gives over the group, in a forward hook."""
    mesh = tp_mesh(group, module)

    def summed(module: nn.Module, args: Any, output: Any) -> Any:  # code of the module's own may give ``(y, None)``
        return tree_map_only(Tensor, lambda y: copy_to_group(y, mesh), output) if mesh.size() > 1 else output

    module.register_forward_hook(summed)
