"""Two replicas of two ranks under Trainer, each replica with batches of its own: as one process with all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.curves import STEPS, Curve, Reference
from tests.kept_mesh import KeptMesh
from tests.nn.reference import LIMIT_S, plan_once
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install --no-deps accelerate psutil")

import tpkernels.integrations.transformers as tpk_transformers
from tests.integrations.transformers import scenarios
from tests.integrations.transformers.running import train
from tests.integrations.transformers.scenarios import Scenario
from tests.integrations.transformers.test_trainer import check_file, evaluated_alone, with_evaluation
from tests.integrations.transformers.variations import VARIATIONS
from tpkernels.integrations.transformers import prepared

pytestmark = pytest.mark.gloo

REPLICAS, ROWS = 2, 4
"""In each step a process alone takes so many rows; two replicas take them one by one, in two micro-batches."""
GPT2 = Scenario("gpt2", "prepare", {"n_layer": 1}, {"per_device_train_batch_size": ROWS})
LLAMA = Scenario("llama", "prepare", {"intermediate_size": 57, "num_hidden_layers": 1}, GPT2.trainer)
REGISTERED = replace(LLAMA, way="register")
DEEP = Scenario("gpt2", "prepare")
OURS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS // REPLICAS}
mesh = KeptMesh(lambda: tpk.init(dp=REPLICAS, tp=dist.get_world_size() // REPLICAS))


def load(scenario: Scenario, path: str, shard: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    both = mesh()
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if scenario.way == "prepare":
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        # Compiled as one graph, replicas are one unit of communication.
        units = () if "torch_compile" in scenario.trainer else None
        return tpk_transformers.prepare(model, both, plan_once(model, both), shard=shard, units=units)
    config = DistributedConfig(tp_size=both["tp"].size(), fsdp_size=REPLICAS)
    with tpk_transformers.register(strict=True):
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=config, **options)


def run(scenario: Scenario, path: str, folder: str, shard: bool, resume: str | None = None, **changes: Any) -> Curve:
    callbacks = [tpk_transformers.Snapshots(resume)]
    options = {**scenario.trainer, **OURS, "save_strategy": "steps", "save_steps": 3, **changes}
    return train(load(scenario, path, shard), folder, callbacks=callbacks, resume=resume, **options)


def trained(scenario: Scenario, path: str, folder: str, reference: Reference, shard: bool) -> dict[str, Any]:
    from transformers import Trainer

    waits: list[object] = []
    defer = Trainer._defer_fsdp_gradient_reduction
    with mock.patch.object(Trainer, "_defer_fsdp_gradient_reduction", lambda self: waits.append(self) or defer(self)):
        curve = run(scenario, path, folder, shard)
    again = run(scenario, path, f"{folder}-resumed", shard, resume=f"{folder}/checkpoint-3")
    same = again.losses == curve.losses[3:] and again.norms == curve.norms[3:]
    return {
        "wrong": reference.wrong(curve),
        "waits": len(waits),
        "resumed": same and all(torch.equal(again.weights[name], weight) for name, weight in curve.weights.items()),
        "weights": curve.weights if dist.get_rank() == 0 else None,
    }


def evaluated(path: str, folder: str, shard: bool) -> Curve:
    half = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2}
    return with_evaluation(load(DEEP, path, shard), folder, callbacks=[tpk_transformers.Snapshots()], **half)


@pytest.mark.full("four ranks")
def test_replicas_are_evaluated_and_end_with_their_best_model(ranks: Pools, tmp_path: Path) -> None:
    reference, path = evaluated_alone(tmp_path), scenarios.saved(DEEP, tmp_path)
    for shard in (False, True):
        for found in ranks(4).run(evaluated, path, str(tmp_path / f"best-{shard}"), shard, timeout=LIMIT_S):
            assert reference.wrong(found) == {} and len(found.evaluations) == 2


def varied(
    scenario: Scenario, path: str, folder: str, shard: bool, reference: Reference
) -> tuple[dict[str, float], int, dict[str, int]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wrong = reference.wrong(run(scenario, path, folder, shard))
    counters = torch._dynamo.utils.counters
    return wrong, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.full("four ranks")
@pytest.mark.parametrize("variation", ["compiled", "bf16", "checkpoints"])
def test_variations_of_replicas_train_as_one_process_does(ranks: Pools, tmp_path: Path, variation: str) -> None:
    """In micro-batches; those that are compiled are one unit of communication, and one graph."""
    scenario = replace(LLAMA, trainer={**LLAMA.trainer, **VARIATIONS[variation]})
    reference, path = scenario.reference(tmp_path, 4 // REPLICAS), scenarios.saved(scenario, tmp_path)
    for shard in (False, True):
        given = (scenario, path, str(tmp_path / str(shard)), shard, reference)
        found = ranks(4).run(varied, *given, timeout=2 * LIMIT_S)
        assert found == [({}, int(variation == "compiled"), {})] * 4


def goes_on(scenario: Scenario, path: str, checkpoint: str, replicas: int, reference: Reference) -> dict[str, float]:
    """From another number of replicas' checkpoint of step 3."""
    folder = f"{checkpoint}-on-{dist.get_world_size()}"
    if replicas == 1:
        curve = scenarios.run(scenario, path, folder, resume=checkpoint)
    else:
        curve = run(scenario, path, folder, shard=False, resume=checkpoint)
    assert len(curve.losses) == STEPS - 3
    return reference.wrong(curve, first=3)


