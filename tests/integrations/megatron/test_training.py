"""Our layers in Megatron's GPT under Megatron's own optimizers: clipping, micro-batches, bf16 and evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.integrations.curves import CLIP
from tests.integrations.megatron import models
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR, bounds_of

pytest.importorskip("megatron.core", reason="the package megatron-core is missing: pip install megatron-core")

from tests.integrations.megatron.test_megatron import STEPS
from tpkernels.integrations import megatron as tpk_megatron

pytestmark = [pytest.mark.gloo, pytest.mark.full("a variation")]

ROWS, MICRO = 4, 2
"""Of each step, over all replicas; and in how many batches each replica takes its own."""
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}


class AsOnCuda(TorchFunctionMode):
    """Megatron's optimizers make tensors on "cuda", and ask for the type of CUDA's: here a CPU stands for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        found = func(*args, **given)
        return found.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(found, str) else found


class Optimizer:
    """Megatron's around AdamW, with clipping; bf16 weights have fp32 masters."""

    def __init__(self, model: Any) -> None:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

        rounded = next(model.parameters()).dtype == torch.bfloat16
        config, adamw = OptimizerConfig(clip_grad=CLIP, bf16=rounded), models.adamw(model)
        with AsOnCuda():
            self.inner: Any = (
                Float16OptimizerWithFloat16Params(adamw, config, None, lambda *_: None)
                if rounded
                else FP32Optimizer(adamw, config, lambda *_: None)
            )

    def step(self) -> Any:
        with AsOnCuda():
            return self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Exact:
    """The same by torch: Megatron rounds the norm to fp32."""

    def __init__(self, model: Any) -> None:
        self.parameters, self.inner = list(model.parameters()), models.adamw(model)

    def step(self) -> tuple[bool, float]:
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.inner.step()
        return True, float(norm)

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def run(model: Any, kind: type[Any] = Optimizer) -> dict[str, Tensor]:
    return models.train(model, STEPS, optimizer=kind(model), rows=ROWS, parts=MICRO, evaluates=STEPS // 2)


def alone(changes: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One process in fp64 and as it is, from the same weights."""
    with models.on_cpu(1):
        plain, exact = models.gpt(1, **changes), models.gpt(1).double()
        with torch.no_grad():
            for to, given in zip(exact.parameters(), plain.parameters(), strict=True):
                to.copy_(given)
        return run(exact, Exact), run(plain)


def trained(tp: int, changes: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """By Megatron's layers and by ours."""
    with models.on_cpu(tp):
        stock = run(models.gpt(tp, sequence_parallel=True, **changes))
        swap = partial(tpk_megatron.layer_spec, strict=True)
        model = models.gpt(tp, swap, sequence_parallel=True, **changes)
        return {"stock": stock, "ours": run(tpk_megatron.convert_output(model, strict=True))}


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_megatrons_optimizers_train_our_layers_as_one_process_does(ranks: Pools, changes: dict[str, Any]) -> None:
    ((exact, plain),) = ranks(1).run(alone, changes, timeout=LIMIT_S)
    assert min(float(exact[f"norm {step}"]) for step in range(STEPS)) > CLIP, "clipping is active in each step"
    assert sum(name.startswith("evaluation") for name in exact) == 2
    bounds = bounds_of({name: (exact[name], plain[name]) for name in exact}, {})
    shapes = {name: value.shape for name, value in plain.items()}
    for tp, replicas in ((2, 1), (3, 1), (2, 2)):
        results = ranks(tp * replicas).run(trained, tp, changes, timeout=2 * LIMIT_S)
        if tp == 2 and not changes:
            for result in results:
                different = [
                    name for name, value in result["stock"].items() if not torch.equal(result["ours"][name], value)
                ]
                assert not different, (replicas, different)
        found = models.whole([result["ours"] for result in results[:tp]], shapes)
        worst = {name: bounds[name].ratio(found[name]) / FACTOR for name in bounds}
        assert max(worst.values()) <= 1, (tp, replicas, {name: ratio for name, ratio in worst.items() if ratio > 1})
