"""fp32 masters of low-precision parameters, and optimizer state that the ranks of a group share.

An optimizer of ``torch.optim`` that takes DTensors works on *masters* in place of the parameters::

    master = parameter, in another dtype and, where it is replicated, cut along a dimension over the group
    optimizer.step() on the masters, with gradients converted and cut alike (nothing is sent)
    parameter = master, rounded; one all-gather for all that were cut, in the parameters' dtype

Masters are DTensors, so their state is too: distributed checkpoints save it with its placements and load it at another
number of ranks.  A parameter that is neither converted nor cut is its own master and costs nothing.

Assumes that gradients are complete when ``step`` runs, as the modules of tpkernels and ``tpk.data_parallel`` leave
them, and equal on all ranks that hold a replica.  Refuses sparse gradients and parameters on a mesh whose
tensor-parallel axis has no name.

The idea of masters in the optimizer's state is that of NVIDIA's apex, that of sharding state is ZeRO's (Rajbhandari et
al. 2019).  ``torch.distributed.optim.ZeroRedundancyOptimizer`` does not serve here: it deals out whole parameters,
and keeps a state that is no DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer

from tpkernels.nn.parameters import tp_axis, tp_mesh
from tpkernels.ops import all_gather
from tpkernels.partition import chunk_sizes, offsets

__all__ = ["MasterWeights"]

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class _Cut:
    """How what this rank holds of a replicated parameter is cut along ``dim`` over the ranks of the group."""

    group: DeviceMesh
    dim: int
    sizes: tuple[int, ...]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return whole.narrow(self.dim, offsets(self.sizes)[rank], self.sizes[rank])

    def mine(self, whole: Tensor) -> Tensor:
        return self.part(whole, self.group.get_local_rank())


@dataclass(frozen=True)
class _Entry:
    parameter: Tensor
    master: Tensor
    cut: _Cut | None

    @property
    def is_own_master(self) -> bool:
        return self.master is self.parameter

    @property
    def is_more_exact(self) -> bool:
        """Whether the master has digits that the parameter does not have."""
        return self.master.dtype != self.parameter.dtype


class MasterWeights(Optimizer):
    """An optimizer on fp32 masters of the parameters, for any optimizer of ``torch.optim`` that takes DTensors.

    ::

        optimizer = tpk.optim.MasterWeights(model.parameters(), lambda masters: torch.optim.AdamW(masters, lr=3e-4))

    Args:
        params: parameters or groups of them, as any optimizer takes them; DTensors or plain tensors.
        make: makes the optimizer, given the masters in the groups of ``params``.
        dtype: that of the masters; a parameter that has it is its own master.  None keeps every parameter's dtype.
        shard_replicas: cut masters and state of replicated parameters over the tensor-parallel group (the mesh's "tp"
            axis, or its only one), along the first dimension that is not cut already: one of size n becomes
            ceil(n / ranks).  What has no such dimension, as vectors that FSDP2 has cut, stays whole.

    It is an ``Optimizer`` over ``params``: schedulers, ``zero_grad``, ``state_dict``, ``tpk.save_snapshot`` and
    ``torch.distributed.checkpoint.state_dict`` work; ``state[parameter]["master"]`` is a master of another dtype.  A
    parameter's ``main_grad`` (:func:`tpkernels.nn.use_main_grads`) is taken where it has one, and ``grad`` where not;
    the caller zeroes both.  Call :meth:`reset_masters` after you have written to parameters yourself.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)).bfloat16(), mesh["tp"])
        >>> optimizer = tpk.optim.MasterWeights(mlp.parameters(), lambda masters: torch.optim.AdamW(masters, lr=1e-4))
        >>> mlp(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()

    Raises:
        ValueError: no floating-point dtype, parameters that are none, a mesh without a tensor-parallel axis; in
            ``step`` a sparse gradient; in ``load_state_dict`` a state without masters.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        make: Callable[[Groups], Optimizer],
        *,
        dtype: torch.dtype | None = torch.float32,
        shard_replicas: bool = False,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype ({dtype}) must be a floating-point dtype, or None to keep the parameters' own")
        super().__init__(cast(Any, params), {})
        self._entries = [
            [_entry(parameter, dtype, shard_replicas) for parameter in group["params"]] for group in self.param_groups
        ]
        self.optimizer = make(
            [
                {**group, "params": [entry.master for entry in entries]}
                for group, entries in zip(self.param_groups, self._entries, strict=True)
            ]
        )
        for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            group |= {key: value for key, value in inner.items() if key != "params"}
        self.defaults = self.optimizer.defaults

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the optimizer on the masters; the parameters follow."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = self._all_entries()
        for entry in entries:
            if not entry.is_own_master:
                entry.master.grad = _gradient(entry)
                if not entry.is_more_exact:
                    _local(entry.master).copy_(_mine(entry, entry.parameter))
        for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            inner |= {key: value for key, value in group.items() if key != "params"}  # what a scheduler has changed
        self.optimizer.step()
        _write_back([entry for entry in entries if not entry.is_own_master and entry.master.grad is not None])
        for entry in entries:
            if not entry.is_own_master:
                entry.master.grad = None
        self._show_state()
        return loss

    @torch.no_grad()
    def reset_masters(self) -> None:
        """Set the masters to the parameters' values, as after loading weights without optimizer state."""
        for entry in self._all_entries():
            if not entry.is_own_master:
                _local(entry.master).copy_(_mine(entry, entry.parameter))

    def state_dict(self) -> dict[str, Any]:
        self._show_state()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or the same laid out otherwise; the parameters are the model's to load."""
        entries, keys = self._all_entries(), [key for group in state_dict["param_groups"] for key in group["params"]]
        named = list(zip(keys, entries, strict=False))  # another length is refused by the optimizer's own load
        kept = {
            key: {name: _laid_out(value, entry.master) for name, value in state_dict["state"][key].items()}
            for key, entry in named
            if key in state_dict["state"]
        }
        masters = {key: state.pop("master") for key, state in kept.items() if "master" in state}
        missing = [key for key, entry in named if key in kept and key not in masters and entry.is_more_exact]
        if missing:
            raise ValueError(
                f"state_dict holds no master for {len(missing)} of {len(entries)} parameters, the first is "
                f"{missing[0]!r}: it was saved by another optimizer than MasterWeights, or with another dtype or "
                "shard_replicas. Load the model's weights and call reset_masters() to start from them"
            )
        self.optimizer.load_state_dict({**state_dict, "state": kept})
        for key, entry in named:
            if key in masters and entry.is_more_exact:
                _local(entry.master).copy_(_local(masters[key]))
        for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            group |= {key: value for key, value in inner.items() if key != "params"}
        self._show_state()

    def _all_entries(self) -> list[_Entry]:
        return [entry for entries in self._entries for entry in entries]

    def _show_state(self) -> None:
        """Read the state anew, because optimizers may rebind what is in it (``state["step"] += 1``)."""
        for entry in self._all_entries():
            if entry.master in self.optimizer.state:
                state = dict(self.optimizer.state[entry.master])
                self.state[entry.parameter] = {**state, "master": entry.master} if entry.is_more_exact else state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "optimizer"):
            raise ValueError("MasterWeights takes all its parameters when it is made: pass groups to the constructor")
        super().add_param_group(param_group)


