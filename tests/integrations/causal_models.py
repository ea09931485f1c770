"""Small causal language models with random weights, made from configurations; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.curves import VOCABULARY

LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    """Grouped keys: two heads for four."""
    torch.manual_seed(seed)
    return _sharp(bare_llama(**changes))


def bare_llama(**changes: Any) -> Any:
    """As transformers initialises it, on the device of the context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))


MIXTURE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def mixtral(seed: int = 0, **changes: Any) -> Any:
    """Four experts, of which each token goes to two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    return _sharp(MixtralForCausalLM(MixtralConfig(**{**LLAMA, **MIXTURE, **changes})))


def gpt2(seed: int = 0, **changes: Any) -> Any:
    """Packed query, key and value, biases, and a head tied to the table."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return _sharp(GPT2LMHeadModel(GPT2Config(**{**sizes, **off, **ids, **changes})))


def _sharp(model: Any) -> Any:
    """Larger weights and biases that are not zero, so that a missing one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.02 if name.endswith("bias") else 0.1 if parameter.dim() > 1 else 0.2
            base = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0
            parameter.copy_(base + scale * torch.randn(parameter.shape, generator=generator))
    return model
