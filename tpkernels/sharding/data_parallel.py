"""Data parallelism around a tensor-parallel model: replicas, or parameters sharded over them.

Both are torch's FSDP2, which keeps DTensor parameters what they are and averages their gradients over the mesh's "dp"
axis while the backward pass runs.  The class ``torch.nn.parallel.DistributedDataParallel`` cannot do this (torch 2.13):

- its constructor broadcasts the parameters, which raises "Operator c10d.broadcast_.default does not have a sharding
  strategy registered", or for uneven cuts "Cannot flatten unevenly sharded tensor";
- with ``init_sync=False`` the first backward pass raises "got mixed torch.Tensor and DTensor";
- torch's private way around (``_pre_dp_module_transform``) hides the parameters: after one forward pass of a model that
  ``parallelize_module`` made, ``named_parameters()`` and ``state_dict()`` are empty.

Gradients are means over "dp".  Where the micro-batches of a step differ in size, the caller weighs each loss by its
share of the tokens.

Owns which modules form a unit of communication.  Refuses models with parameters that are no DTensors: optimizers and
``clip_grad_norm_`` would refuse the mixture later, or compute a wrong norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tpkernels.comm.same_bits import same_bits_of
from tpkernels.gemm.canonical import check_job
from tpkernels.nn.parameters import tp_axis
from tpkernels.nn.retired import retires_parameters
from tpkernels.sharding.replicas import compare_replicas
from tpkernels.sharding.tree_reduce_scatter import TreeReduceScatter

__all__ = ["data_parallel"]

M = TypeVar("M", bound=nn.Module)
DP_AXES = ("dp", "data_parallel")


@retires_parameters
def data_parallel(
    model: M,
    mesh: DeviceMesh,
    *,
    shard: bool = False,
    units: Iterable[nn.Module] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    init_weights: str = "rank 0",
) -> M:
    """Make a tensor-parallel model data-parallel over ``mesh["dp"]``, in place; returns it.

    ::

        loss_d = model(batch of replica d)            parameter.grad = mean over replicas of the gradients of loss_d

    ===============  ==============================  ==========================================
    per rank         ``shard=False`` (DDP)           ``shard=True`` (FSDP2)
    ===============  ==============================  ==========================================
    parameters       this TP rank's                  1 / dp of them, cut along their first dim
    forward pass     sends nothing more              all-gathers each unit's parameters
    backward pass    all-reduces each unit's         gathers again, reduce-scatters gradients
    ===============  ==============================  ==========================================

    Args:
        mesh: a mesh with axes "dp" and "tp" (``tpk.init(dp=..., tp=...)``), or as Lightning calls them, "data_parallel"
            and "tensor_parallel"; "dp" may have one rank.
        units: modules whose parameters travel together, beside what is left for ``model`` itself; default: the members
            of its ``nn.ModuleList`` s, which are the blocks of most models.  Each must be called as a module.
            ``torch.compile`` does not trace what FSDP2 does between units: it makes graphs of the units, and one of the
            whole model where ``units=()`` makes that one unit, whose gradients travel together.
        policy: a policy of torch's for mixed precision.
            ``MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`` computes in bf16 while the
            parameters, which the optimizer works on, stay fp32 masters.
        init_weights: as for ``tpk.parallelize``, for what the replicas hold: "rank 0" gives all of them the first
            one's parameters and buffers, with "same" replicas that differ raise.

    Call it after ``tpk.parallelize`` and before the optimizer is made: parameters become DTensors on the axes
    ("dp", "tp").  Only the backward pass of the last micro-batch needs to communicate: call
    ``model.set_requires_gradient_sync(False)`` before the others.

    Examples:
        >>> mesh = tpk.init(dp=2, tp=1)
        >>> model = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> model = tpk.data_parallel(model, mesh)
        >>> model(torch.full((4, 8), float(rank))).sum().backward()  # gradients are means over both ranks' batches

    Raises:
        ValueError: a mesh without these axes, parameters that are no DTensors or live on another mesh, a unit that is
            no part of ``model``, a second call, replicas that differ in names, shapes or dtypes; with ``same_bits`` a
            ``dp`` that is no power of two, or larger than 2 without ``shard``.
    """
    names = mesh.mesh_dim_names or ()
    dp, tp = next((name for name in DP_AXES if name in names), None), tp_axis(mesh)
    if dp is None or tp is None:
        raise ValueError(
            f'mesh must have the axes "dp" and "tp", got {names or mesh.ndim}: use tpk.init(dp=..., tp=...)'
        )
    _check_parameters(model, mesh[tp], mesh)
    chosen = list(_blocks(model) if units is None else units)
    foreign = [unit for unit in chosen if all(unit is not module for module in model.modules())]
    if foreign:
        raise ValueError(f"{len(foreign)} of {len(chosen)} units are not part of the model, for example {foreign[0]}")
    same_bits = same_bits_of(mesh[tp].get_group())
    if same_bits:
        check_job(same_bits, mesh[dp].size(), mesh[tp].size(), mesh.device_type)
        if mesh[dp].size() > 2 and not shard:
            raise ValueError(
                f"same_bits ({same_bits}): torch's all-reduce adds more than two replicas (dp={mesh[dp].size()}) in an "
                "order that depends on the tensor-parallel degree; with shard=True this library adds them"
            )
    replicas = compare_replicas(model, mesh[dp], init_weights)
    replicas.take_first()
    replicas.report(stacklevel=3)
    policy = policy or MixedPrecisionPolicy()
    modules: list[nn.Module] = [*(unit for unit in chosen if unit is not model), model]
    for unit in modules:
        if shard:
            sharded = fully_shard(unit, mesh=mesh[dp], mp_policy=policy)
            if same_bits:
                sharded.set_custom_reduce_scatter(cast(Any, TreeReduceScatter()))
        else:
            # Here, because it is torch's own business where this lives: what needs it not, must not fail with it.
            from torch.distributed._composable.replicate_with_fsdp import replicate

            replicate(unit, mesh=mesh[dp], mp_policy=policy)
    return model


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists; a list has no forward pass, and so is no unit itself."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (member for member in child if any(True for _ in member.parameters()))
        else:
            yield from _blocks(child)


def _check_parameters(model: nn.Module, tp: DeviceMesh, mesh: DeviceMesh) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name} is not a DTensor: call tpk.parallelize(model, mesh) first, which cuts what its plan "
                "names and replicates the rest"
            )
        if parameter.device_mesh.ndim > 1:
            raise ValueError(f"parameter {name} is data-parallel already, on {parameter.device_mesh}")
        if parameter.device_mesh != tp:
            raise ValueError(
                f'parameter {name} lives on {parameter.device_mesh}, not on the axis "tp" of {mesh}: parallelize the '
                "model with the same mesh"
            )
