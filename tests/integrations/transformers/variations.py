"""What Trainer, and what is made of it, is told besides: each variation alone, on ranks and on replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tpkernels.integrations.transformers as tpk_transformers
from tests.integrations.curves import Curve, Reference, in_parts
from tests.integrations.transformers.running import Sentences, train

Options = dict[str, Any]
MICRO = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
BF16 = {"bf16": True, "adam_epsilon": 1e-2}  # see tests.integrations.curves.adamw
CHECKPOINTS = {"gradient_checkpointing": True}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # of two evaluations the first, whose weights are not those of the run's end
    "per_device_eval_batch_size": 4,  # batches of one size: Trainer gives a smaller last one another weight
    "save_strategy": "steps",
    "save_steps": 3,
}
VARIATIONS: dict[str, Options] = {
    "micro-batches": MICRO,
    "bf16": BF16,
    "checkpoints": CHECKPOINTS,
    "compiled": COMPILED,
    "best": {**BEST, "max_grad_norm": 0.05},
}
PLACES = [("prepare", 2, 1), ("prepare", 3, 1), ("prepare", 4, 2), ("register", 2, 1), ("register", 3, 1)]
"""How a model becomes parallel, on how many ranks, as how many replicas."""


def alone(build: Callable[[], Any], folder: Path, told: Options, parts: list[str], **how: Any) -> Reference:
    """One process, in fp64 and in fp32, or in bf16 and there in two and three parts of the layers ``parts``, too."""
    precise = {key: value for key, value in told.items() if key != "bf16"}
    plain = [build()] + [in_parts(build(), world, parts) for world in (2, 3) if "bf16" in told]
    curves = [train(build().double(), folder / "exact", evaluation=Sentences(), **precise, **how)]
    for number, model in enumerate(plain):
        curves.append(train(model, folder / f"plain-{number}", evaluation=Sentences(), **told, **how))
    return Reference.of(*curves)


def on_ranks(model: Any, folder: str, replicas: int, told: Options, *, resume: str | None = None, **how: Any) -> Curve:
    """The same rows in each step, whatever the replicas: of two, each has one of the two rows."""
    own: Options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3, **told}
    if replicas > 1:
        own = own | {name: 4 // replicas for name in own if name == "per_device_eval_batch_size"}
        own = own | {"per_device_train_batch_size": 2 // replicas, "gradient_accumulation_steps": 1}
    callbacks = [tpk_transformers.Snapshots(resume)]
    return train(model, folder, callbacks=callbacks, resume=resume, evaluation=Sentences(), **own, **how)


def varied(
    load: Callable[..., Any], folder: str, replicas: int, told: Options, expected: Reference, **how: Any
) -> tuple[dict[str, float], bool, dict[str, int]]:
    """What is wrong, whether the model was compiled, and how often a graph broke.

    ``load``: makes the model on each rank; replicas that are compiled are one unit, as one graph demands.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    units: Options = {"units": ()} if replicas > 1 and "torch_compile" in told else {}
    wrong = expected.wrong(on_ranks(load(replicas, **units), folder, replicas, told, **how))
    counters = torch._dynamo.utils.counters
    return wrong, counters["stats"]["unique_graphs"] > 0, dict(counters["graph_break"])
