"""torchtitan 0.2: its Llama 3 cut by a plan of ours, as a train spec.

::

    --experimental.custom_import tpkernels.integrations.torchtitan_02 --model.name llama3_tpkernels

Version 0.2 has no overrides (:mod:`tpkernels.integrations.torchtitan` is for 0.3).  A model is a train spec, with a
function that makes it parallel, and an import may register more of them: this one registers ``llama3_tpkernels``, which
is torchtitan's own ``llama3`` with :func:`parallelize_llama`.  Every layer that tensor parallelism cuts runs an op of
ours, the table and the head among them; query, key and value run as one, gate and up as another.  Recomputed and
compiled blocks, FSDP and replicas are torchtitan's, whose function is called behind ours, and so are the names in
checkpoints.

Activations between the blocks are whole on every rank, where torchtitan cuts them along the sequence, and so are the
logits: the loss is that of one process, also where ``parallelism.disable_loss_parallel`` is not set.

Refuses pipelines, context parallelism, float8, asynchronous tensor parallelism and attention other than "sdpa", none of
which was tested.  All that this touches of torchtitan is listed in :data:`NAMES`; the first that is not there is named.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from typing import Any

from torch import nn

from tpkernels.packages import needed
from tpkernels.planning.entries.shared_inputs import share_inputs
from tpkernels.sharding.apply import parallelize

__all__ = ["NAME", "first_missing", "parallelize_llama"]

NAME = "llama3_tpkernels"
PLAN = {
    "tok_embeddings": "vocabulary",
    "layers.*.attention.w[qkv]": "column",
    "layers.*.attention.wo": "row",
    "layers.*.feed_forward.w[13]": "column",
    "layers.*.feed_forward.w2": "row",
    "output": "column_gather",
}
SHARED = (("attention.wq", "attention.wk", "attention.wv"), ("feed_forward.w1", "feed_forward.w3"))
"""Layers of a block that run as one op."""
NAMES = {
    "torchtitan.protocols.train_spec": ("register_train_spec",),
    "torchtitan.distributed": ("ParallelDims",),
    "torchtitan.models.llama3": ("get_train_spec", "parallelize_llama"),
}
"""What this uses of torchtitan 0.2, by module."""


def first_missing() -> str | None:
    """The first name that the installed torchtitan does not have, as a sentence; None where it has all."""
    for module, names in NAMES.items():
        with needed("torchtitan", __name__):
            import torchtitan  # noqa: F401
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("torchtitan"):
                raise
            return f"torchtitan {version('torchtitan')} has no module {error.name}"
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            return f"torchtitan {version('torchtitan')} has no {module}.{missing[0]}"
    return None


def parallelize_llama(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """The ``parallelize_fn`` of the train spec: torchtitan's, with our layers where it is to cut tensors.

    Raises:
        ValueError: an option that our layers do not have.
    """
    stock = import_module("torchtitan.models.llama3").parallelize_llama
    if parallel_dims.tp_enabled:
        _check(model, parallel_dims, job_config)
        parallelize(model, parallel_dims.get_mesh("tp"), PLAN)
        modules = dict(model.named_modules())
        blocks = [path.removesuffix(".attention") for path in modules if path.endswith(".attention")]
        share_inputs([[f"{block}.{name}" for name in names] for block in blocks for names in SHARED], model, modules)
        parallel_dims = _with_tensors_cut(parallel_dims)
    made: nn.Module = stock(model, parallel_dims, job_config)
    return made


def _check(model: Any, parallel_dims: Any, job_config: Any) -> None:
    attention = getattr(model.model_args, "attn_type", "sdpa")
    for refused, what in (
        (parallel_dims.pp_enabled, "parallelism.pipeline_parallel_degree"),
        (parallel_dims.cp_enabled, "parallelism.context_parallel_degree"),
        (job_config.parallelism.enable_async_tensor_parallel, "parallelism.enable_async_tensor_parallel"),
        (any("float8" in name or "mx" in name for name in job_config.model.converters), "model.converters of float8"),
        (attention != "sdpa", f"attn_type {attention!r}"),
    ):
        if refused:
            raise ValueError(f"{NAME} does not serve {what}: use torchtitan's llama3, or leave it out")


def _with_tensors_cut(parallel_dims: Any) -> Any:
    """The same, where torchtitan finds nothing left to do for tensor parallelism; sizes and meshes stay."""
    kind = type(parallel_dims)
    done = copy.copy(parallel_dims)
    done.__class__ = type(kind.__name__, (kind,), {"tp_enabled": False})
    return done


def _register() -> None:
    missing = first_missing()
    if missing is not None:
        raise ImportError(f"{missing}: this module is for 0.2; later versions have tpkernels.integrations.torchtitan")
    specs = import_module("torchtitan.protocols.train_spec")
    spec = import_module("torchtitan.models.llama3").get_train_spec()
    specs.register_train_spec(NAME, replace(spec, parallelize_fn=parallelize_llama))


_register()
