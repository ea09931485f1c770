"""The fused ops and collectives, one file each: equation, checks, schema, shapes under compile, gradient."""

from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter, shard
from tpkernels.ops.copy_matmul import copy_matmul
from tpkernels.ops.explain import explain
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "copy_matmul",
    "copy_to_group",
    "explain",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "shard",
]
