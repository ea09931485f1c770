"""accelerate without Trainer: a loop of one's own on a model of ``prepare``; what it cannot save, it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpkernels as tpk
from tests.integrations import causal_models
from tests.integrations.curves import CLIP, Curve, Reference, adamw, batches, gradients_of, reference, weights_of
from tests.integrations.curves import train as plain_train
from tests.nn.reference import LIMIT_S, tp_mesh, whole
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install --no-deps accelerate psutil")

import tpkernels.integrations.transformers as tpk_transformers
from tests.integrations.transformers.running import on_cpu

pytestmark = pytest.mark.gloo

SIZES = {"n_layer": 1}


def loop(folder: str, expected: Reference) -> dict[str, Any]:
    from accelerate import Accelerator

    with on_cpu():
        accelerator = Accelerator(cpu=True)
        model = tpk_transformers.prepare(causal_models.gpt2(**SIZES), tp_mesh())
        # On CPUs prepare() would wrap it in DistributedDataParallel, whatever it is.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(adamw(model.parameters()))
        curve = Curve()
        for ids in batches():
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            curve.gradients = curve.gradients or gradients_of(model)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            curve.losses.append(float(loss.detach()))
            curve.norms.append(float(whole(norm)))
        curve.weights = weights_of(model)
        state = {name: whole(value) for name, value in accelerator.get_state_dict(model).items()}
        plain = tpk.full_state_dict(model)
        with pytest.raises(RuntimeError, match="data pointer"):
            accelerator.save_state(folder)
        left = [path.name for path in Path(folder).rglob("*") if path.is_file()]
    same = state.keys() == plain.keys() and all(torch.equal(state[name], plain[name]) for name in plain)
    return {"wrong": expected.wrong(curve), "state": same, "left": left}


def test_a_loop_of_ones_own_is_right_and_save_state_raises_instead_of_writing_parts(
    ranks: Pools, tmp_path: Path
) -> None:
    expected = reference(causal_models.gpt2(**SIZES), lambda model: plain_train(model, batches()))
    for found in ranks(2).run(loop, str(tmp_path), expected, timeout=LIMIT_S):
        assert found == {"wrong": {}, "state": True, "left": []}
