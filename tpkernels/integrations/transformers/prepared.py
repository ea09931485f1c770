"""A model for transformers' Trainer, accelerate and PEFT: ``tpk.parallelize``, and what these ask of a parallel model.

Trainer and accelerate look for a few attributes that transformers sets when it cuts a model itself: without them they
wrap the model in ``DistributedDataParallel``, give the ranks different batches, and save from rank 0 alone.
:func:`prepare` sets them for a model that our plan has cut, with or without a ``tp_plan`` of its own.

Refuses models that are not transformers', and cuts that leave a rank with nothing of a parameter: accelerate tells
parameters apart by where they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.integrations.transformers import private_names
from tpkernels.integrations.transformers.adapters import is_adapter, let_adapters_merge
from tpkernels.integrations.transformers.experts import hold_apart
from tpkernels.nn.parameters import tp_mesh
from tpkernels.packages import needed
from tpkernels.planning.alone.whole_layers import name_whole_layers
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.planner import make_plan
from tpkernels.sharding.apply import parallelize
from tpkernels.sharding.data_parallel import data_parallel
from tpkernels.state.collective_errors import Ranks
from tpkernels.state.plain_state import speak_originals

__all__ = ["prepare", "speak_for_trainer"]

M = TypeVar("M", bound=nn.Module)


def prepare(
    model: M,
    mesh: DeviceMesh,
    plan: str | ShardingPlan | Mapping[str, object] = "auto",
    *,
    shard: bool = False,
    units: Iterable[nn.Module] | None = None,
    strict: bool = False,
    verify: bool = False,
    example_inputs: object = None,
) -> M:
    """Make a model of transformers tensor-parallel in place, for its Trainer or accelerate; returns it.

    Args:
        mesh: a mesh with a "tp" axis (``tpk.init()``), or that axis; with an axis "dp" of several ranks the model
            becomes data-parallel over it, too (:func:`tpkernels.data_parallel`).
        plan, verify, example_inputs: as for :func:`tpkernels.parallelize`.
        shard, units: with several replicas, as for ``data_parallel``: whether parameters are cut over them, and which
            travel together. With ``units=()`` all do, and torch compiles the model as one graph.
        strict: with ``plan="auto"``, a linear layer or experts that would stay whole raise; otherwise one line names
            them, with the reason.

    The ranks of a replica train on the same batches, and Trainer gives each replica its own; ``save_pretrained`` writes
    the unsharded model.  Adapters of PEFT are added before.

    Raises:
        ValueError: not a model of transformers, a rank that would hold nothing of a parameter, a transformers with
            other private names; with ``strict``, a layer that would stay whole; and whatever ``parallelize`` and
            ``data_parallel`` refuse.
    """
    private_names.check()
    with needed("transformers", "prepare()"):
        from transformers import PreTrainedModel
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(f"prepare() takes a model of transformers, or one that PEFT made of it, got {type(model)}")
    tp = tp_mesh(mesh, model)
    replicas = mesh.size() // tp.size()
    if any(is_adapter(name) for name, _ in model.named_modules()):
        let_adapters_merge()
    if plan == "auto":
        plan = make_plan(model, tp, example_inputs=example_inputs)
        name_whole_layers(plan, model, strict=strict)
    parallelize(model, tp, plan, verify=verify, example_inputs=example_inputs)
    Ranks.of(model).step("prepare", lambda: _check_parts(model))
    if replicas > 1:
        # Without PEFT's wrapper, because merged models are called without it: FSDP's hooks are the called module's.
        within = {id(parameter) for parameter in inner.parameters()}
        only_inner = all(id(parameter) in within for parameter in model.parameters())
        data_parallel(inner if only_inner else model, mesh, shard=shard, units=units)
    private_names.mark_as_parallel(inner, tp, tp.size(), replicas)
    speak_for_trainer(model)
    return model


def speak_for_trainer(model: Any) -> None:
    """Let a parallel model load whole tensors and save itself whole, whoever has cut it."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not any(isinstance(parameter, DTensor) for parameter in inner.parameters()):
        raise ValueError(f"the {type(inner).__name__} is not parallel: call prepare(), or load it with a tp_plan")
    hold_apart(inner)
    if inner is model and not getattr(type(inner), "_speaks_originals", False):
        speak_originals(inner)
    if not getattr(type(inner), "_saves_unmarked", False):
        kind: Any = type(inner)
        inner.__class__ = _saving(kind)


def _check_parts(model: nn.Module) -> None:
    empty = [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and parameter.numel() and not parameter.to_local().numel()
    ]
    if empty:
        raise ValueError(f"a rank holds nothing of {empty[0]}: use fewer ranks")


@lru_cache(maxsize=256)
def _saving(cls: type[Any]) -> type[Any]:
    """A subclass whose ``save_pretrained`` writes the configuration of the unsharded model, as it does the weights."""

    @wraps(cls.save_pretrained)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        if not getattr(type(self), "_speaks_originals", False):
            # PEFT's, whose adapters it has merged: until then, names are PEFT's own.
            return speak_originals(self).save_pretrained(*args, **options)
        with private_names.unmarked(self):
            return cls.save_pretrained(self, *args, **options)

    members = {"save_pretrained": save_pretrained, "_saves_unmarked": True}
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[Any]", type(cls.__name__, (cls,), members | names))