def _entry(parameter: Tensor, dtype: torch.dtype | None, shard_replicas: bool) -> _Entry:
    if not parameter.is_floating_point():
        raise ValueError(f"a parameter of dtype {parameter.dtype} and shape {tuple(parameter.shape)} has no master")
    target = dtype or parameter.dtype
    dim = _free_dim(parameter) if shard_replicas else None
    if dim is None:
        if target == parameter.dtype:
            return _Entry(parameter, parameter, None)
        return _Entry(parameter, parameter.detach().to(target).requires_grad_(), None)
    assert isinstance(parameter, DTensor)
    axis, group = _tp_axis(parameter.device_mesh), _tp_group(parameter.device_mesh)
    cut = _Cut(group, dim, chunk_sizes(parameter.shape[dim], group.size()))
    part = cut.mine(parameter._local_tensor.detach()).to(target, copy=True, memory_format=torch.contiguous_format)
    placements = (*parameter.placements[:axis], Shard(dim), *parameter.placements[axis + 1 :])
    return _Entry(parameter, _as_dtensor(part, parameter, placements).requires_grad_(), cut)


def _free_dim(parameter: Tensor) -> int | None:
    """The dimension to cut a replicated parameter along; None where there is none.

    Not one that another axis has cut: parts of parts need not be the parts that one cut over both axes makes, which is
    what torch 2.13 gathers where a mesh has been flattened.
    """
    if not isinstance(parameter, DTensor):
        return None
    axis = _tp_axis(parameter.device_mesh)
    if parameter.device_mesh.size(axis) == 1 or not parameter.placements[axis].is_replicate():
        return None
    cut = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
    return next((dim for dim in range(parameter.dim()) if dim not in cut), None)


