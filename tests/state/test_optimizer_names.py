"""Optimizer state in the names of the unsharded model: torch's checkpoints of it go everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models import zoo
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tests.state.test_checkpoint import ONE_BLOCK
from tests.state.test_state_dict import steps
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

State = dict[str, Any]


def run_of(name: str, mesh: Any = None, seed: int = 0, **plan: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two groups with options of their own; of other weights with a ``seed``."""
    model = zoo.build(name, torch.float64, **ONE_BLOCK.get(name, {}))
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    if mesh is not None:
        tpk.parallelize(model, mesh, **({"plan": plan_once(model, mesh)} | plan))
    groups = [[p for n, p in model.named_parameters() if n.endswith("bias") is last] for last in (False, True)]
    return model, torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], 0.01)


def wholes(state: State) -> dict[str, Any]:
    """Every slot by one name, by torch's own gathering."""
    return {
        f"{name}.{slot}": value.full_tensor() if isinstance(value, DTensor) else value
        for name, slots in state["state"].items() for slot, value in slots.items()
    }  # fmt: skip


def differences(found: State, expected: State) -> list[str]:
    """Names, shapes, values, groups."""
    mine, theirs = wholes(found), wholes(expected)
    wrong = [f"names {set(mine) ^ set(theirs)}"] if set(mine) != set(theirs) else []
    for key in set(mine) & set(theirs):
        apart = mine[key].shape != theirs[key].shape or not torch.allclose(mine[key], theirs[key], 1e-7, 1e-12)
        wrong += [key] if apart else []
    groups = [[{**one, "params": sorted(one["params"])} for one in each["param_groups"]] for each in (found, expected)]
    return wrong + ([f"groups {groups}"] if groups[0] != groups[1] else [])


def reference(name: str) -> State:
    model, optimizer = run_of(name)
    steps(name, model, optimizer, 2)
    return torchs.get_optimizer_state_dict(model, optimizer)


TRUE = PackedColumnParallelLinear.packed_parameters


def turned(layer: PackedColumnParallelLinear) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {key: (dim, keys[::-1]) for key, (dim, keys) in TRUE(layer).items()}


def saved(names: list[str], folder: str, fault: bool = False) -> tuple[list[str], dict[str, list[float]]]:
    """What is wrong with the names and values, and the losses of the steps that follow."""
    wrong, losses = [], {}
    for name in names:
        model, optimizer = run_of(name, tp_mesh())
        steps(name, model, optimizer, 2)
        with mock.patch.object(PackedColumnParallelLinear, "packed_parameters", turned if fault else TRUE):
            states = [tpk.optimizer_state_dict(model, optimizer, full=full) for full in (False, True)]
        expected = reference(name)
        wrong += [f"{name}: {one}" for state in states for one in differences(state, expected)]
        if fault:
            continue
        tensors = [value for value in states[0]["state"].values()]
        wrong += [] if any(isinstance(one["exp_avg"], DTensor) for one in tensors) else [f"{name}: no DTensor"]
        wrong += [] if set(states[0]["state"]) <= set(model.state_dict()) else [f"{name}: other names than the model"]
        dcp.save({"model": model.state_dict(), "optimizer": states[0]}, checkpoint_id=f"{folder}/{name}")
        losses[name] = steps(name, model, optimizer, 2)
    return wrong, losses


