"""Snapshots: what 4 ranks saved goes on, bit by bit, on 2, 3 and 1; damage and strangers are refused on every rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import pieces_of
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tests.state.forged import FORGED
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo


class Rows(torch.optim.Optimizer):
    """Has a slot that is not shaped like its parameter, made as torch's optimizers make those."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p].setdefault("rows", p.grad.new_zeros((*p.shape[:-1], 1)))
                self.state[p]["decay"] = 0.5
                p.add_(p.grad, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "rows": lambda p: Rows(p, 0.01),
}


def trained(name: str, optimizer: str, steps: int = 2, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An unsharded model after a few steps: the same bits in every process."""
    plain = zoo.build(name, torch.float32, **changes).train()
    made = OPTIMIZERS[optimizer](plain.parameters())
    given = zoo.inputs(name, torch.float32)
    for _ in range(steps):
        made.zero_grad()
        zoo.output(plain(**given)).square().mean().backward()
        made.step()
    return plain, made


def pairs(model: nn.Module, plain: nn.Module) -> list[tuple[Tensor, DTensor, Callable[[Tensor], Tensor]]]:
    """Parameter of the plain model, one that it became, and what cuts this rank's piece of that out of a whole."""
    found = []
    for name, parameter in plain.named_parameters():
        pieces = pieces_of(model, name, parameter)
        assert pieces, name
        found += [(parameter, part, place) for part, place in pieces]
    return found


def saves(name: str, optimizer: str, folder: str, changes: dict[str, Any]) -> None:
    """A run whose parameters, slots and options are those of an unsharded one, cut by the test itself."""
    plain, theirs = trained(name, optimizer, **changes)
    model, _ = trained(name, optimizer, **changes)
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh()))
    mine = OPTIMIZERS[optimizer](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    mine.step()
    for parameter, part, place in pairs(model, plain):
        part.to_local().data.copy_(place(parameter))
        for slot, value in mine.state[part].items():
            other = theirs.state[parameter][slot]
            if isinstance(value, DTensor) and value.shape == part.shape:
                value.to_local().copy_(place(other))
            elif isinstance(value, DTensor):
                value.to_local().fill_(7.0)
            elif isinstance(value, Tensor):
                value.fill_(float(other))
    mine.param_groups[0]["lr"] = 0.125
    tpk.save_snapshot(model, mine, folder, extra={"step": 2, "name": name})


def loads(name: str, optimizer: str, folder: str, changes: dict[str, Any]) -> list[str]:
    """What is not, bit by bit, this rank's part of the unsharded run."""
    plain, theirs = trained(name, optimizer, **changes)
    model = zoo.build(name, torch.float32, **changes).train()
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh()))
    mine = OPTIMIZERS[optimizer](model.parameters())
    extra = tpk.load_snapshot(model, mine, folder)
    wrong = [] if extra == {"step": 2, "name": name} else [f"extra is {extra}"]
    if mine.param_groups[0]["lr"] != 0.125:
        wrong.append(f"lr is {mine.param_groups[0]['lr']}")
    for key, (parameter, part, place) in enumerate(pairs(model, plain)):
        if not torch.equal(part.to_local(), place(parameter)):
            wrong.append(f"parameter {key} {tuple(parameter.shape)}")
        if mine.state[part].keys() != theirs.state[parameter].keys():
            wrong.append(f"parameter {key} has slots {list(mine.state[part])}")
        for slot, value in mine.state[part].items():
            other = theirs.state[parameter][slot]
            if isinstance(value, DTensor) and value.shape == part.shape:
                same = torch.equal(value.to_local(), place(other))
                same = same and value.to_local().shape == part.to_local().shape
            elif isinstance(value, DTensor):
                same = bool((value.to_local() == 7.0).all())
            else:
                same = float(value) == float(other)
            if not same:
                wrong.append(f"{slot} of parameter {key} {tuple(parameter.shape)}")
    for key, buffer in plain.state_dict().items():
        held = model.state_dict().get(key)
        if held is not None and not isinstance(held, DTensor) and not torch.equal(held, buffer):
            wrong.append(f"buffer {key}")
    given = zoo.inputs(name, torch.float32)
    zoo.output(model(**given)).square().mean().backward()
    mine.step()
    return wrong


RUNS = [
    ("gpt2 10", "adamw", {"n_layer": 1}),
    ("mistral 10", "sgd", {"num_hidden_layers": 1}),
    ("conv_lstm", "rows", {}),
]
"""Ten heads are 3, 3, 3 and 1 when they are saved, then 5 and 5, 4, 4 and 2, and all of them."""
MORE = [
    ("gpt2", "adamw", {}),
    ("mistral", "sgd", {}),
    ("bert 10", "fused", {}),
    ("transformer", "adamw", {}),
    ("transformer 10", "adamw", {}),
    ("t5 10", "fused", {}),
    ("nested", "sgd", {}),
]


def many_save(runs: list[tuple[Any, ...]], folder: str) -> None:
    for index, (name, optimizer, changes) in enumerate(runs):
        saves(name, optimizer, f"{folder}/{index}", changes)


def many_load(runs: list[tuple[Any, ...]], folder: str) -> list[list[str]]:
    return [
        loads(name, optimizer, f"{folder}/{index}", changes) for index, (name, optimizer, changes) in enumerate(runs)
    ]


@pytest.mark.slow("8 s")
def test_a_snapshot_of_4_ranks_goes_on_at_2_3_and_1(ranks: Pools, tmp_path: Path, full: bool) -> None:
    runs = RUNS + MORE if full else RUNS[:2]
    ranks(4).run(many_save, runs, str(tmp_path), timeout=2 * LIMIT_S)
    for world in (2, 3, 1) if full else (3,):
        for wrong in ranks(world).run(many_load, runs, str(tmp_path), timeout=2 * LIMIT_S):
            assert not any(wrong), (world, wrong)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unfinished": (lambda f: (f / "snapshot.json").unlink(), "was not finished"),
    "edited": (lambda f: edit(f / "snapshot.json"), "do not match its digest"),
    "half": (lambda f: cut(f / "snapshot.json"), "is not JSON, or was cut off"),
    "flipped": (lambda f: flip(sorted(f.glob("*.safetensors"))[1]), "files in .* were changed or damaged"),
    "cut off": (lambda f: cut(sorted(f.glob("*.safetensors"))[0]), "is damaged or was cut off"),
    "a file gone": (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "one of them is missing"),
    "nowhere": (shutil.rmtree, "there is no snapshot.json"),
}


def edit(path: Path) -> None:
    document = json.loads(path.read_text())
    document["snapshot"]["optimizer"]["groups"][0]["lr"] = 1e9
    path.write_text(json.dumps(document))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE |= FORGED


def run_of(name: str, kind: str = "adamw", groups: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parallel model, and an optimizer that has made a step."""
    model = tpk.parallelize(zoo.build(name, torch.float32), tp_mesh())
    parameters = list(model.parameters())
    made = OPTIMIZERS[kind]([{"params": parameters[start::groups]} for start in range(groups)])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return model, made


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all that a load may change."""
    held = list(model.state_dict().values())
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, Tensor)]
    held.append(torch.tensor([group["lr"] for group in optimizer.param_groups]))
    return [(value.to_local() if isinstance(value, DTensor) else value).clone() for value in held]