def _tp_axis(mesh: DeviceMesh) -> int:
    if mesh.ndim == 1:
        return 0
    names, axis = mesh.mesh_dim_names or (), tp_axis(mesh)
    if axis is None:
        raise ValueError(f'shard_replicas needs a mesh with a "tp" axis, got axes {names or mesh.ndim}')
    return names.index(axis)


def _tp_group(mesh: DeviceMesh) -> DeviceMesh:
    return tp_mesh(mesh)


def _as_dtensor(part: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _mine(entry: _Entry, tensor: Tensor) -> Tensor:
    """The master's part of the parameter or its gradient."""
    return entry.cut.mine(_local(tensor)) if entry.cut else _local(tensor)


def _laid_out(value: Any, master: Tensor) -> Any:
    """A saved slot as the optimizer of ``master`` expects it: slots are made like their parameters."""
    if not isinstance(value, DTensor) or not isinstance(master, DTensor) or value.shape != master.shape:
        return value
    return value if value.placements == master.placements else value.redistribute(placements=master.placements)


def _gradient(entry: _Entry) -> Tensor | None:
    parameter, master = entry.parameter, entry.master
    grad: Tensor | None = getattr(parameter, "main_grad", None)
    grad = parameter.grad if grad is None else grad
    if grad is None:
        return None
    if grad.is_sparse:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which has no master"
        )
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    part = _mine(entry, grad).to(master.dtype).contiguous()  # fused optimizers read it as the master lies
    return _as_dtensor(part, master, master.placements) if isinstance(master, DTensor) else part


def _write_back(entries: Sequence[_Entry]) -> None:
    """Write masters to their parameters; those that are cut, of one group and dtype, in one all-gather."""
    gathers: dict[tuple[DeviceMesh, torch.dtype], list[tuple[_Entry, _Cut]]] = {}
    for entry in entries:
        if entry.cut is None:
            _local(entry.parameter).copy_(_local(entry.master))
        else:
            gathers.setdefault((entry.cut.group, entry.parameter.dtype), []).append((entry, entry.cut))
    for (group, dtype), members in gathers.items():
        counts = [cut.part(_local(entry.parameter), r).numel() for r in range(group.size()) for entry, cut in members]
        mine = torch.cat([_local(entry.master).flatten().to(dtype) for entry, _ in members])
        sizes = [sum(counts[i : i + len(members)]) for i in range(0, len(counts), len(members))]
        pieces = iter(all_gather(mine, group, dim=0, shard_sizes=sizes).split(counts))
        for rank in range(group.size()):
            for entry, cut in members:
                target = cut.part(_local(entry.parameter), rank)
                target.copy_(next(pieces).view(target.shape))
