"""Models at small random sizes for the tests of plans: families of transformers, and models of torch alone.

Sizes do not divide evenly somewhere on purpose: 36 features over 5 ranks never matter, 50 words over 3 or 4 ranks, 7
tokens over 2, 2 key-value heads over 3 or 4 ranks do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH, OTHER_LENGTH = 50, 3, 7, 5
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BLOCKS = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 38,
    "decoder_ffn_dim": 38,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


@dataclass(frozen=True)
class Kind:
    """How to build a model, and what it is called with."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: str = "text"
    single: bool = False
    """Computes in fp32 inside, whatever its parameters are."""


def text(model: str, config: str, single: bool = False, inputs: str = "text", **options: Any) -> Kind:
    return Kind(model, config, options, inputs, single)


FAMILIES = {
    "bert": text("BertForMaskedLM", "BertConfig", **DECODER),
    "roberta": text("RobertaModel", "RobertaConfig", **DECODER),
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4),
    "opt": text(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=24,
        ffn_dim=38,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=24,
    ),
    "llama": text("LlamaForCausalLM", "LlamaConfig", True, **DECODER, num_key_value_heads=2),
    "mistral": text("MistralForCausalLM", "MistralConfig", True, **DECODER, num_key_value_heads=1, head_dim=6),
    "qwen2": text(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        True,
        **(DECODER | {"num_attention_heads": 12, "hidden_size": 48}),
        num_key_value_heads=2,
    ),
    "t5": text(
        "T5ForConditionalGeneration",
        "T5Config",
        True,
        inputs="pair",
        vocab_size=VOCABULARY,
        d_model=24,
        d_kv=6,
        d_ff=38,
        num_layers=2,
        num_heads=4,
    ),
}
"""What the plans are made for."""

