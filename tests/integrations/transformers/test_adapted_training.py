"""Adapters of PEFT under Trainer, in each of its variations: as on one process, and on at other numbers of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integrations.curves import STEPS, Reference
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install --no-deps accelerate psutil")
pytest.importorskip("peft", reason="the package peft is missing: pip install peft")

from tests.integrations.transformers import scenarios
from tests.integrations.transformers.scenarios import ROWS, Scenario
from tests.integrations.transformers.test_peft import fill, prepared_model, registered_model, with_adapters
from tests.integrations.transformers.variations import PLACES, VARIATIONS, alone, on_ranks, varied

pytestmark = [pytest.mark.gloo, pytest.mark.full("variations on two, three and four ranks")]

LLAMA = Scenario("llama", "prepare", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24})
"""Heads for two and for three ranks."""
PARTS = [f"{name}.{part}" for name in ROWS for part in ("base_layer", "lora_A.default")]


def adapted() -> Any:
    model = with_adapters(LLAMA.build())
    fill(model)
    return model


def load(way: str, path: str, replicas: int, **options: Any) -> Any:
    return registered_model(path)[0] if way == "register" else prepared_model(path, replicas, False, **options)


@pytest.mark.parametrize("variation", VARIATIONS)
def test_adapters_train_as_on_one_process(ranks: Pools, tmp_path: Path, variation: str) -> None:
    told, path = VARIATIONS[variation], scenarios.saved(LLAMA, tmp_path)
    expected = alone(adapted, tmp_path, told, PARTS)
    for number, (way, world, replicas) in enumerate(PLACES):
        given = (partial(load, way, path), str(tmp_path / str(number)), replicas, told, expected)
        found = ranks(world).run(varied, *given, timeout=2 * LIMIT_S)
        assert found == [({}, variation == "compiled", {})] * world, (way, world)


def first_half(way: str, path: str, folder: str) -> None:
    on_ranks(load(way, path, 1), folder, 1, {})


def goes_on(way: str, path: str, checkpoint: str, replicas: int, expected: Reference) -> dict[str, float]:
    folder = f"{checkpoint}-on-{dist.get_world_size()}"
    curve = on_ranks(load(way, path, replicas), folder, replicas, {}, resume=checkpoint)
    assert len(curve.losses) == STEPS - 3
    return expected.wrong(curve, first=3)


@pytest.mark.parametrize("way", ["prepare", "register"])
def test_adapters_go_on_from_a_checkpoint_at_any_number_of_ranks(ranks: Pools, tmp_path: Path, way: str) -> None:
    expected, path, folder = (
        alone(adapted, tmp_path, {}, PARTS),
        scenarios.saved(LLAMA, tmp_path),
        str(tmp_path / "run"),
    )
    ranks(2).run(first_half, way, path, folder, timeout=LIMIT_S)
    for _, world, replicas in (place for place in PLACES if place[0] == way):
        found = ranks(world).run(goes_on, way, path, f"{folder}/checkpoint-3", replicas, expected, timeout=LIMIT_S)
        assert found == [{}] * world, world
