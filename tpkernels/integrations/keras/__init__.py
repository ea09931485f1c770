"""Keras 3 models over several ranks: ``tpk.keras.TensorParallel(model)``, then ``compile`` and ``fit`` as before.

It needs Keras on the torch backend (``KERAS_BACKEND=torch``), and imports it when something is called.
"""

from __future__ import annotations

from tpkernels.integrations.keras.actions import Gather, Split, Sum
from tpkernels.integrations.keras.communicator import Communicator
from tpkernels.integrations.keras.cuts import Cut, array_split
from tpkernels.integrations.keras.on_jax import layout_map
from tpkernels.integrations.keras.parallel import TensorParallel, TensorParallelKeras
from tpkernels.integrations.keras.plan import KerasPlan
from tpkernels.integrations.keras.planner import make_plan
from tpkernels.integrations.keras.rules import DefaultConfig, analyze_dense_layer, get_default_config

__all__ = [
    "Communicator",
    "Cut",
    "DefaultConfig",
    "Gather",
    "KerasPlan",
    "Split",
    "Sum",
    "TensorParallel",
    "TensorParallelKeras",
    "analyze_dense_layer",
    "array_split",
    "get_default_config",
    "layout_map",
    "make_plan",
]