def resumed(names: list[str], folder: str) -> dict[str, list[float]]:
    found = {}
    for name in names:
        model, optimizer = run_of(name, tp_mesh(), seed=5)
        state: State = {"model": model.state_dict(), "optimizer": tpk.optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(state["model"])
        tpk.load_optimizer_state_dict(model, optimizer, state["optimizer"])
        found[name] = steps(name, model, optimizer, 2)
    return found


def resumed_unsharded(name: str, folder: str) -> list[float]:
    """By torch's functions alone."""
    model, optimizer = run_of(name, seed=5)
    state = dict(zip(("model", "optimizer"), torchs.get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/{name}")
    torchs.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return steps(name, model, optimizer, 2)


def test_a_checkpoint_of_torchs_goes_on_at_any_number_of_ranks_and_unsharded(ranks: Pools, tmp_path: Path) -> None:
    """A packed projection whose heads divide over 2 ranks, and are 2, 1 and 1 on 3."""
    names, folder = ["gpt2"], str(tmp_path)
    found = ranks(2).run(saved, names, folder, timeout=2 * LIMIT_S)
    assert not any(wrong for wrong, _ in found), found
    expected = found[0][1]
    others = [ranks(world).run(resumed, names, folder, timeout=2 * LIMIT_S)[0] for world in (3, 2)]
    others += [{name: resumed_unsharded(name, folder) for name in names}]
    for losses in others:
        for name in names:
            assert losses[name] == pytest.approx(expected[name], rel=1e-9), name


def test_parts_in_the_wrong_order_are_noticed(ranks: Pools, tmp_path: Path) -> None:
    for wrong, _ in ranks(2).run(saved, ["gpt2"], str(tmp_path), True, timeout=LIMIT_S):
        assert any("c_attn" in one for one in wrong), wrong


def on_two_axes() -> list[str]:
    """FSDP2 over tensor parallelism."""
    mesh = tpk.init(dp=2, tp=2)
    model, _ = run_of("gpt2", mesh)
    tpk.data_parallel(model, mesh, shard=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    steps("gpt2", model, optimizer, 1)
    state = tpk.optimizer_state_dict(model, optimizer)
    plain, _ = run_of("gpt2")
    unsharded = torch.optim.AdamW(plain.parameters(), 0.01)
    steps("gpt2", plain, unsharded, 1)
    expected = torchs.get_optimizer_state_dict(plain, unsharded)
    wrong = differences(state, expected)
    fresh = torch.optim.AdamW(model.parameters(), 0.5)  # made while there are gradients, which stay
    gradients = {name: p.grad for name, p in model.named_parameters()}
    tpk.load_optimizer_state_dict(model, fresh, expected)
    wrong += [f"gradient of {name}" for name, p in model.named_parameters() if p.grad is not gradients[name]]
    return wrong + [f"loaded: {one}" for one in differences(tpk.optimizer_state_dict(model, fresh), expected)]


@pytest.mark.full("test_state_dict.py has the names and values of FSDP2")
def test_fsdp2_and_the_unsharded_optimizer_agree(ranks: Pools) -> None:
    for wrong in ranks(4).run(on_two_axes, timeout=LIMIT_S):
        assert not wrong, wrong


def _on_rank_1(change: Callable[[State], None]) -> Callable[[State], None]:
    return lambda state: change(state) if dist.get_rank() == 1 else None


FIRST = "transformer.wte.weight"
PACKED = "transformer.h.0.attn.c_attn.weight"
WRONG: dict[str, tuple[Callable[[State], Any], str]] = {
    "numbers": (lambda s: s["state"].update({0: {}}), "numbers the parameters"),
    "no groups": (lambda s: s.pop("param_groups"), 'has "state" and "param_groups"'),
    "another parameter": (lambda s: s["state"].update(other={}), "of other parameters.*other"),
    "a missing one": (lambda s: s["state"].pop(PACKED), f"of other parameters; it lacks.*{PACKED}"),
    "another slot": (lambda s: s["state"][FIRST].update(momentum=1), "wte.weight has the slots .*momentum"),
    "another shape": (lambda s: s["state"][PACKED].update(exp_avg=torch.ones(3, 3)), r"c_attn.weight is \(3, 3\)"),
    "another group": (lambda s: s["param_groups"][0]["params"].pop(), "its groups have other parameters"),
    "one rank's": (_on_rank_1(lambda s: s["state"][PACKED]["exp_avg"].add_(1)), "different optimizers or state dicts"),
    "one rank's option": (_on_rank_1(lambda s: s["param_groups"][0].update(lr=0.5)), "different optimizers or"),
    "one rank's name": (_on_rank_1(lambda s: s["state"].pop(PACKED)), "rank 1: it has the state of other parameters"),
}


def refused() -> dict[str, tuple[str, list[str]]]:
    model, optimizer = run_of("gpt2", tp_mesh())
    steps("gpt2", model, optimizer, 1)
    before = tpk.optimizer_state_dict(model, optimizer, full=True)
    said = {}
    for kind, (change, _) in WRONG.items():
        given = tpk.optimizer_state_dict(model, optimizer, full=True)
        for slots in given["state"].values():
            for value in slots.values():
                value.add_(1) if isinstance(value, Tensor) and value.dim() else None
        change(given)
        try:
            tpk.load_optimizer_state_dict(model, optimizer, given)
            text = "nothing"
        except ValueError as error:
            text = str(error)
        said[kind] = text, differences(tpk.optimizer_state_dict(model, optimizer, full=True), before)
    return said


def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(ranks: Pools) -> None:
    for said in ranks(2).run(refused, timeout=LIMIT_S):
        for kind, (text, changed) in said.items():
            assert not changed, kind
            with pytest.raises(ValueError, match=WRONG[kind][1]):
                raise ValueError(text)
