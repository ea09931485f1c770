"""The modules that a plan can cut: what counts as one, and its sizes.

``nn.Linear``; the ``Conv1D`` of Hugging Face's GPT-2, a linear whose weight is transposed; ``nn.Embedding``.  A
subclass has behaviour of its own that a swap would lose, and so have hooks and parametrizations: those stay as they
are.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Layer", "layer_of", "unswappable"]


@dataclass(frozen=True)
class Layer:
    """``kind``: "linear", "conv1d" (weight ``[in, out]``) or "embedding" (rows are ``in_features``)."""

    kind: str
    in_features: int
    out_features: int


def layer_of(module: nn.Module) -> Layer | None:
    """Sizes of a module that can be cut, or None."""
    if type(module) is nn.Linear:
        return Layer("linear", module.in_features, module.out_features)
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        rows, columns = module.weight.shape  # type: ignore[misc]
        return Layer("conv1d", rows, columns)
    if type(module) is nn.Embedding and module.max_norm is None and not module.sparse and not module.scale_grad_by_freq:
        return Layer("embedding", module.num_embeddings, module.embedding_dim)
    return None


def unswappable(module: nn.Module) -> str | None:
    """Why a swap would lose something of ``module``, or None."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for hook in kinds if getattr(module, hook, None)]
    if hooks or getattr(module, "parametrizations", None):
        return f"has hooks or parametrizations ({hooks}), which a swap would lose"
    if "forward" in vars(module):
        return "has a forward of its own, which a swap would lose"
    return None