@pytest.mark.full("four ranks")
@pytest.mark.parametrize(
    ("scenario", "shard", "worlds"), [(GPT2, False, (2, 3)), (GPT2, True, (2, 3)), (REGISTERED, True, (2,))]
)
def test_a_checkpoint_goes_on_at_another_number_of_replicas(
    ranks: Pools, tmp_path: Path, scenario: Scenario, shard: bool, worlds: tuple[int, ...]
) -> None:
    reference, path, folder = scenario.reference(tmp_path), scenarios.saved(scenario, tmp_path), str(tmp_path / "run")
    ranks(4).run(run, scenario, path, folder, shard, timeout=LIMIT_S)
    for world in worlds:
        found = ranks(world).run(goes_on, scenario, path, f"{folder}/checkpoint-3", 1, reference, timeout=LIMIT_S)
        assert found == [{}] * world
    single = str(tmp_path / "single")
    ranks(2).run(one_replica, scenario, path, single, timeout=LIMIT_S)
    given = (scenario, path, f"{single}/checkpoint-3", REPLICAS, reference)
    assert ranks(4).run(goes_on, *given, timeout=LIMIT_S) == [{}] * 4


def one_replica(scenario: Scenario, path: str, folder: str) -> None:
    scenarios.run(scenario, path, folder)


def independent(model: Any, *_: object, **options: object) -> None:
    model.set_requires_gradient_sync = lambda wanted: None


def faulty(path: str, folder: str, reference: Reference) -> list[dict[str, float]]:
    """Gradients that nobody averages, and replicas that all train on the first one's batches."""
    mark = prepared.private_names.mark_as_parallel
    alone: Callable[..., None] = lambda model, tp, size, replicas: mark(model, tp, size, 1)  # noqa: E731
    found = []
    for number, fault in enumerate(
        (
            mock.patch.object(prepared, "data_parallel", independent),
            mock.patch.object(prepared.private_names, "mark_as_parallel", alone),
        )
    ):
        with fault:
            found.append(reference.wrong(run(GPT2, path, f"{folder}-{number}", shard=False)))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.slow("7 s; test_trainer.py trains without replicas")
def test_replicas_train_save_and_go_on_as_one_process(ranks: Pools, tmp_path: Path, world: int, full: bool) -> None:
    if world == 4 and not full:
        pytest.skip("--full: four ranks")
    cases = [(GPT2, False)]
    if world == 4:
        cases += [(LLAMA, True), (REGISTERED, True)]
    for number, (scenario, shard) in enumerate(cases):
        folder = tmp_path / str(number)
        reference, path = scenario.reference(folder), scenarios.saved(scenario, folder)
        given = (scenario, path, str(folder / "run"), reference, shard)
        results = ranks(world).run(trained, *given, timeout=2 * LIMIT_S)
        for found in results:
            assert found["wrong"] == {} and found["resumed"], (scenario, found)
            assert found["waits"] == STEPS, "gradients travel once in a step"
        check_file(f"{folder}/run/checkpoint-{STEPS}", scenario, results[0]["weights"])
        if scenario is GPT2 and world == 4:
            faults = ranks(world).run(faulty, path, str(folder / "faulty"), reference, timeout=LIMIT_S)
            for found in zip(*faults, strict=True):
                assert any(found), "no rank noticed"
