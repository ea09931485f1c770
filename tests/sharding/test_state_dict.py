"""Plain ``state_dict`` and ``load_state_dict`` of parallel models: original names and shapes, all or nothing."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.sharding import zoo
from tests.sharding.test_checkpoint import ONE_BLOCK, build, parallel, unlike
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

State = dict[str, Any]


def wholes(state: State) -> dict[str, Tensor]:
    """By torch's own gathering."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def moved(state: State) -> dict[str, Tensor]:
    return {name: value + 1 if value.is_floating_point() else value for name, value in state.items()}


class Wrapper(nn.Module):
    """A module of the user's that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(2, 2)


def owner_of(model: nn.Module) -> tuple[str, nn.Module]:
    """A module whose state is not what it holds: the first that tells."""
    return next(
        (path, module) for path, module in model.named_modules()
        if hasattr(module, "packed_parameters") or getattr(module, "by_unit", False)
    )  # fmt: skip


def speaks(name: str) -> list[str]:
    """What is wrong with the plain state of one model, out and in."""
    plain, model = build(name), parallel(name)
    expected = plain.state_dict()
    state = model.state_dict()
    wrong = unlike(wholes(state), expected)
    mixed = {key for key, value in state.items() if not isinstance(value, DTensor)} - dict(plain.named_buffers()).keys()
    copies = any(hasattr(module, "packed_parameters") or getattr(module, "by_unit", False) for module in model.modules())
    if bool(mixed) != copies:
        wrong.append(f"no DTensors: {sorted(mixed)}")
    if any(value.requires_grad for value in state.values()):
        wrong.append("state has a graph")
    other = moved(expected)
    if model.load_state_dict(other) != torch.nn.modules.module._IncompatibleKeys([], []):
        wrong.append("load_state_dict says something is missing")
    wrong += [f"after a whole state dict: {one}" for one in unlike(tpk.full_state_dict(model), other)]
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(expected)
    model.load_state_dict(saved)
    wrong += [f"after its own: {one}" for one in unlike(wholes(model.state_dict()), other)]
    model.load_state_dict(expected, assign=True)
    other["lm_head.weight"] = other.get("lm_head.weight", torch.zeros(1)).zero_()  # is no memory of the model's
    wrong += [f"after assign: {one}" for one in unlike(wholes(model.state_dict()), expected)]
    if not all(isinstance(parameter, DTensor) and parameter.is_leaf for parameter in model.parameters()):
        wrong.append("parameters are no DTensors any more")
    return wrong + parts_of_models(model, expected)


def parts_of_models(model: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    """Wrappers, submodules, copies, and what is not strict."""
    wrong = []
    wrapper = Wrapper(model)
    found = wrapper.state_dict()
    under = {key.removeprefix("model."): value for key, value in wholes(found).items() if key.startswith("model.")}
    wrong += [f"in a wrapper: {one}" for one in unlike(under, expected)]
    wrapper.load_state_dict({**found, **{f"model.{key}": value for key, value in moved(expected).items()}})
    wrong += [f"through a wrapper: {one}" for one in unlike(wholes(model.state_dict()), moved(expected))]
    if list(model.state_dict(prefix="p.")) != [f"p.{key}" for key in expected]:
        wrong.append("names with a prefix")
    twin = copy.deepcopy(model)
    twin.load_state_dict(expected)
    wrong += [f"a copy: {one}" for one in unlike(wholes(twin.state_dict()), expected)]
    wrong += [f"beside a copy: {one}" for one in unlike(wholes(model.state_dict()), moved(expected))]
    path, owner = owner_of(model)
    mine = {key.removeprefix(f"{path}."): value for key, value in expected.items() if key.startswith(f"{path}.")}
    owner.load_state_dict(mine)
    wrong += [f"a part: {one}" for one in unlike(wholes(owner.state_dict()), mine)]
    first = next(iter(mine))
    partly = {key: value for key, value in expected.items() if key != f"{path}.{first}"} | {"more": torch.ones(2)}
    said = model.load_state_dict(partly, strict=False)
    if said != torch.nn.modules.module._IncompatibleKeys([f"{path}.{first}"], ["more"]):
        wrong.append(f"not strict: {said}")
    return wrong + [f"not strict: {one}" for one in unlike(wholes(model.state_dict()), expected)]


def speak(names: list[str]) -> dict[str, list[str]]:
    return {name: speaks(name) for name in names}


@pytest.mark.parametrize(
    ("world", "names"), [(2, ["gpt2", "transformer"]), (3, ["gpt2 10", "llama 10", "mistral 10", "transformer 10"])]
)
def test_state_has_the_names_and_shapes_of_the_unsharded_model_and_loads_back(
    ranks: Pools, world: int, names: list[str]
) -> None:
    """Packed layers, heads that do not divide, copied heads, torch's attention, ties."""
    for wrong in ranks(world).run(speak, names, timeout=2 * LIMIT_S):
        assert not any(wrong.values()), wrong


Change = Callable[[dict[str, Tensor]], Any]
WRONG: dict[str, tuple[Change, str]] = {
    "missing": (lambda sd: sd.pop("c_attn.bias"), "missing c_attn.bias. Nothing was changed"),
    "unexpected": (lambda sd: sd.update(extra=torch.zeros(2)), "unexpected extra"),
    "packed names": (
        lambda sd: sd.update({"c_attn.part0.bias": sd.pop("c_attn.bias")[:4]}),
        "missing c_attn.bias; unexpected c_attn.part0.bias",
    ),
    "misshaped": (lambda sd: sd.update({"c_attn.weight": sd["c_attn.weight"].T}), r"c_attn.weight is \(\d+, 24\)"),
    "no tensor": (lambda sd: sd.update({"c_proj.bias": [1.0]}), "c_proj.bias must be a tensor, it is a list"),  # type: ignore[dict-item]
    "one rank": (lambda sd: sd["c_attn.weight"].add_(dist.get_rank()), "the ranks gave different state dicts"),
    "one rank lacks": (lambda sd: dist.get_rank() and sd.pop("c_proj.bias"), r"on rank\(s\) \[1\]: missing c_proj.bias"),
}


def refused_states() -> tuple[dict[str, tuple[str, bool]], list[str]]:
    model = parallel("gpt2")
    block = "transformer.h.0.attn."
    whole = build("gpt2").state_dict()
    said: dict[str, tuple[str, bool]] = {}
    for kind, (change, _) in WRONG.items():
        state = moved(whole)
        short = {key.removeprefix(block): value for key, value in state.items()}
        change(short)
        given = {block + key if block + key in whole or key.startswith("c_attn.") else key: short[key] for key in short}
        before = tpk.full_state_dict(model)
        try:
            model.load_state_dict(given)
            text = "nothing"
        except RuntimeError as error:  # torch's kind
            text = str(error)
        said[kind] = text.replace(block, ""), not unlike(tpk.full_state_dict(model), before)
    held = [name for name, _ in model.named_parameters() if "c_attn" in name]
    return said, held


def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(ranks: Pools) -> None:
    for said, held in ranks(2).run(refused_states, timeout=LIMIT_S):
        for kind, (text, untouched) in said.items():
            assert untouched, kind
            with pytest.raises(ValueError, match=WRONG[kind][1]):
                raise ValueError(text)
        assert held[0].endswith("c_attn.part0.weight"), "named_parameters tells what is held"