OTHERS = {
    "distilbert": text(
        "DistilBertModel", "DistilBertConfig", vocab_size=VOCABULARY, dim=24, hidden_dim=38, n_layers=2, n_heads=4
    ),
    "gpt_neox": text("GPTNeoXForCausalLM", "GPTNeoXConfig", **DECODER),
    "phi": text("PhiForCausalLM", "PhiConfig", **(DECODER | {"hidden_size": 32})),
    "phi3": text("Phi3ForCausalLM", "Phi3Config", True, **DECODER, num_key_value_heads=2, pad_token_id=0),
    "gemma": text("GemmaForCausalLM", "GemmaConfig", True, **DECODER, num_key_value_heads=1, head_dim=8),
    "qwen3": text("Qwen3ForCausalLM", "Qwen3Config", True, **DECODER, num_key_value_heads=2, head_dim=8),
    "olmo2": text("Olmo2ForCausalLM", "Olmo2Config", True, **DECODER),
    "bloom": text("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=4),
    "mpt": text("MptForCausalLM", "MptConfig", vocab_size=VOCABULARY, d_model=24, n_layers=2, n_heads=4),
    "falcon": text(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "bigcode": text("GPTBigCodeForCausalLM", "GPTBigCodeConfig", vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4),
    "gptj": text("GPTJForCausalLM", "GPTJConfig", vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, rotary_dim=4),
    "vit": text(
        "ViTModel",
        "ViTConfig",
        inputs="image",
        image_size=16,
        patch_size=8,
        **{key: value for key, value in DECODER.items() if key != "vocab_size"},
    ),
    "swin": text(
        "SwinModel",
        "SwinConfig",
        inputs="image",
        image_size=16,
        patch_size=2,
        embed_dim=24,
        depths=[1, 1],
        num_heads=[4, 4],
        window_size=4,
    ),
    "whisper": text(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        inputs="audio",
        max_source_positions=10,
        max_target_positions=20,
        num_mel_bins=8,
        **BLOCKS,
        **SPECIAL,
    ),
    "bart": text("BartForConditionalGeneration", "BartConfig", inputs="pair", **BLOCKS, **SPECIAL),
    "modernbert": text(
        "ModernBertModel", "ModernBertConfig", **DECODER, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "deberta": text(
        "DebertaV2Model", "DebertaV2Config", **DECODER, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "albert": text("AlbertModel", "AlbertConfig", **DECODER, embedding_size=16),
    "mamba": text(
        "MambaForCausalLM",
        "MambaConfig",
        True,
        vocab_size=VOCABULARY,
        hidden_size=24,
        state_size=4,
        num_hidden_layers=2,
    ),
    "xlnet": text("XLNetModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=24, n_layer=2, n_head=4, d_inner=38),
    "glm": text("GlmForCausalLM", "GlmConfig", True, **DECODER, num_key_value_heads=2, head_dim=6, pad_token_id=0),
    "stablelm": text("StableLmForCausalLM", "StableLmConfig", **DECODER, num_key_value_heads=4),
}
"""Architectures that nothing in the package knows."""

TEN = {"hidden_size": 40, "num_attention_heads": 10}
UNEVEN = {
    "bert 10": text("BertForMaskedLM", "BertConfig", **(DECODER | TEN)),
    "gpt2 10": text("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=40, n_layer=2, n_head=10),
    "opt 10": text("OPTForCausalLM", "OPTConfig", **(FAMILIES["opt"].options | TEN | {"word_embed_proj_dim": 40})),
    "llama 10": text("LlamaForCausalLM", "LlamaConfig", True, **(DECODER | TEN), num_key_value_heads=5),
    "qwen2 10": text("Qwen2ForCausalLM", "Qwen2Config", True, **(DECODER | TEN), num_key_value_heads=2),
    "qwen3 10": text("Qwen3ForCausalLM", "Qwen3Config", True, **(DECODER | TEN), num_key_value_heads=5, head_dim=4),
    "mistral 10": text(
        "MistralForCausalLM", "MistralConfig", True, **(DECODER | TEN), num_key_value_heads=1, head_dim=4
    ),
    "t5 10": text(
        "T5ForConditionalGeneration",
        "T5Config",
        True,
        inputs="pair",
        **(FAMILIES["t5"].options | {"num_heads": 10, "d_kv": 4}),
    ),
    "gpt_neox 10": text("GPTNeoXForCausalLM", "GPTNeoXConfig", **(DECODER | TEN)),
    "bart 10": text(
        "BartForConditionalGeneration",
        "BartConfig",
        inputs="pair",
        **(BLOCKS | {"d_model": 40, "encoder_attention_heads": 10, "decoder_attention_heads": 10}),
        **SPECIAL,
    ),
}
"""Ten heads, which do not divide over 3 or 4 ranks, with 10, 5, 2 or 1 for keys and values."""


class Block(nn.Module):
    """A residual MLP whose layers stand in a dict, and which its owner also keeps in a list of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleDict({"up": nn.Linear(width, hidden), "down": nn.Linear(hidden, width)})
        self.order = [self.layers["up"], self.layers["down"]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for index, layer in enumerate(self.order):
            y = layer(y if index == 0 else torch.tanh(y))
        return x + y


class Nested(nn.Module):
    """Blocks within blocks, one of them used twice, and a head that two outputs share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(Block(6, 13), Block(6, 13)), Block(6, 11)])
        self.again = self.inner[1]
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        y: Tensor = self.head(self.again(x)) + self.head(x)
        return y


class ConvLSTM(nn.Module):
    """Little that can be cut: the head and the convolution are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 9, batch_first=True)
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(torch.relu(self.norm(self.conv(x))).transpose(1, 2))
        z: Tensor = self.head(y[:, -1])
        return z


class Attention(nn.Module):
    """Written by hand, with the packed layout of timm and a number of heads that the code counts on."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        y: Tensor = self.proj((scores @ v).transpose(1, 2).reshape(batch, length, -1))
        return x + y


class Scaled(nn.Module):
    """A residual MLP with a parameter of its own, one number, that meets parts; beside it a norm that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 13), nn.Linear(13, 6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x)) * self.scale))
        return y


class Wrapped(nn.Module):
    """torch's attention inside of a module that hides it: no layer and no norm is to be seen there."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or Wrapped(nn.MultiheadAttention(6, 2, batch_first=True))
        self.hides = inner is None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x) if self.hides else self.inner(x, x, x, need_weights=False)[0]
        return y


class Blocks(nn.Module):
    """A residual stream through a list of blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6), nn.Tanh(), nn.Linear(6, 17), nn.Linear(17, 3))


def transformer(width: int = 24, heads: int = 4) -> nn.Module:
    return nn.Transformer(width, heads, 1, 1, 38, dropout=0.0, batch_first=True)


KINDS = FAMILIES | OTHERS | UNEVEN
PLAIN: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "nested": Nested,
    "conv_lstm": ConvLSTM,
    "attention": Attention,
    "transformer": transformer,
    "attention 10": lambda: Attention(40, 10),
    "transformer 10": lambda: transformer(40, 10),
}


class ScaledNorm(nn.Module):
    """A norm inside of a module with a parameter of its own: both work on what the residual's part is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x) * self.scale
        return y


class ScaledNormBlock(nn.Module):
    """A block that does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.mlp = ScaledNorm(), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.scaled(x))
        return y


TRAPS: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: Blocks(Scaled(), Scaled()),
    "scaled norm": lambda: Blocks(ScaledNormBlock()),
    "wrapped attention": lambda: Blocks(Wrapped(), Scaled()),
}
"""What has misled the planner: each was planned, and computed something else."""
ENDS_IN_NORM = ("roberta", "transformer", "transformer 10")
"""Of the families and the plain ones."""


def is_single(name: str) -> bool:
    return name in KINDS and KINDS[name].single


def build(name: str, dtype: torch.dtype = torch.float64, *, dropout: float | None = None, **changes: Any) -> nn.Module:
    """The same model, with parameters all of which matter, on every call; ``dropout`` replaces all its rates."""
    torch.manual_seed(0)
    if name not in KINDS:
        model = (PLAIN | TRAPS)[name]()
    else:
        kind = KINDS[name]
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, kind.config)(**(kind.options | changes))
        for key, rate in vars(config).items() if dropout is not None else ():
            if "drop" in key and isinstance(rate, float | int) and not isinstance(rate, bool) and key not in changes:
                setattr(config, key, dropout)
        model = getattr(transformers, kind.model)._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.to(dtype).eval()


def inputs(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What the model is called with."""
    generator = torch.Generator().manual_seed(1)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def ids(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)

    if name.startswith("transformer"):
        width = 40 if name.endswith("10") else 24
        return {"src": floats(BATCH, LENGTH, width), "tgt": floats(BATCH, OTHER_LENGTH, width)}
    if name not in KINDS:
        shapes = {"conv_lstm": (BATCH, 5, 64), "attention": (BATCH, LENGTH, 24), "attention 10": (BATCH, LENGTH, 40)}
        key = {"mlp": "input"}.get(name, "x")
        return {key: floats(*shapes.get(name, (BATCH, LENGTH, 6)))}
    kind = KINDS[name]
    if kind.inputs == "image":
        return {"pixel_values": floats(BATCH, 3, 16, 16)}
    if kind.inputs == "audio":
        return {"input_features": floats(BATCH, 8, 20), "decoder_input_ids": ids(OTHER_LENGTH), "use_cache": False}
    if kind.inputs == "pair":
        return {"input_ids": ids(LENGTH), "decoder_input_ids": ids(OTHER_LENGTH), "use_cache": False}
    return {"input_ids": ids(LENGTH)} | (
        {"use_cache": False} if "LM" in kind.model and "Bert" not in kind.model else {}
    )


def output(result: Any) -> Tensor:
    """The tensor that counts in what a model returns."""
    for key in ("logits", "last_hidden_state"):
        if hasattr(result, key):
            found: Tensor = getattr(result, key)
            return found
    first: Tensor = result[0] if isinstance(result, tuple | list) else result
    return first
