"""Plans of large models with experts on the meta device: what eight ranks hold, and how long it takes (--full)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

import tpkernels as tpk
from tpkernels.planning.styles import Experts

pytestmark = pytest.mark.cpu

RANKS = 8
LARGE: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "Mixtral-8x22B": ("Mixtral", 56, 281.3, {
        "vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    "Qwen3-235B-A22B": ("Qwen3Moe", 94, 470.2, {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    }),
    "DeepSeek-V3": ("DeepseekV3", 58, 1342.1, {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }),
    "GPT-OSS-120B": ("GptOss", 36, 233.7, {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4,
    }),
}  # fmt: skip
"""Class, layers with experts, bytes of the whole in bf16 (1e9), and the sizes that were published."""


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", LARGE)
def test_eight_ranks_hold_an_eighth_of_a_large_mixture(name: str) -> None:
    import transformers

    kind, layers, whole, sizes = LARGE[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16()
    start = time.process_time()
    plan = tpk.make_plan(model, RANKS, experts="features")
    seconds = time.process_time() - start
    assert plan.full_bytes / 1e9 == pytest.approx(whole, abs=0.1)
    assert sum(isinstance(entry.style, Experts) for entry in plan.entries) == layers
    assert max(plan.bytes_per_rank) <= 1.02 * plan.full_bytes / RANKS
    assert seconds < 60, f"planned in {seconds:.1f} s"
