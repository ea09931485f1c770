"""Arguments of a module that takes all features of what others take this rank's part of.

::

    module(..., name=a_r)   runs as   module(..., name=all_gather(a_r, last dimension))

The values of FunASR's attention go to the heads, and as a whole into a convolution beside them.  It assumes that a plan
has proven that the module makes the same of them on every rank, so that its gradient is whole on each, and the part's
is a slice of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm import agreement
from tpkernels.comm.groups import resolve
from tpkernels.nn.sliced_arguments import named_arguments, with_arguments
from tpkernels.ops import all_gather
from tpkernels.partition import chunk_sizes

__all__ = ["gather_arguments"]


def gather_arguments(module: nn.Module, parts: Mapping[str, tuple[int, int]], mesh: DeviceMesh) -> None:
    """Let ``module`` take all of the arguments ``parts``, by name the features and the unit that ranks have multiples
    of, from now on.

    A call without the argument, or with None, is left alone.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = named_arguments(module, args, kwargs)
        present = {name: part for name, part in parts.items() if given.get(name) is not None}
        wholes = {name: _whole(name, given[name], *part, mesh) for name, part in present.items()}
        return with_arguments(module, args, kwargs, wholes)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _whole(name: str, value: Any, features: int, unit: int, mesh: DeviceMesh) -> Tensor:
    sizes = chunk_sizes(features, mesh.size(), unit)
    own = sizes[mesh.get_local_rank()]
    if not isinstance(value, Tensor) or not value.dim() or value.shape[-1] != own:
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        _refuse(mesh, f"{name} must be a tensor with this rank's {own} of {features} features, got {what}")
    return all_gather(value.contiguous(), mesh, dim=value.dim() - 1, shard_sizes=sizes, replicated_grad=True)


def _refuse(mesh: DeviceMesh, message: str) -> NoReturn:
    """Raise, and tell the peers, which may be in the call already."""
    if mesh.size() > 1:
        agreement.refuse(resolve(mesh), "all_gather", message)
    raise ValueError(message)
