"""tpkernels: GEMMs fused with the collectives of tensor parallelism.

The call is the same on one CPU machine, several hosts and GPUs; see the README for a start, ARCHITECTURE.md for the
house.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tpkernels import backends, errors  # noqa: F401  (importing backends registers the implementations)
from tpkernels.comm.startup import init
from tpkernels.dispatch import Explanation
from tpkernels.errors import VerificationError
from tpkernels.gemm.fp8 import quantize_fp8
from tpkernels.launching.local_ranks import LaunchError, launch
from tpkernels.ops import (
    Routing,
    all_gather,
    all_gather_grouped_matmul,
    all_gather_matmul,
    all_reduce,
    copy_grouped_matmul,
    copy_matmul,
    copy_to_group,
    dispatch_grouped_matmul,
    explain,
    grouped_matmul_all_reduce,
    grouped_matmul_combine,
    grouped_matmul_reduce_scatter,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
    shard,
)
from tpkernels.partition import array_split

if TYPE_CHECKING:
    from tpkernels import nn, optim, sharding
    from tpkernels.integrations import keras  # of a floor above, and imported when it is asked for
    from tpkernels.sharding import (
        ShardingPlan,
        Verification,
        clip_grad_norm_,
        full_state_dict,
        load_full_state_dict,
        load_optimizer_state_dict,
        load_pretrained,
        load_snapshot,
        make_plan,
        optimizer_state_dict,
        parallelize,
        register_layer,
        save_pretrained,
        save_snapshot,
        verify,
    )
    from tpkernels.sharding.data_parallel import data_parallel

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "LaunchError",
    "Routing",
    "ShardingPlan",
    "Verification",
    "VerificationError",
    "all_gather",
    "all_gather_grouped_matmul",
    "all_gather_matmul",
    "all_reduce",
    "array_split",
    "clip_grad_norm_",
    "copy_grouped_matmul",
    "copy_matmul",
    "copy_to_group",
    "data_parallel",
    "dispatch_grouped_matmul",
    "errors",
    "explain",
    "full_state_dict",
    "grouped_matmul_all_reduce",
    "grouped_matmul_combine",
    "grouped_matmul_reduce_scatter",
    "init",
    "keras",
    "launch",
    "load_full_state_dict",
    "load_optimizer_state_dict",
    "load_pretrained",
    "load_snapshot",
    "make_plan",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nn",
    "optim",
    "optimizer_state_dict",
    "parallelize",
    "quantize_fp8",
    "reduce_scatter",
    "register_layer",
    "save_pretrained",
    "save_snapshot",
    "shard",
    "sharding",
    "verify",
]


def _later(name: str) -> Any:
    """What else ``__all__`` names, imported when it is first asked for; the torch ops behind ``nn`` come with it.

    All of it stands on DTensor, FSDP or distributed checkpoints, which take longer to import than the rest together.
    """
    if name in ("nn", "optim", "sharding"):
        return importlib.import_module(f"tpkernels.{name}")
    if name == "keras":  # of a floor above: it is named here, and stands on all that is here
        return importlib.import_module(f"tpkernels.integrations.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tpkernels' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module("tpkernels.sharding"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would take any name for one that exists
    __getattr__ = _later
