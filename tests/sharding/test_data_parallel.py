"""DP x TP on a 2 x 2 mesh trains as one process does: losses, gradient norms, final weights, in fp64 and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close, whole
from tpkernels.demo.loop import Recipe, Trainer
from tpkernels.demo.text import VOCABULARY, Batches
from tpkernels.measure.gpt import GPT, ParallelGPT, Sizes
from tpkernels.nn import LayerNorm
from tpkernels.optim import MasterWeights
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

# 7 sequences: 4 and 3 for the replicas; their micro-batches of 2, 1, 1 and 1, 1, 1
SMALL = Sizes(layers=1, width=24, heads=4, d_ff=29, vocabulary=VOCABULARY, length=13, batch=7)
STEPS = 5
TEXT = torch.randint(256, (5000,), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Unlike Adam it does not blow the rounding of an almost vanishing gradient up to a step of full size."""
    return torch.optim.SGD(parameters, 0.3, momentum=0.9)


def plain(dtype: torch.dtype) -> GPT:
    """The same weights in every dtype, because all are bf16 numbers."""
    torch.manual_seed(3)
    return GPT(SMALL).to(torch.bfloat16).to(dtype)


def parallel(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, **options: Any) -> ParallelGPT:
    return ParallelGPT.from_plain(plain(dtype), mesh, **options)


class Run:
    """One training run: its losses and norms, and the model that it ended with."""

    def __init__(self, model: nn.Module, recipe: Recipe, replicas: DeviceMesh | None, make: Any) -> None:
        trainer = Trainer(model, Batches(TEXT, SMALL.batch, SMALL.length, seed=5), recipe, replicas=replicas, make=make)
        steps = [trainer.step(number) for number in range(STEPS)]
        self.curves = torch.tensor([[step.loss, step.norm] for step in steps], dtype=torch.float64).T
        self.weights = {name: whole(parameter).detach() for name, parameter in model.named_parameters()}
        self.optimizer = trainer.optimizer


def on_mesh(
    mesh: DeviceMesh,
    shard: bool,
    accumulate: int = 1,
    *,
    dtype: torch.dtype = torch.float64,
    make: Any = momentum,
    fault: str = "",
    policy: MixedPrecisionPolicy | None = None,
    sequence_parallel: bool = True,
) -> Run:
    model = parallel(mesh["tp"], dtype, sequence_parallel=sequence_parallel)
    for module in model.modules():
        if fault == "replicas not summed" and isinstance(module, LayerNorm):
            module.sequence_parallel = False
    tpk.data_parallel(model, mesh, shard=shard, policy=policy)
    for module in model.modules():
        if fault == "sum for mean" and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return Run(model, Recipe(accumulate=accumulate), mesh["dp"], make)


def compare(run: Run, expected: Run) -> None:
    for name, actual, wanted in zip(("losses", "gradient norms"), run.curves, expected.curves, strict=True):
        close(actual, wanted, name)
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in run.weights.items():  # attention has a dimension for its heads
        close(weight.view_as(expected.weights[name]), expected.weights[name], name)


def in_fp64(faults: list[str], full: bool) -> list[str]:
    """What the comparison says about each fault."""
    every = [(False, 1, False), (False, 3, True), (True, 1, True), (True, 3, True)]
    mesh = tpk.init(dp=2, tp=2)
    reference = Run(plain(torch.float64), Recipe(), None, momentum)
    for shard, accumulate, sequence_parallel in every if full else every[1:3]:
        compare(on_mesh(mesh, shard, accumulate, sequence_parallel=sequence_parallel), reference)
    said = []
    for number, fault in enumerate(faults):
        try:
            compare(on_mesh(mesh, bool(number % 2), 3, fault=fault), reference)
            said.append("nothing")
        except AssertionError as error:
            said.append(str(error))
    return said


@pytest.mark.slow("8 s; trainers' tests have replicas and shards, too")
def test_replicas_and_shards_with_and_without_accumulation_train_as_one_process_and_faults_do_not(
    ranks: Pools, full: bool
) -> None:
    for said in ranks(4).run(in_fp64, ["sum for mean", "replicas not summed"], full, timeout=LIMIT_S):
        assert all("differs by" in message for message in said), said


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4, eps=1e-4, weight_decay=0.1)


def masters(parameters: Any) -> MasterWeights:
    return MasterWeights(parameters, adamw, shard_replicas=True)


def errors(run: Run, exact: Run) -> list[float]:
    """Of the losses, the norms and the weights (masters where there are), relative to fp64."""
    weights = dict(run.weights)
    if isinstance(run.optimizer, MasterWeights):
        values = [whole(state["master"]).detach() for state in run.optimizer.state.values()]
        weights = dict(zip(weights, values, strict=True))
    moved = [float((weights[name].view_as(w) - w).double().norm()) for name, w in exact.weights.items()]
    curves = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(run.curves, exact.curves, strict=True)]
    return [*curves, max(moved)]


def in_bf16() -> dict[str, list[float]]:
    mesh, low = tpk.init(dp=2, tp=2), torch.bfloat16
    exact = Run(plain(torch.float64), Recipe(), None, adamw)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fp32 = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    runs = {
        "one process": Run(plain(low), Recipe(), None, lambda p: MasterWeights(p, adamw)),
        "replicas": on_mesh(mesh, False, 3, dtype=low, make=masters, policy=policy),
        "shards": on_mesh(mesh, True, 3, dtype=low, make=masters, policy=policy),
        "policy": on_mesh(mesh, True, 3, dtype=torch.float32, make=adamw, policy=fp32),
        "no masters": on_mesh(mesh, False, 3, dtype=low, make=adamw, policy=policy),
    }
    return {name: errors(run, exact) for name, run in runs.items()}


@pytest.mark.full("a quarter of a minute of training")
def test_bf16_with_fp32_masters_is_as_exact_as_in_one_process(ranks: Pools) -> None:
    for found in ranks(4).run(in_bf16, timeout=LIMIT_S):
        print(found)
        for name in ("replicas", "shards", "policy"):
            assert all(e <= 4 * own for e, own in zip(found[name], found["one process"], strict=True)), (name, found)
        assert found["no masters"][2] > 5 * found["one process"][2], found


def refuses() -> list[str]:
    mesh = tpk.init(dp=2, tp=2)
    done = tpk.data_parallel(parallel(mesh["tp"]), mesh, shard=True)
    mixed = parallel(mesh["tp"])
    mixed.late = nn.Linear(2, 2)
    calls: list[tuple[nn.Module, DeviceMesh, list[nn.Module]]] = [
        (done, mesh, []),
        (mixed, mesh, []),
        (mixed, mesh["tp"], []),
        (parallel(mesh["tp"]), mesh, [nn.Linear(2, 2)]),
        (parallel(mesh["dp"]), mesh, []),
    ]
    said = []
    for model, where, units in calls:
        with pytest.raises(ValueError) as error:
            tpk.data_parallel(model, where, units=units)
        said.append(str(error.value))
    return said


def test_what_is_not_tensor_parallel_on_this_mesh_or_is_data_parallel_already_is_refused(ranks: Pools) -> None:
    for said in ranks(4).run(refuses, timeout=LIMIT_S):
        assert "is data-parallel already" in said[0]
        assert "parameter late.weight is not a DTensor: call tpk.parallelize" in said[1]
        assert 'must have the axes "dp" and "tp", got (\'tp\',)' in said[2]
        assert "1 of 1 units are not part of the model" in said[3]
        assert 'not on the axis "tp"' in said[4]
