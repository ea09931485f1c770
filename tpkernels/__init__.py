"""tpkernels: GEMMs fused with the collectives of tensor parallelism.

The call is the same on one CPU machine, several hosts and GPUs; see the README for a start, ARCHITECTURE.md for the
house.
"""

from tpkernels import backends, errors, nn  # noqa: F401  (importing backends registers the implementations)
from tpkernels.comm.groups import init
from tpkernels.comm.launch import launch
from tpkernels.dispatch import Explanation
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
from tpkernels.sharding import ShardingPlan, make_plan, parallelize

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "ShardingPlan",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "array_split",
    "copy_matmul",
    "copy_to_group",
    "errors",
    "explain",
    "init",
    "launch",
    "make_plan",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nn",
    "parallelize",
    "reduce_scatter",
    "shard",
]
