"""Models that are trained at several numbers of ranks, how ``parallelize`` is to cut each, and the loss of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.measure.gpt import GPT, Sizes
from tpkernels.planning.styles import Experts

__all__ = ["MODELS", "Step"]

Step = Callable[[nn.Module, Tensor], Tensor]


def gpt(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], Step]:
    """GELU, LayerNorm, biases, fused attention; the loss is the model's own, and so is the plan."""
    model = GPT(Sizes(layers=1, width=64, heads=8, d_ff=256, vocabulary=96, length=24, batch=4)).to(dtype)
    tokens = torch.zeros(4, 24, dtype=torch.long)
    return model, {"example_inputs": (tokens, tokens)}, lambda of, ids: cast(Tensor, of(ids[:, :-1], ids[:, 1:]))


def llama(dtype: torch.dtype, kv_heads: int = 10) -> tuple[nn.Module, dict[str, Any], Step]:
    """SwiGLU, RMSNorm, two query heads per key-value head, a head tied to the embedding; a plan by hand.

    Heads, hidden features and the vocabulary do not divide into blocks; of fewer key-value heads there are copies.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=80, intermediate_size=190, num_hidden_layers=1, num_attention_heads=20, head_dim=8,
        num_key_value_heads=kv_heads, vocab_size=97, max_position_embeddings=64, tie_word_embeddings=True,
        use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)

    def step(of: nn.Module, ids: Tensor) -> Tensor:
        logits = of(input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    plan = {
        "model.embed_tokens": "vocabulary", "lm_head": "column_gather", "**.q_proj": tpk.sharding.Column(unit=16),
        "**.[kv]_proj": tpk.sharding.Column(unit=8), "**.o_proj": tpk.sharding.Row(unit=16),
        "**.gate_proj": "column", "**.up_proj": "column", "**.down_proj": "row",
    }  # fmt: skip
    return model, {"plan": plan}, step


def copies(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], Step]:
    """The same with fewer key-value heads than blocks, and a plan that is found."""
    model, _, step = llama(dtype, 5)
    return model, {"example_inputs": {"input_ids": torch.zeros(4, 24, dtype=torch.long)}}, step


def mixtral(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], Step]:
    """Four experts, of which a token has two; the loss is of the logits alone."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=136, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=96, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    plan = {
        "model.embed_tokens": "vocabulary", "lm_head": "column_gather", "**.[qkv]_proj": "column", "**.o_proj": "row",
        "**.experts": Experts(),
    }  # fmt: skip
    return transformers.MixtralForCausalLM(config).to(dtype), {"plan": plan}, llama(dtype)[2]


def found(experts: str) -> Callable[[torch.dtype], tuple[nn.Module, dict[str, Any], Step]]:
    """The same, by a plan that is found."""

    def made(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any], Step]:
        model, _, step = mixtral(dtype)
        return model, {"example_inputs": {"input_ids": torch.zeros(4, 24, dtype=torch.long)}, "experts": experts}, step

    return made


MODELS = {
    "gpt": gpt,
    "llama": llama,
    "copies": copies,
    "mixtral": mixtral,
    "mixtral, by features": found("features"),
    "mixtral, dealt out": found("experts"),
}
