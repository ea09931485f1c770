"""The fused ops and collectives, one file each: equation, checks, schema, shapes under compile, gradient."""

from tpkernels.ops.all_gather_grouped_matmul import all_gather_grouped_matmul
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter, shard
from tpkernels.ops.copy_grouped_matmul import copy_grouped_matmul
from tpkernels.ops.copy_matmul import copy_matmul
from tpkernels.ops.dispatch_grouped_matmul import dispatch_grouped_matmul
from tpkernels.ops.explain import explain
from tpkernels.ops.grouped_matmul_all_reduce import grouped_matmul_all_reduce
from tpkernels.ops.grouped_matmul_combine import grouped_matmul_combine
from tpkernels.ops.grouped_matmul_reduce_scatter import grouped_matmul_reduce_scatter
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.routing import Routing

__all__ = [
    "Routing",
    "all_gather",
    "all_gather_grouped_matmul",
    "all_gather_matmul",
    "all_reduce",
    "copy_grouped_matmul",
    "copy_matmul",
    "copy_to_group",
    "dispatch_grouped_matmul",
    "explain",
    "grouped_matmul_all_reduce",
    "grouped_matmul_combine",
    "grouped_matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "shard",
]
