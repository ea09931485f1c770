"""Whole models that ranks hold equally: compared before they are cut, and before they are replicated over "dp".

It owns which tensors of a model count (parameters, buffers, and tensors that modules keep as plain attributes), and
which ranks must agree: those of the "tp" axis and of axes for data parallelism.  :mod:`tpkernels.nn.same_weights` does
the comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.comm.groups import Group, GroupLike, resolve
from tpkernels.nn.parameters import TP_AXES, tp_mesh
from tpkernels.nn.same_weights import Comparison, check_mode, compare

__all__ = ["compare_models", "compare_replicas"]

DATA_AXES = ("dp", "data")
"""How names of axes begin whose ranks hold equal weights; the ranks of others ("pp") hold other parts of the model."""


def compare_models(
    model: nn.Module, mesh: GroupLike, init_weights: str, *, check: Callable[[nn.Module], None] | None = None
) -> Comparison:
    """Compare this rank's model with the others' over ``mesh``; changes nothing, see :meth:`Comparison.take_first`.

    Args:
        mesh: all axes of it that hold equal weights are compared; random generators within "tp" alone.
        check: what this rank's model must pass; if it does not somewhere, all ranks raise.

    Raises:
        ValueError: ``check`` did, or the models differ in names, shapes or dtypes; with "same" in anything.
    """
    check_mode(init_weights)
    error: ValueError | None = None
    if check is not None:
        try:
            check(model)
        except ValueError as refused:
            error = refused
    groups = _groups(mesh)
    if all(group.size == 1 for group in groups):
        if error is not None:
            raise error
        return Comparison("parallelize", tuple(groups), {})
    tensors = {} if error is not None else _tensors(model)
    tp = resolve(tp_mesh(mesh))
    return compare("parallelize", groups, tensors, mode=init_weights, generators=tp, error=error)


def compare_replicas(model: nn.Module, mesh: GroupLike, init_weights: str) -> Comparison:
    """Compare what this rank holds of a parallel model with what the others of "dp" hold."""
    check_mode(init_weights)
    group = resolve(mesh)
    if group.size == 1:
        return Comparison("data_parallel", (group,), {})
    return compare("data_parallel", [group], _tensors(model), mode=init_weights)


def _groups(mesh: GroupLike) -> list[Group]:
    if isinstance(mesh, dist.ProcessGroup) or mesh.ndim == 1:
        return [resolve(mesh)]
    names = mesh.mesh_dim_names or ()
    axes = [axis for axis, name in enumerate(names) if name in TP_AXES or name.startswith(DATA_AXES)]
    return [resolve(mesh.get_group(axis)) for axis in axes]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a rank computes with, by name; a tensor with several names appears once."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}" if prefix else name] = value
    tensors, seen = {}, set[int]()
    for name, tensor in found.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensors
