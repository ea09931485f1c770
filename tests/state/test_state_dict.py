"""Plain ``state_dict`` and ``load_state_dict`` of parallel models: original names and shapes, all or nothing."""

from __future__ import annotations

import copy
import datetime
import importlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.tensor import DTensor, distribute_tensor

import tpkernels as tpk
from tests.models import zoo
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tests.state.test_checkpoint import ONE_BLOCK, build, parallel, unlike
from tpkernels.state import huggingface_export
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


def owners_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose state is not what they hold."""
    return [
        (path, module) for path, module in model.named_modules()
        if hasattr(module, "packed_parameters") or getattr(module, "by_unit", False)
    ]  # fmt: skip


def speaks(name: str) -> list[str]:
    """What is wrong with the plain state of one model, out and in."""
    plain, model = build(name), parallel(name)
    expected = plain.state_dict()
    state = model.state_dict()
    wrong = unlike(wholes(state), expected)
    mixed = {key for key, value in state.items() if not isinstance(value, DTensor)} - dict(plain.named_buffers()).keys()
    if bool(mixed) != bool(owners_of(model)):
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
    path, owner = owners_of(model)[0]
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


@pytest.mark.sample(1)
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
    "another mesh": (
        lambda sd: sd.update({"c_proj.bias": distribute_tensor(sd["c_proj.bias"], tpk.init(dp=2, tp=1)["tp"])}),
        r"c_proj.bias is a DTensor on DeviceMesh.*, and the model is not: give the whole tensor",
    ),
    "one rank": (lambda sd: sd["c_attn.weight"].add_(dist.get_rank()), "the ranks gave different state dicts"),
    "one rank lacks": (
        lambda sd: dist.get_rank() and sd.pop("c_proj.bias"),
        r"on rank\(s\) \[1\]: missing c_proj.bias",
    ),
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


def on_a_mesh_of_two_axes() -> list[str]:
    """FSDP2 over tensor parallelism, and torch's functions for state."""
    wrong = []
    mesh = tpk.init(dp=2, tp=2)
    for name, shard in (("gpt2", True), ("attention 10", False)):
        plain, model = build(name), build(name)
        plan = plan_once(model, mesh, example_inputs=zoo.inputs(name))
        tpk.data_parallel(tpk.parallelize(model, mesh, plan), mesh, shard=shard)
        expected = plain.state_dict()
        wrong += [f"{name} on (dp, tp): {one}" for one in unlike(wholes(model.state_dict()), expected)]
        wrong += [f"{name} whole: {one}" for one in unlike(tpk.full_state_dict(model), expected)]
        model.load_state_dict(moved(expected))
        options = torchs.StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = torchs.get_model_state_dict(model, options=options)
        wrong += [f"{name} torch's: {one}" for one in unlike(full, moved(expected) if dist.get_rank() == 0 else {})]
        if shard:  # torch 2.13 cannot cut a whole tensor over both axes itself: an AssertionError of its own
            model.load_state_dict(expected)
        else:
            given = dict(expected)  # torch adds to it
            torchs.set_model_state_dict(model, given, options=torchs.StateDictOptions(full_state_dict=True))
        wrong += [f"{name} torch's, back: {one}" for one in unlike(tpk.full_state_dict(model), expected)]
        torchs.set_model_state_dict(model, torchs.get_model_state_dict(model))
        wrong += [f"{name} torch's, cut: {one}" for one in unlike(tpk.full_state_dict(model), expected)]
    return wrong


@pytest.mark.full("test_optimizer_names.py has FSDP2, too")
def test_torchs_functions_and_fsdp2_agree_on_the_names_and_values(ranks: Pools) -> None:
    for wrong in ranks(4).run(on_a_mesh_of_two_axes, timeout=2 * LIMIT_S):
        assert not wrong, wrong


def run_of(name: str, mesh: Any = None, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = zoo.build(name, torch.float64, **ONE_BLOCK.get(name, {}))
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    model = model if mesh is None else tpk.parallelize(model, mesh, plan_once(model, mesh))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def steps(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = zoo.output(model(**zoo.inputs(name))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_by_torch(names: list[str], folder: str) -> dict[str, list[float]]:
    losses = {}
    for name in names:
        model, optimizer = run_of(name, tp_mesh())
        steps(name, model, optimizer, 2)
        state = dict(zip(("model", "optimizer"), torchs.get_state_dict(model, optimizer), strict=True))
        torch.distributed.checkpoint.save(state, checkpoint_id=f"{folder}/{name}")
        losses[name] = steps(name, model, optimizer, 2)
    return losses


def loaded_by_torch(names: list[str], folder: str, parallel: bool = True) -> dict[str, Any]:
    """Losses of the steps that follow, or what was said."""
    found: dict[str, Any] = {}
    for name in names:
        model, optimizer = run_of(name, tp_mesh() if parallel else None, seed=5)
        state = dict(zip(("model", "optimizer"), torchs.get_state_dict(model, optimizer), strict=True))
        try:
            torch.distributed.checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
            torchs.set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            found[name] = steps(name, model, optimizer, 2)
        except torch.distributed.checkpoint.CheckpointException as error:
            found[name] = str(error)
            state = {"model": model.state_dict()}  # the model alone goes everywhere
            torch.distributed.checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
            model.load_state_dict(state["model"])
            found[f"{name} alone"] = steps(name, model, optimizer, 1)
    return found


@pytest.mark.full("a quarter of a minute of training")
def test_a_run_saved_by_torchs_functions_goes_on_or_says_that_it_cannot(ranks: Pools, tmp_path: Path) -> None:
    """At the same number of ranks, at another one, and unsharded."""
    names, folder = ["llama", "gpt2"], str(tmp_path)
    expected = ranks(2).run(saved_by_torch, names, folder, timeout=2 * LIMIT_S)[0]
    for found in ranks(2).run(loaded_by_torch, names, folder, timeout=2 * LIMIT_S):
        assert found == expected
    others = [ranks(4).run(loaded_by_torch, names, folder, timeout=2 * LIMIT_S)[0]]
    others += [ranks(3).run(loaded_by_torch, names, folder, timeout=2 * LIMIT_S)[0]]
    others += [loaded_by_torch(names, folder, parallel=False)]
    for found in others:
        assert found["llama"] == pytest.approx(expected["llama"], rel=1e-6)
    assert others[0]["gpt2"] == pytest.approx(expected["gpt2"], rel=1e-10)
    for found in others[1:]:  # slots of a packed parameter belong to its parts
        assert "c_attn" in found["gpt2"], found
        assert found["gpt2 alone"] == pytest.approx(expected["gpt2"][:1], rel=1e-10)


def writes_as_a_trainer_does(name: str, folder: str) -> None:
    model: Any = parallel(name)
    given = zoo.inputs(name, torch.float32)
    model(**given)
    described = dict(vars(model.config))
    model.save_pretrained(f"{folder}/own")
    assert vars(model.config) == described
    model(**given)  # where rank 0's configuration has changed, it alone takes this for another kind of call
    model.save_pretrained(f"{folder}/given", state_dict=model.state_dict(), is_main_process=dist.get_rank() == 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "name"), [(2, "gpt2"), (3, "llama 10")])
def test_what_a_trainer_saves_is_what_transformers_loads(ranks: Pools, tmp_path: Path, world: int, name: str) -> None:
    ranks(world).run(writes_as_a_trainer_does, name, str(tmp_path), timeout=LIMIT_S)
    transformers = importlib.import_module("transformers")
    plain: Any = build(name)
    for folder in ("own", "given"):
        again, info = getattr(transformers, type(plain).__name__).from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not unlike(again.state_dict(), plain.state_dict())
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert again.config.architectures == [type(plain).__name__]


ALONE: dict[str, Callable[[nn.Module, str], Any]] = {
    "torch.save": lambda model, folder: torch.save(model.state_dict(), io.BytesIO()),
    "full_state_dict": lambda model, folder: tpk.full_state_dict(model, rank=0),
    "load": lambda model, folder: model.load_state_dict(zoo.mlp().state_dict()),
    "save_pretrained": lambda model, folder: tpk.save_pretrained(model, f"{folder}/pretrained"),
    "save_snapshot": lambda model, folder: tpk.save_snapshot(model, None, f"{folder}/snapshot"),
}


def alone(kind: str, late: bool, folder: str) -> tuple[str, str, float]:
    """What rank 0 is told that saves alone, and the others, which go on or come late; and after how many seconds."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model, given = tpk.parallelize(zoo.mlp().double(), group), zoo.inputs("mlp")
    model(**given)
    start = time.monotonic()
    try:
        if dist.get_rank() == 0:
            ALONE[kind](model, folder)
        else:
            time.sleep(3 if late else 0)
        for _ in range(2):
            model(**given)
        return "nothing", "", 0.0
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        dist.barrier()  # of the default group, which nobody has used


def alones(folder: str) -> dict[str, tuple[str, str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        # What speaks to all ranks of the job speaks to a model's group here, which has a short timeout.
        patch.setattr(huggingface_export.Ranks, "all", classmethod(lambda cls: cls.of(models[-1])))
        models: list[nn.Module] = []
        true = tpk.parallelize
        patch.setattr(tpk, "parallelize", lambda *args: models.append(true(*args)) or models[-1])
        cases = [(kind, False) for kind in ALONE] + [(kind, True) for kind in ("torch.save", "save_snapshot")]
        return {f"{kind} {late}": alone(kind, late, folder) for kind, late in cases}


@pytest.mark.slow("12 s of waiting")
def test_rank_0_that_saves_alone_is_told_who_is_missing_and_so_are_the_others(ranks: Pools, tmp_path: Path) -> None:
    kinds = ("GroupMismatch", "CollectiveTimeout", "PeerLost")
    first, other = ranks(2).run(alones, str(tmp_path), timeout=LIMIT_S)
    for case, (kind, text, seconds) in first.items():
        assert kind in kinds, (case, kind, text)
        assert "on every rank" in text and "rank(s) [1]" in text, (case, text)
        assert seconds < 6, (case, text, seconds)
    for case, (kind, text, seconds) in other.items():
        assert kind in (*kinds, "GroupPoisoned"), (case, kind, text)
        assert seconds < 10, (case, text)
    assert not any(tmp_path.iterdir())
