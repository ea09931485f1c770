"""The private names of transformers that this package touches, in this file alone, and whether they are still there.

transformers 5.17 is the first that keeps cut parameters as DTensors, which our layers need.
"""

from __future__ import annotations

import importlib
from typing import Any

from tpkernels.packages import needed

__all__ = ["NAMES", "first_missing", "mark_as_parallel", "styles", "unmarked"]

NAMES: dict[str, tuple[str, ...]] = {
    "transformers.distributed.parallel_utils": ("ALL_PARALLEL_STYLES",),
    "transformers.distributed.tensor_parallel": (
        "ColwiseParallel.install_forward",
        "ColwiseParallel.shard_param",
        "ColwiseParallel.validate_param",
        "RowwiseParallel.install_forward",
        "RowwiseParallel.shard_param",
        "EmbeddingParallel.install_forward",
        "PackedColwiseParallel.install_forward",
        "TensorParallelLayer.install_forward",
        "TensorParallelLayer.validate_param",
    ),
    "transformers.distributed.mixin": (
        "DistributedMixin._device_mesh",
        "DistributedMixin._is_distributed_loading_by_transformers",
        "DistributedMixin._tp_plan",
        "DistributedMixin._tp_size",
    ),
    "transformers.distributed": ("DistributedConfig.dp_size",),
    "transformers.trainer_callback": (
        "TrainerCallback.on_pre_optimizer_step",
        "TrainerCallback.on_save",
        "TrainerCallback.on_train_begin",
    ),
}
"""Module, and names in it."""

STYLE_NAMES = ("colwise", "rowwise", "colwise_rep", "rowwise_rep", "embedding_rowwise")


def first_missing() -> str | None:
    """The first name that the installed transformers does not have, as a sentence; None where it has all."""
    with needed("transformers", "this integration"):
        import transformers
    for module, names in NAMES.items():
        try:
            found: Any = importlib.import_module(module)
        except ImportError:
            return f"transformers {transformers.__version__} has no module {module}"
        for name in names:
            value = found
            for part in name.split("."):
                if not hasattr(value, part):
                    return f"transformers {transformers.__version__} has no {module}.{name}"
                value = getattr(value, part)
    missing = [name for name in STYLE_NAMES if name not in _registry()]
    return f"transformers {transformers.__version__} has no style {missing[0]!r}" if missing else None


def check() -> None:
    """Refuse a transformers whose private names are others.

    Raises:
        ValueError: one is missing; the message names it.
    """
    missing = first_missing()
    if missing is not None:
        raise ValueError(f"{missing}: this integration was tested with 5.24 and 5.23")


def styles() -> Any:
    """The registry of styles: what is set in it takes precedence, and what is deleted shows transformers' own again."""
    check()
    return _registry()


def _registry() -> Any:
    return importlib.import_module("transformers.distributed.parallel_utils").ALL_PARALLEL_STYLES


def kind(name: str) -> type[Any]:
    """A class of ``transformers.distributed.tensor_parallel``."""
    found: type[Any] = getattr(importlib.import_module("transformers.distributed.tensor_parallel"), name)
    return found


def wants_local_tensors(module: object) -> bool:
    """Whether a quantized layer computes by itself, on local tensors."""
    return bool(getattr(module, "_hf_quantized_needs_local_tp", False))


def mark_as_parallel(model: Any, mesh: Any, tp_size: int, dp_size: int) -> None:
    """Say to Trainer, accelerate and PEFT what transformers' own loading says of a model that it has cut."""
    from transformers.distributed import DistributedConfig

    check()
    model.config.distributed_config = DistributedConfig(tp_size=tp_size, fsdp_size=dp_size)
    model._tp_size = tp_size
    model._device_mesh = mesh
    model._is_distributed_loading_by_transformers = True
    model._tp_plan = {}  # its rules are not what cut the model
    if dp_size > 1:
        model._is_fsdp_managed_module = True  # Trainer then reduces the gradients of a step once, in the last backward
        model._fsdp_use_orig_params = True  # torch sets both; torch.compile refuses a model with the first one alone


class unmarked:
    """Within it, the model's configuration does not say that it is cut: it is written as it was before."""

    def __init__(self, model: Any) -> None:
        self.config = model.config

    def __enter__(self) -> None:
        self.before = self.config.__dict__.pop("distributed_config", None)

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            self.config.distributed_config = self.before
