"""An optimizer that holds parameters which were replaced raises in its first step, whatever drives it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpkernels as tpk
from tests.nn.reference import tp_mesh
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PLAN = {"up": "column", "down": "row"}
X = torch.linspace(-1, 1, 12).reshape(2, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def parallel(model: Net) -> Net:
    return tpk.parallelize(model, tp_mesh(), PLAN)


def steps_with(optimizer: torch.optim.Optimizer, model: nn.Module, how: str) -> None:
    optimizer.zero_grad()
    loss = model(X).square().mean()
    if how == "scaler":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    else:
        loss.backward()
        optimizer.step()


def an_old_optimizer_refuses() -> None:
    message = r"(SGD|AdamW|Adam|MasterWeights) holds \d parameter.* parallelize has replaced, the first is 'up.weight'"
    makers: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
    ]
    for make, options in makers:
        model = Net()
        optimizer = make(model.parameters(), **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        parallel(model)
        with pytest.raises(ValueError, match=message):
            steps_with(optimizer, model, "step")
        schedule.step()
    model = Net()
    masters = tpk.optim.MasterWeights(model.parameters(), lambda groups: torch.optim.SGD(groups, 0.1))
    parallel(model)
    with pytest.raises(ValueError, match=message):
        steps_with(masters, model, "step")


def a_scaler_does_not_hide_it() -> None:
    """Where some parameter has a gradient; without any, torch's scaler refuses the step itself."""
    model, other = Net(), nn.Parameter(torch.ones(6))
    optimizer = torch.optim.SGD([*model.parameters(), other], 0.1)
    parallel(model)
    model.register_forward_hook(lambda module, args, output: output * other)
    with pytest.raises(ValueError, match="parallelize has replaced"):
        steps_with(optimizer, model, "scaler")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel(model)
    with pytest.raises(AssertionError, match="No inf checks"):
        steps_with(optimizer, model, "scaler")


def every_way_of_replacing_counts() -> None:
    layer = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    tpk.nn.replicate_parameters(layer, tp_mesh())
    with pytest.raises(ValueError, match="replicate_parameters has replaced, the first is 'weight'"):
        optimizer.step()
    if dist.get_world_size() == 2:
        mesh = tpk.init(dp=2, tp=1)
        for shard in (False, True):
            model = tpk.parallelize(Net(), mesh["tp"], PLAN)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            tpk.data_parallel(model, mesh, shard=shard)
            with pytest.raises(ValueError, match=r"data_parallel has replaced, the first is 'up.weight'"):
                optimizer.step()
            steps_with(torch.optim.SGD(model.parameters(), 0.1), model, "step")
    model = Net()
    old = list(model.parameters())
    parallel(model)
    with pytest.raises(ValueError, match="clip_grad_norm_ was given 6 parameter"):
        tpk.clip_grad_norm_(old, 1.0)
    with pytest.raises(ValueError, match="clip_grad_norm_ was given 1 parameter"):
        tpk.clip_grad_norm_(old[0], 1.0)


def an_optimizer_made_afterwards_trains() -> None:
    given = Net()
    reference = torch.optim.SGD(given.up.parameters(), 0.1)
    tpk.nn.ColumnParallelLinear.from_linear(given.up, tp_mesh())
    steps_with(reference, given, "step")  # the linear stays a layer of its own
    model = parallel(given)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    steps_with(optimizer, model, "step")
    assert tpk.clip_grad_norm_(model.parameters(), 1.0) > 0
    refused = Net()
    kept = torch.optim.SGD(refused.parameters(), 0.1)
    with pytest.raises(ValueError, match="matches"):
        tpk.parallelize(refused, tp_mesh(), {"nothing": "column"})
    steps_with(kept, refused, "step")


def what_was_replaced_is_freed() -> None:
    for holder in (False, True):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if holder else None
        old = [weakref.ref(parameter) for parameter in model.parameters()]
        gc.disable()
        try:
            parallel(model)
            assert [reference() is not None for reference in old] == [holder] * len(old)
        finally:
            gc.enable()
        del optimizer


def test_an_old_optimizer_refuses_to_step(ranks: Pools) -> None:
    for world_size in (1, 2):
        for check in (
            an_old_optimizer_refuses,
            a_scaler_does_not_hide_it,
            every_way_of_replacing_counts,
            an_optimizer_made_afterwards_trains,
            what_was_replaced_is_freed,
        ):
            ranks(world_size).run(check)
