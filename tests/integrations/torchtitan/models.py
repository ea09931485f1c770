"""A Llama 3 of torchtitan that is small, with torch's attention in the place of CUDA's kernels."""

from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import QKVLinear, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from tests.integrations import counting
from tpkernels.integrations import torchtitan as tpk_torchtitan

VOCABULARY, LENGTH, STEPS = 66, 12, 6
"""torchtitan cuts evenly: both divide by two and by three ranks."""
IMPORTS = ["tpkernels.integrations.torchtitan.attention", "tpkernels.integrations.torchtitan.feed_forward"]
MODEL = "tpkernels.integrations.torchtitan.model"
OUTSIDE = ["lm_head", "tok_embeddings"]
"""The layers that torchtitan cuts, and that are in no block."""


class Attention(ScaledDotProductAttention):  # type: ignore[misc]
    """torchtitan's asks for kernels of CUDA."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
        pass

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **given: Any) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def small(*, fused: bool = True, heads: int = 4, hidden: int = 48, vocabulary: int = VOCABULARY) -> Any:
    """A Llama of one small block, before torchtitan's trainer has called update_from_config; two heads share a key."""
    model = model_registry("debugmodel").model
    model.layers = model.layers[:1]
    (layer,) = model.layers
    dim, groups = 8 * heads, heads // 2
    model.dim, model.vocab_size = dim, vocabulary
    model.tok_embeddings = replace(model.tok_embeddings, num_embeddings=vocabulary, embedding_dim=dim)
    model.norm = replace(model.norm, normalized_shape=dim)
    model.lm_head = replace(model.lm_head, in_features=dim, out_features=vocabulary)
    for name in ("attention_norm", "ffn_norm"):
        setattr(layer, name, replace(getattr(layer, name), normalized_shape=dim))
    ffn, attention = layer.feed_forward, layer.attention
    for name in ("w1", "w3"):
        setattr(ffn, name, replace(getattr(ffn, name), in_features=dim, out_features=hidden))
    ffn.w2 = replace(ffn.w2, in_features=hidden, out_features=dim)
    attention.n_heads, attention.n_kv_heads, attention.dim, attention.inner_attention = (
        heads,
        groups,
        dim,
        Attention.Config(),
    )
    attention.rope = replace(attention.rope, dim=dim // heads)
    attention.wo = replace(attention.wo, in_features=dim, out_features=dim)
    # Its own initialization has the sizes of before.
    wqkv, head_dim = replace(attention.qkv_linear.wqkv, param_init=ffn.w2.param_init), dim // heads
    if fused:
        out = (heads + 2 * groups) * head_dim
        projection = replace(wqkv, in_features=dim, out_features=out)
        sizes = {"n_heads": heads, "n_kv_heads": groups, "head_dim": head_dim}
        attention.qkv_linear = replace(attention.qkv_linear, wqkv=projection, **sizes)
    else:
        wq, wkv = (replace(wqkv, in_features=dim, out_features=size) for size in (dim, groups * head_dim))
        attention.qkv_linear = QKVLinear.Config(head_dim=head_dim, wq=wq, wkv=wkv)
    return model


def config(*, sequence_parallel: bool = True, **sizes: Any) -> Any:
    """The same, once the trainer has called it."""
    set_spmd_backend("spmd_types")
    model = small(**sizes)
    set_llama3_sharding_config(model, enable_sp=sequence_parallel)
    return model


def build(model: Any) -> Any:
    torch.manual_seed(0)
    made = model.build()
    with torch.no_grad():
        made.init_weights(buffer_device=None)
    return made


def counted() -> contextlib.AbstractContextManager[collections.Counter[str]]:
    ops = ("all_gather_matmul", "matmul_reduce_scatter")
    return counting.counted([(tpk_torchtitan.__name__, name) for name in ops])
