"""Lightning: our plans as the ``parallelize_fn`` of its ``ModelParallelStrategy``, in Fabric and in its Trainer.

::

    strategy = ModelParallelStrategy(parallelize_fn=tpk_lightning.parallelize())                # Fabric

    def configure_model(self):                                                                  # Trainer
        tpk_lightning.parallelize()(self.model, self.device_mesh)

Lightning's mesh has the axes "data_parallel" and "tensor_parallel"; ``tpk.parallelize`` and ``tpk.data_parallel`` know
them by these names.

With ``empty_init`` the model has no values when it is cut, and Lightning would then call ``reset_parameters`` of each
module and leave everything else, such as the buffers of rotary positions, as it finds the memory.  A model like that is
therefore loaded from a checkpoint here, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.planning.plan import ShardingPlan
from tpkernels.sharding import apply
from tpkernels.sharding.data_parallel import DP_AXES, data_parallel
from tpkernels.state.checkpoint import load_pretrained

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(
    *,
    plan: str | ShardingPlan | Mapping[str, object] = "auto",
    checkpoint: str | Path | None = None,
    shard: bool = False,
    verify: bool = False,
    example_inputs: object = None,
) -> Callable[[M, DeviceMesh], M]:
    """A function of a model and Lightning's mesh that makes the model parallel in place, and returns it.

    Args:
        plan, verify, example_inputs: as for :func:`tpkernels.parallelize`.
        checkpoint: a folder or file as for :func:`tpkernels.load_pretrained`, which each rank reads its part of once
            the model is cut; what ``empty_init`` needs.
        shard: with several replicas, cut parameters over them (:func:`tpkernels.data_parallel`).

    Raises (the function):
        ValueError: a model on the meta device without ``checkpoint``; and whatever these functions refuse.
    """

    def apply_plan(model: M, mesh: DeviceMesh) -> M:
        empty = [name for name, x in chain(model.named_parameters(), model.named_buffers()) if x.is_meta]
        if empty and checkpoint is None:
            raise ValueError(
                f"{empty[0]} has no values (empty_init=True), and Lightning would train on what the memory holds: say "
                "parallelize(checkpoint=...) with the folder of its weights, or make the model with empty_init=False"
            )
        apply.parallelize(model, mesh, plan, verify=verify, example_inputs=example_inputs)
        if checkpoint is not None:
            load_pretrained(model, checkpoint)
        axis = next((name for name in DP_AXES if name in (mesh.mesh_dim_names or ())), None)
        if mesh.ndim > 1 and axis is not None and mesh[axis].size() > 1:
            data_parallel(model, mesh, shard=shard)
        return model

    return apply_plan