def bad_snapshots(folder: str) -> dict[str, tuple[str, bool]]:
    model, optimizer = run_of("mlp")
    tpk.save_snapshot(model, optimizer, f"{folder}/good")
    if torch.distributed.get_rank() == 0:
        for kind, (damage, _) in DAMAGE.items():
            shutil.copytree(f"{folder}/good", f"{folder}/{kind}")
            damage(Path(folder, kind))
    torch.distributed.barrier()
    optimizer.step()
    said: dict[str, tuple[str, bool]] = {}

    def attempt(kind: str, call: Callable[[], Any]) -> None:
        before = bits(model, optimizer)
        try:
            call()
            text = "nothing"
        except ValueError as error:
            text = str(error)
        said[kind] = text, all(torch.equal(a, b) for a, b in zip(bits(model, optimizer), before, strict=True))

    for kind in DAMAGE:
        attempt(kind, lambda where=f"{folder}/{kind}": tpk.load_snapshot(model, optimizer, where))  # type: ignore[misc]
    attempt("used", lambda: tpk.save_snapshot(model, optimizer, f"{folder}/good"))
    attempt("extra", lambda: tpk.save_snapshot(model, optimizer, f"{folder}/new", extra=model))
    attempt("stranger", lambda: tpk.save_snapshot(model, run_of("mlp")[1], f"{folder}/new"))
    others = [run_of("nested"), (model, OPTIMIZERS["sgd"](model.parameters())), run_of("mlp", groups=2)]
    for kind, other in zip(("model", "kind", "groups"), others, strict=True):
        attempt(kind, lambda run=other: tpk.load_snapshot(*run, f"{folder}/good"))  # type: ignore[misc]
    mine = f"{folder}/{'good' if torch.distributed.get_rank() else 'nowhere'}"
    attempt("one rank", lambda: tpk.load_snapshot(model, optimizer, mine))
    attempt("good", lambda: tpk.load_snapshot(model, optimizer, f"{folder}/good"))
    return said


def test_a_damaged_snapshot_or_a_strangers_is_refused_on_every_rank_and_changes_nothing(
    ranks: Pools, tmp_path: Path
) -> None:
    expected = {kind: text for kind, (_, text) in DAMAGE.items()} | {
        "used": "is in use",
        "extra": "what JSON can say",
        "stranger": "is not the model's",
        "model": "of another model: it lacks",
        "kind": "the state of AdamW, the optimizer is SGD",
        "groups": "groups have other parameters",
        "one rank": "rank 0: there is no snapshot.json",
    }
    for said in ranks(2).run(bad_snapshots, str(tmp_path), timeout=LIMIT_S):
        assert said.pop("good") == ("nothing", False), "the good one loads, and that shows"
        assert said.keys() == expected.keys()
        for kind, (text, untouched) in said.items():
            assert untouched, kind
            with pytest.raises(ValueError, match=expected[kind]):
                raise ValueError(text)


def by_heads(folder: str) -> tuple[Any, ...]:
    """Ten heads, and an optimizer whose slots are not shaped like their parameters: what is said, what changes."""
    model, given = zoo.build("attention 10", torch.float32), zoo.inputs("attention 10", torch.float32)
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh(), example_inputs=given))
    optimizer = OPTIMIZERS["rows"](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if torch.distributed.get_world_size() == 2:  # five heads on each
        tpk.save_snapshot(model, optimizer, f"{folder}/two")
        return ()
    before, said = bits(model, optimizer), []
    for call in (
        lambda: tpk.save_snapshot(model, optimizer, f"{folder}/three"),
        lambda: tpk.load_snapshot(model, optimizer, f"{folder}/two"),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        said.append(str(caught.value))
    same = all(torch.equal(a, b) for a, b in zip(bits(model, optimizer), before, strict=True))
    return *said, same, Path(f"{folder}/three").exists()


def test_slots_of_another_shape_go_nowhere_where_heads_do_not_divide(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(by_heads, str(tmp_path), timeout=LIMIT_S)
    for saving, loading, same, written in ranks(3).run(by_heads, str(tmp_path), timeout=LIMIT_S):
        assert "rows of qkv.weight is not shaped like its parameter" in saving and "by heads that do not" in saving
        assert "rows of qkv.weight" in loading, loading
        assert same and not written
