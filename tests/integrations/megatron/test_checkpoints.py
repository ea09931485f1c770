"""Megatron's distributed checkpoints of a GPT with our layers, on any number of ranks; blocks computed once more."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.megatron import models
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR, bounds_of

pytest.importorskip("megatron.core", reason="the package megatron-core is missing: pip install megatron-core")

from tests.integrations.megatron.test_megatron import STEPS, alone, counted
from tpkernels.integrations import megatron as tpk_megatron

pytestmark = [pytest.mark.gloo, pytest.mark.full("a variation")]

HALF = STEPS // 2


def gpt(tp: int, ours: bool = True, **changes: Any) -> Any:
    changes = {"sequence_parallel": tp > 1, **changes}
    if not ours:
        return models.gpt(tp, **changes)
    swap = partial(tpk_megatron.layer_spec, strict=True)
    return tpk_megatron.convert_output(models.gpt(tp, swap, **changes), strict=True)


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What Megatron's FP32Optimizer makes of a model and an optimizer of torch's."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    sharded, state = model.sharded_state_dict(), optimizer.state_dict()
    step = state["state"][0]["step"]
    numbers = get_param_id_to_sharded_param_map(sharded, model.parameters())
    optim_state_to_sharding_state(state, numbers, exclude_keys=("step",))
    state["state"]["common_step"] = step
    return {"model": sharded, "optimizer": state}


def half(tp: int, folder: str) -> None:
    from megatron.core import dist_checkpointing

    with models.on_cpu(tp):
        model = gpt(tp)
        optimizer = models.adamw(model)
        models.train(model, HALF, optimizer=optimizer)
        dist_checkpointing.save(state_of(model, optimizer), folder)


def rest(tp: int, folder: str, ours: bool) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    with models.on_cpu(tp):
        model = gpt(tp, ours)
        optimizer = models.adamw(model)
        for parameter in model.parameters():
            parameter.data.zero_()
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes what is then loaded
        optimizer.zero_grad()
        state = dist_checkpointing.load(state_of(model, optimizer), folder)
        step = state["optimizer"]["state"].pop("common_step")
        for values in state["optimizer"]["state"].values():
            values["step"] = step.clone()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return models.train(model, STEPS, first=HALF, optimizer=optimizer)


def test_a_distributed_checkpoint_goes_on_at_any_number_of_ranks_with_our_layers_and_megatrons(
    ranks: Pools, tmp_path: Path
) -> None:
    ((exact, plain),) = ranks(1).run(alone, timeout=LIMIT_S)
    bounds = bounds_of({name: (exact[name], plain[name]) for name in exact}, {})
    shapes = {name: value.shape for name, value in plain.items()}
    folder = str(tmp_path)
    ranks(2).run(half, 2, folder, timeout=LIMIT_S)
    for tp, ours in ((1, False), (2, False), (2, True), (3, True)):
        found = models.whole(ranks(tp).run(rest, tp, folder, ours, timeout=LIMIT_S), shapes)
        names = [
            name for name in bounds if name.startswith("weight ") or name in [f"loss {n}" for n in range(HALF, STEPS)]
        ]
        assert sorted(found) == sorted(names)
        worst = {name: bounds[name].ratio(found[name]) / FACTOR for name in names}
        assert max(worst.values()) <= 1, (tp, ours, max(worst.items(), key=lambda item: item[1]))


def recomputed() -> tuple[dict[str, int], list[str]]:
    """The calls of a step, and what differs from a run that keeps its activations."""
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with models.on_cpu(2):
        kept = models.train(gpt(2), STEPS)
        with counted() as counts:
            found = models.train(gpt(2, **again), STEPS)
    return dict(counts), [name for name, value in kept.items() if not torch.equal(found[name], value)]


def test_a_block_that_is_computed_once_more_has_the_same_bits(ranks: Pools) -> None:
    for counts, different in ranks(2).run(recomputed, timeout=LIMIT_S):
        calls = {"all_gather_matmul": 2 * 2 + 1, "matmul_reduce_scatter": 2 * 2, "all_gather": 2}
        assert counts == {name: STEPS * count for name, count in calls.items()} and different == []
