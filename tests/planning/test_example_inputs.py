"""The inputs that a plan is made with: they are named, and can be given other sizes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models import zoo
from tpkernels.planning.example_inputs import Tokens
from tpkernels.planning.shadow import Shadow

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.cpu


def test_a_plan_names_the_inputs_for_which_it_counts_bytes() -> None:
    model = zoo.build("bert")
    guessed = tpk.make_plan(model, 2)
    assert guessed.example == "input_ids 3x7 (a guess: give example_inputs or --tokens)"
    assert f"sent per rank in one step of {guessed.example}: " in str(guessed)
    given = tpk.make_plan(model, 2, example_inputs={"input_ids": torch.zeros(6, 7, dtype=torch.long)})
    assert given.example == "input_ids 6x7" and given.wire_bytes > 1.8 * guessed.wire_bytes
    larger = tpk.make_plan(model, 2, example_inputs=Tokens(6, 7))
    assert larger.wire_bytes == given.wire_bytes and larger.example.startswith("input_ids 6x7 (a guess")
    assert tpk.ShardingPlan.from_json(larger.to_json()) == larger


def test_inputs_are_taken_to_the_device_of_the_model_if_it_is_on_one() -> None:
    """Who plans before the batch is moved is right; the meta device stands for a GPU."""

    def device_of(model: nn.Module) -> str:
        shadow: Any = SimpleNamespace(model=model, fake=nullcontext())
        (x,), _ = Shadow.fake_inputs(shadow, (torch.zeros(2, 8),), {})
        return str(x.device)

    elsewhere = nn.Linear(8, 8, device="meta")
    assert device_of(elsewhere) == "meta"
    assert device_of(nn.Sequential(elsewhere, nn.Linear(8, 8))) == device_of(nn.ReLU()) == "cpu"
