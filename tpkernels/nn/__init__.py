"""Tensor-parallel modules: column and row linears, the embedding and the loss of a cut vocabulary, experts, the
feed-forward block, norms, replicated parameters.

All parameters are DTensors on the group's one-dimensional mesh, so that optimizers, ``clip_grad_norm_``, FSDP2 and
distributed checkpoints see one model.  With ``sequence_parallel`` the modules sum the gradients of replicated
parameters over the group themselves.
"""

from tpkernels.nn.attention import ParallelAttention
from tpkernels.nn.balance import ExpertBias, load_balancing_loss, router_z_loss
from tpkernels.nn.column import ColumnParallelLinear, ColumnParallelLinears
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.cross_entropy import vocab_parallel_cross_entropy
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.experts import ParallelExperts
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from tpkernels.nn.main_grads import use_main_grads
from tpkernels.nn.mesh2d import MeshMLP2D, mesh_mlp_bytes
from tpkernels.nn.mlp import ParallelMLP
from tpkernels.nn.multihead import ParallelMultiheadAttention
from tpkernels.nn.norm import LayerNorm, RMSNorm
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.packed_row import PackedRowParallelLinear
from tpkernels.nn.part_norm import PartLayerNorm, PartResponseNorm, PartRMSNorm
from tpkernels.nn.random import Dropout, check_rng, sharded_rng
from tpkernels.nn.replicated import replicate_parameters
from tpkernels.nn.rotary import apply_rotary
from tpkernels.nn.row import RowParallelLinear
from tpkernels.nn.same_weights import init_weights

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinears",
    "CopiedHeadsLinear",
    "Dropout",
    "ExpertBias",
    "FeatureParallelEmbedding",
    "LayerNorm",
    "MeshMLP2D",
    "PackedColumnParallelLinear",
    "PackedRowParallelLinear",
    "ParallelAttention",
    "ParallelExperts",
    "ParallelMLP",
    "ParallelMultiheadAttention",
    "PartLayerNorm",
    "PartRMSNorm",
    "PartResponseNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "apply_rotary",
    "check_rng",
    "init_weights",
    "load_balancing_loss",
    "mesh_mlp_bytes",
    "replicate_parameters",
    "router_z_loss",
    "sharded_rng",
    "use_main_grads",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
