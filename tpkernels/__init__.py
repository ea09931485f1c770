"""tpkernels: GEMMs fused with the collectives of tensor parallelism.

The call is the same on one CPU machine, several hosts and GPUs; see the README for a start, ARCHITECTURE.md for the
house.
"""

from tpkernels import backends, errors, nn, optim  # noqa: F401  (importing backends registers the implementations)
from tpkernels.comm.groups import init
from tpkernels.comm.launch import launch
from tpkernels.dispatch import Explanation
from tpkernels.fp8 import quantize_fp8
from tpkernels.ops import (
    all_gather,
    all_gather_matmul,
    all_reduce,
    copy_matmul,
    copy_to_group,
    explain,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
    shard,
)
from tpkernels.partition import array_split
from tpkernels.sharding import (
    ShardingPlan,
    clip_grad_norm_,
    data_parallel,
    full_state_dict,
    load_full_state_dict,
    load_pretrained,
    load_snapshot,
    make_plan,
    parallelize,
    save_pretrained,
    save_snapshot,
)

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "ShardingPlan",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "array_split",
    "clip_grad_norm_",
    "copy_matmul",
    "copy_to_group",
    "data_parallel",
    "errors",
    "explain",
    "full_state_dict",
    "init",
    "launch",
    "load_full_state_dict",
    "load_pretrained",
    "load_snapshot",
    "make_plan",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nn",
    "optim",
    "parallelize",
    "quantize_fp8",
    "reduce_scatter",
    "save_pretrained",
    "save_snapshot",
    "shard",
]
