"""Small models of Megatron-Core on a CPU, and what of it asks for CUDA: its random numbers, its devices, its norms."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 66, 12
"""These sizes, and those of the models, can be cut by two and by three."""


def gated() -> bool:
    """Before 0.16 a gated block is cut across its two halves: a model on two ranks is not the one on one rank."""
    from megatron.core import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= (0, 16)


class _NoTracker:
    """In place of a tracker of CUDA's random numbers; there is no dropout in these models."""

    def fork(self, *args: Any, **given: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def on_cpu(tp: int) -> Iterator[None]:
    """Megatron's groups with ``tp`` ranks in each, and a CPU where it takes a CUDA device for granted."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    def take_random_state(cpu: Tensor, *of_cuda: Any) -> None:
        torch.set_rng_state(cpu)

    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
                stack.enter_context(mock.patch.object(module, "get_cuda_rng_tracker", lambda *a, **k: _NoTracker()))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *device: None))
        # Blocks that are computed once more ask for them.
        stack.enter_context(mock.patch.object(random, "_get_all_rng_states", lambda: (torch.get_rng_state(), None, {})))
        stack.enter_context(mock.patch.object(random, "_set_all_rng_states", take_random_state))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


class Norm(nn.Module):
    """Megatron's own needs Apex or Transformer Engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **given: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def config(tp: int, **changes: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    given: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 48,
        "num_attention_heads": 12,
        "num_query_groups": 6,
        "ffn_hidden_size": 48,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": tp,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": gated(),
        "activation_func": F.silu,
        "add_bias_linear": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**(given | changes))


def spec(**changes: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    found = get_gpt_layer_local_spec(normalization="RMSNorm", **changes)
    found.submodules.input_layernorm = found.submodules.pre_mlp_layernorm = Norm
    return found


def gpt(tp: int, swap: Callable[[Any], Any] = lambda spec: spec, *, tied: bool = False, **changes: Any) -> Any:
    """A GPT whose weights do not depend on ``tp``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    given = config(tp, **changes)
    layers = TransformerBlockSubmodules(layer_specs=[swap(spec())] * given.num_layers, layer_norm=Norm)
    torch.manual_seed(0)
    return GPTModel(
        given,
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )


def loss_of(model: Any, step: int, *, rows: int = 2, part: int = 0, parts: int = 1) -> Tensor:
    """Of all rows, or of those that are this replica's; or of one of the parts of these."""
    from megatron.core import parallel_state

    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    ids = ids.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    ids = ids.chunk(parts)[part]
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    loss: Tensor = model(ids, torch.arange(LENGTH).expand(len(ids), -1), mask, labels=ids).mean()
    return loss


def mean_of_replicas(tensor: Tensor) -> Tensor:
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_world_size()
    if replicas > 1:
        dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
        tensor /= replicas
    return tensor


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-2)  # see tests.integrations.curves.adamw


def train(
    model: Any, steps: int, *, first: int = 0, optimizer: Any = None, rows: int = 2, parts: int = 1, evaluates: int = 0
) -> dict[str, Tensor]:
    """Losses, the first step's gradients and the last weights, by name, as this rank holds them.

    Args:
        optimizer: torch's, or Megatron's, whose norms are then among what is found.
        parts: micro-batches of each step.
        evaluates: after so many steps each, the loss of a batch that none of them sees.
    """
    from megatron.core import parallel_state

    optimizer = optimizer or adamw(model)
    found: dict[str, Tensor] = {}
    for step in range(first, steps):
        losses = []
        for part in range(parts):
            loss = loss_of(model, step, rows=rows, part=part, parts=parts) / parts
            loss.backward()
            losses.append(loss.detach())
        found[f"loss {step}"] = mean_of_replicas(torch.stack(losses).sum())
        for parameter in model.parameters():  # as Megatron's finalize_model_grads does with TP, and its DDP
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
            if parameter.grad is not None:
                mean_of_replicas(parameter.grad)
        if step == 0:
            found |= {f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if (said := optimizer.step()) is not None:
            found[f"norm {step}"] = torch.tensor(said[1])
        optimizer.zero_grad()
        if evaluates and (step + 1) % evaluates == 0:
            model.eval()
            with torch.no_grad():
                found[f"evaluation {step}"] = mean_of_replicas(loss_of(model, steps + step, rows=rows))
            model.train()
    return found | {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}


def whole(parts: list[dict[str, Tensor]], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """What several ranks hold, put together to the shapes that one process has."""
    found = {}
    for name, first in parts[0].items():
        dims = [dim for dim, size in enumerate(shapes[name]) if first.shape[dim] != size]
        tensors = [part[name] for part in parts]
        if not dims:
            assert all(torch.equal(first, tensor) for tensor in tensors), name
        elif gated() and name.endswith(
            "linear_fc1.weight"
        ):  # the gate's rows of a rank, and then those of its other half
            halves = [tensor.chunk(2) for tensor in tensors]
            first = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        else:
            first = torch.cat(tensors, dims[0])
        found[name] = first
    return found
