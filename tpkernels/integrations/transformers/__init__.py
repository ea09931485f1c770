"""Hugging Face's transformers: our ops in its own tensor parallelism, its Trainer, and models from configurations.

``register()`` puts our ops behind transformers' style names, for ``tp_plan="auto"`` and ``DistributedConfig``;
``prepare()`` is ``tpk.parallelize`` for a model that its Trainer or accelerate will get, with or without a ``tp_plan``;
``Snapshots()`` is the callback that saves optimizer, scheduler and random numbers with each checkpoint.

What it needs of transformers' private names is in ``private_names.py`` alone.
"""

from typing import TYPE_CHECKING, Any

from tpkernels.integrations.transformers.configurations import meta_model, real_model
from tpkernels.integrations.transformers.prepared import prepare
from tpkernels.integrations.transformers.registered import Registration, register

if TYPE_CHECKING:
    from tpkernels.integrations.transformers.snapshots import Snapshots

__all__ = ["Registration", "Snapshots", "meta_model", "prepare", "real_model", "register"]


def _later(name: str) -> Any:
    """``Snapshots`` has a base class of transformers', which is imported when it is first asked for."""
    if name != "Snapshots":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpkernels.integrations.transformers.snapshots import callback_class

    return callback_class()


if not TYPE_CHECKING:  # a type checker would take any name for one that exists
    __getattr__ = _later
