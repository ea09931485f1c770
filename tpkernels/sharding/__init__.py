"""Sharding of whole models: ``make_plan`` finds a plan, made of styles, and ``parallelize`` applies it."""

from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.modules.layers import register_layer
from tpkernels.planning.planner import make_plan
from tpkernels.planning.styles import (
    Channels,
    Column,
    CopiedHeads,
    Features,
    PartNorm,
    Replicate,
    Row,
    Sliced,
    Vocabulary,
)
from tpkernels.sharding.apply import parallelize
from tpkernels.sharding.data_parallel import data_parallel
from tpkernels.sharding.outputs import whole_outputs
from tpkernels.sharding.verify_model import verify
from tpkernels.state.checkpoint import Loaded, full_state_dict, load_full_state_dict, load_pretrained
from tpkernels.state.clipping import clip_grad_norm_
from tpkernels.state.huggingface_export import save_pretrained
from tpkernels.state.plain_optimizer import load_optimizer_state_dict, optimizer_state_dict
from tpkernels.state.snapshots import load_snapshot, save_snapshot
from tpkernels.verification.verdict import Verification

__all__ = [
    "Channels",
    "Column",
    "CopiedHeads",
    "Features",
    "Loaded",
    "PartNorm",
    "Replicate",
    "Row",
    "ShardingPlan",
    "Sliced",
    "Verification",
    "Vocabulary",
    "clip_grad_norm_",
    "data_parallel",
    "full_state_dict",
    "load_full_state_dict",
    "load_optimizer_state_dict",
    "load_pretrained",
    "load_snapshot",
    "make_plan",
    "optimizer_state_dict",
    "parallelize",
    "register_layer",
    "save_pretrained",
    "save_snapshot",
    "verify",
    "whole_outputs",
]
