"""Tensor-parallel modules: column and row linears, the embedding and the loss of a cut vocabulary, the
feed-forward block, norms, replicated parameters.

All parameters are DTensors on the group's one-dimensional mesh, so that optimizers, ``clip_grad_norm_``, FSDP2 and
distributed checkpoints see one model.  With ``sequence_parallel`` the modules sum the gradients of replicated
parameters over the group themselves.
"""

from tpkernels.nn.column import ColumnParallelLinear, ColumnParallelLinears
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.cross_entropy import vocab_parallel_cross_entropy
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.mlp import ParallelMLP
from tpkernels.nn.norm import LayerNorm, RMSNorm
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.replicated import replicate_parameters
from tpkernels.nn.row import RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinears",
    "CopiedHeadsLinear",
    "FeatureParallelEmbedding",
    "LayerNorm",
    "PackedColumnParallelLinear",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "replicate_parameters",
    "vocab_parallel_cross_entropy",
]
