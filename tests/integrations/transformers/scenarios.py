"""Models, how they become parallel, and what is compared: what the tests of Trainer run on each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpkernels as tpk
import tpkernels.integrations.transformers as tpk_transformers
from tests.integrations import causal_models
from tests.integrations.counting import counted
from tests.integrations.curves import VOCABULARY, Curve, Reference, in_parts
from tests.integrations.transformers.running import train
from tests.nn.reference import plan_once, tp_mesh, whole

Options = dict[str, Any]
ROWS = ("o_proj", "down_proj")
"""Of a Llama, the layers that are cut by the features that they sum."""


@dataclass(frozen=True)
class Scenario:
    """A model, the way in which it becomes parallel, and what Trainer is told besides."""

    model: str
    way: str
    changes: Options = field(default_factory=dict)
    trainer: Options = field(default_factory=dict)

    def build(self) -> Any:
        return getattr(causal_models, self.model)(**self.changes)

    def reference(self, folder: Path, world: int = 1) -> Reference:
        """The same trainer on one process, in fp64 and in fp32, or in bf16 and there in ``world`` parts, too."""
        exact, plain = self.build().double(), [self.build()]
        precise = {key: value for key, value in self.trainer.items() if key != "bf16"}
        if "bf16" in self.trainer and world > 1:
            plain.append(in_parts(self.build(), world, ROWS))
        runs = [train(model, folder / f"plain-{number}", **self.trainer) for number, model in enumerate(plain)]
        return Reference.of(train(exact, folder / "exact", **precise), *runs)


def saved(scenario: Scenario, folder: Path) -> str:
    """The model's files, as anybody has them."""
    path = folder / "model"
    scenario.build().save_pretrained(path)
    return str(path)


def load(way: str, path: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """On each rank: the model of ``path``, parallel in that ``way``."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options: Options = {"dtype": dtype, "attn_implementation": "eager"}
    if way == "prepare":
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        return tpk_transformers.prepare(model, tp_mesh(), _plan(model, path))
    tp_mesh()
    with tpk_transformers.register(strict=True) if way == "register" else contextlib.nullcontext():
        return AutoModelForCausalLM.from_pretrained(
            path, distributed_config=DistributedConfig(tp_size=tp_mesh().size()), **options
        )


_plans: dict[str, tpk.ShardingPlan] = {}
"""Of the last model: a run and what goes on from it, on as many ranks, have one plan."""


def _plan(model: nn.Module, path: str) -> tpk.ShardingPlan:
    key = f"{path} on {tp_mesh().size()}"
    if key not in _plans:
        _plans.clear()
        _plans[key] = plan_once(model, tp_mesh())
    return _plans[key]


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(9))


def step_counts(model: nn.Module) -> dict[str, int]:
    """The calls of one forward pass that is trained."""
    with counted() as counts:
        model(input_ids=ids(), labels=ids())
    return dict(counts)


def tokens(model: Any) -> dict[str, Tensor]:
    """What ``generate`` says, greedily, by beams, and with a static cache."""
    model.eval()
    ways: dict[str, Options] = {"greedy": {}, "beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}
    common: Options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    with torch.no_grad():
        return {name: model.generate(ids(), **common, **options) for name, options in ways.items()}


def answers(model: Any, way: str) -> dict[str, Tensor]:
    """What a trained model says: its logits, and of one that ``prepare`` has cut what ``generate`` says, too."""
    model.eval()
    with torch.no_grad():
        logits = whole(model(input_ids=ids()).logits).float()
    return {"logits": logits, **(tokens(model) if way == "prepare" else {})}


def run(
    scenario: Scenario,
    path: str,
    folder: str,
    *,
    resume: str | None = None,
    spoil: Callable[[Any], None] | None = None,
    ask: Callable[[Any], None] | None = None,
    data: Any = None,
    **options: Any,
) -> Curve:
    """Training on each rank, from the model's files, with a checkpoint at step 3 and one at the end.

    ``spoil`` gets the model before, and ``ask`` behind.
    """
    model = load(scenario.way, path)
    if spoil is not None:
        spoil(model)
    callbacks = [tpk_transformers.Snapshots(resume)]
    changes = {"save_strategy": "steps", "save_steps": 3} | scenario.trainer | options
    curve = train(model, folder, callbacks=callbacks, resume=resume, data=data, **changes)
    if ask is not None:
        ask(model)
    return curve
