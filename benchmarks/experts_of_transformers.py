"""The experts of a layer as transformers cuts them by its own ``tp_plan``, for `experts.py`.

A model of one layer is written once, with the weights of the benchmark in its experts, and loaded on every rank with
``DistributedConfig(tp_size=...)``. Its module of experts then has this rank's slices and sums over the ranks by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

__all__ = ["cut_experts"]

OTHERS = {
    "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
"""What is beside the experts and is not called."""


def _config(name: str, experts: int, top_k: int, hidden: int, features: int) -> PretrainedConfig | None:
    sizes = {"hidden_size": hidden, "num_experts_per_tok": top_k, **OTHERS}
    if name.startswith("mixtral"):
        return MixtralConfig(intermediate_size=features, num_local_experts=experts, **sizes)
    if name.startswith("qwen3"):
        return Qwen3MoeConfig(moe_intermediate_size=features, num_experts=experts, **sizes)
    if name.startswith("deepseek-v3"):
        return DeepseekV3Config(
            moe_intermediate_size=features, n_routed_experts=experts, first_k_dense_replace=0, **sizes
        )
    return None  # the tp_plan of GPT-OSS cuts its table alone


def cut_experts(name: str, top_k: int, gate: Tensor, up: Tensor, down: Tensor) -> Callable[..., Tensor] | None:
    """The module of this rank, which takes tokens, their experts and weights; None if the tp_plan leaves experts whole.

    ``gate``, ``up``: ``[E, F, H]``, ``down``: ``[E, H, F]``, whole and the same on every rank.
    """
    config = _config(name, len(gate), top_k, gate.shape[2], gate.shape[1])
    if config is None:
        return None
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.get_rank() == 0:
            model = AutoModelForCausalLM.from_config(config, dtype=gate.dtype)
            block = model.model.layers[0].mlp.experts
            with torch.no_grad():
                block.gate_up_proj.copy_(torch.cat([gate, up], dim=1))
                block.down_proj.copy_(down)
            model.save_pretrained(own)
        dist.broadcast_object_list(folder, 0)
        cut = AutoModelForCausalLM.from_pretrained(
            folder[0], dtype=gate.dtype, distributed_config=DistributedConfig(tp_size=dist.get_world_size())
        )
        dist.barrier()
    found: torch.nn.Module = cut.model.layers[0].mlp.experts.eval()
    return found
