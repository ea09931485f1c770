"""Styled models in bf16, in micro-batches and compiled; and torch's checkpoints of them, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states

from tests.integrations.curves import STEPS, Curve, Reference, adamw, batches, reference, train, weights_of
from tests.integrations.styles.models import Model, build, loss_of, parallel
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

SIZES: dict[str, Any] = {"heads": 6, "groups": 6, "positions": False}
"""Heads for two and for three ranks; the residual of the layouts "sequence" takes no positions."""
HALF = STEPS // 2


def in_bf16(model: nn.Module) -> Curve:
    def autocast(model: nn.Module, ids: Tensor) -> Tensor:
        exact = next(model.parameters()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            return loss_of(model, ids)

    return train(model, batches(), loss_of=autocast, make=lambda parameters: adamw(parameters, 1e-2))


def in_micro_batches(model: nn.Module) -> Curve:
    """Two rows, one by one; the gradient of the first is there when the second's comes."""

    def second(model: nn.Module, ids: Tensor) -> Tensor:
        loss, last = (loss_of(model, row) / 2 for row in ids.chunk(2))
        loss.backward()
        return last

    return train(model, batches(), loss_of=second)


def compiled(model: nn.Module) -> Curve:
    if not dist.is_initialized():  # the reference
        return train(model, batches(), loss_of=loss_of)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model.compile(backend="aot_eager", fullgraph=True)
    curve = train(model, batches(), loss_of=loss_of)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    return curve


WAYS: dict[str, Callable[[nn.Module], Curve]] = {
    "bf16": in_bf16,
    "micro-batches": in_micro_batches,
    "compiled": compiled,
}


def varied(way: str, layouts: str, expected: Reference) -> dict[str, float]:
    return expected.wrong(WAYS[way](parallel(layouts, **SIZES)))


@pytest.mark.full("a variation")
@pytest.mark.parametrize("layouts", ["plain", "sequence", "dtensors"])
@pytest.mark.parametrize("way", WAYS)
def test_a_styled_model_trains_as_one_process_does(ranks: Pools, way: str, layouts: str) -> None:
    expected = reference(build(**SIZES), WAYS[way])
    for world in (2, 3):
        assert ranks(world).run(varied, way, layouts, expected, timeout=LIMIT_S) == [{}] * world


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
    }


def trained(model: Model, optimizer: torch.optim.Optimizer, given: list[Tensor]) -> Curve:
    return train(model, given, loss_of=loss_of, make=lambda _: optimizer)


def half(layouts: str, options: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Writes a checkpoint after three steps; returns the weights that it must have."""
    model = parallel(layouts, **options)
    optimizer = adamw(model.parameters())
    trained(model, optimizer, batches()[:HALF])
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
    return weights_of(model)


def rest(layouts: str | None, options: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], Curve]:
    """The other three, from the checkpoint; without ``layouts`` by torch alone."""
    model = build(**options) if layouts is None else parallel(layouts, **options)
    optimizer = adamw(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    states.set_model_state_dict(model, state["model"])
    states.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return weights_of(model), trained(model, optimizer, batches()[HALF:])


@pytest.mark.full("torch's checkpoints of our layers go on so in the tests of Lightning")
@pytest.mark.parametrize(("layouts", "options"), [("sequence", SIZES), ("plain", {**SIZES, "tied": True})])
def test_a_checkpoint_goes_on_at_any_number_of_ranks_and_is_the_unsharded_model(
    ranks: Pools, tmp_path: Path, layouts: str, options: dict[str, Any]
) -> None:
    expected = reference(build(**options), lambda model: train(model, batches(), loss_of=loss_of))
    folder = str(tmp_path)
    saved, _ = ranks(2).run(half, layouts, options, folder, timeout=LIMIT_S)
    found = [rest(None, options, folder)]
    for world in (2, 3):
        found += ranks(world).run(rest, layouts, options, folder, timeout=LIMIT_S)
    for loaded, curve in found:
        assert all(torch.equal(weight, saved[name]) for name, weight in loaded.items())
        assert len(curve.losses) == STEPS - HALF and expected.wrong(curve, first=HALF) == {}
