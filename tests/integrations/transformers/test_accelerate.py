"""accelerate without Trainer: ``prepare`` of a parallel model, and what ``save_state`` writes of it and loads again."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.integrations import causal_models
from tests.integrations.curves import CLIP, Curve, Reference, adamw, batches, gradients_of, weights_of
from tests.kept_mesh import once_per_pool
from tests.nn.reference import LIMIT_S, tp_mesh, whole
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install --no-deps accelerate psutil")

import tpkernels.integrations.accelerate as tpk_accelerate
import tpkernels.integrations.transformers as tpk_transformers
from tests.integrations.transformers.running import on_cpu

pytestmark = pytest.mark.gloo

SIZES = {"n_layer": 1}
HALF = 3
ROWS = 4
"""Of each step, over all replicas."""
Loop = tuple[Any, Any, Any, Any, Any]


@dataclass(frozen=True)
class Layout:
    """How the ranks share a model."""

    replicas: int = 1
    shard: bool = False
    """Whether its parameters are cut over replicas, too."""
    micro: int = 1
    """Batches of each step."""

    def mesh(self) -> Any:
        return _meshes(self.replicas) if self.replicas > 1 else tp_mesh()


@once_per_pool
def _meshes(replicas: int) -> Any:
    return tpk.init(dp=replicas, tp=dist.get_world_size() // replicas)


def prepared(
    layout: Layout | None, dtype: torch.dtype = torch.float32, *, whole: bool = False, variation: str = ""
) -> Loop:
    """What ``prepare`` gives for a model, an optimizer, a scheduler and the batches; rows that are cut in two.

    ``whole``: its state is saved and loaded whole.
    """
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import TorchDynamoPlugin

    model = (causal_models.llama() if variation else causal_models.gpt2(**SIZES)).to(dtype)
    # By itself accelerate steps a scheduler once for each rank, whatever the ranks are.
    options: dict[str, Any] = {"cpu": True, "step_scheduler_with_optimizer": False}
    if variation == "bf16" and dtype != torch.float64:
        options["mixed_precision"] = "bf16"
    if variation == "compiled" and layout:  # the reference is as it is
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager", fullgraph=True)
    if variation == "checkpoints":
        model.gradient_checkpointing_enable()
    replicas, micro = (layout.replicas, layout.micro) if layout else (1, 1)
    options["gradient_accumulation_steps"] = micro
    if layout:
        mesh = layout.mesh()
        # Compiled as one graph, replicas are one unit of communication.
        units = () if variation == "compiled" else None
        model = tpk_transformers.prepare(model, mesh, shard=layout.shard, units=units)
        tp = dist.get_world_size() // replicas
        options["parallelism_config"] = ParallelismConfig(tp_size=tp, dp_shard_size=replicas)
    accelerator = Accelerator(**options)
    if whole:
        tpk_accelerate.save_whole(accelerator)
    optimizer = adamw(model.parameters(), 1e-2 if variation == "bf16" else 1e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
    data: Any = torch.cat(batches(rows=ROWS))
    rows = torch.utils.data.DataLoader(data, batch_size=ROWS // replicas // micro)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, rows))


def steps(loop: Loop, first: int = 0, last: int = 6) -> Curve:
    accelerator, model, optimizer, scheduler, rows = loop
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    curve, losses, micro = Curve(), [], accelerator.gradient_accumulation_steps
    for number, ids in enumerate(rows):
        if not first <= number // micro < last:
            continue
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if not accelerator.sync_gradients:
                continue
            curve.gradients = curve.gradients or gradients_of(plain)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        curve.losses.append(sum(losses) / micro)
        curve.norms.append(float(whole(norm)))
        losses.clear()
    curve.weights = weights_of(plain)
    return curve


def alone() -> Reference:
    with on_cpu():
        exact = steps(prepared(None, torch.float64))
    with on_cpu():
        return Reference.of(exact, steps(prepared(None)))


def as_accelerate_does(loop: Loop, folder: str) -> tuple[str, bool]:
    """What comes of ``save_state`` without our hooks: the error, and whether the other format holds parts alone."""
    accelerator = loop[0]
    with pytest.raises(RuntimeError) as caught:
        accelerator.save_state(f"{folder}/safe")
    accelerator.save_state(f"{folder}/pickled", safe_serialization=False)
    dist.barrier()
    held = torch.load(f"{folder}/pickled/pytorch_model.bin", weights_only=False)
    parts = [value for value in held.values() if isinstance(value, DTensor)]
    return str(caught.value), any(placement.is_shard() for part in parts for placement in part.placements)


def saved(folder: str, layout: Layout, expected: Reference) -> dict[str, Any]:
    with on_cpu():
        loop = prepared(layout)
        said = as_accelerate_does(loop, folder)
        accelerator, model, optimizer, *_ = loop
        tpk_accelerate.save_whole(accelerator)
        curve = steps(loop, last=HALF)
        state = {name: whole(value) for name, value in accelerator.get_state_dict(model).items()}
        plain = tpk.full_state_dict(model)
        same = state.keys() == plain.keys() and all(torch.equal(state[name], plain[name]) for name in plain)
        for number, safe in enumerate((True, False)):
            accelerator.save_state(f"{folder}/half-{number}", safe_serialization=safe)
        own = optimizer.state_dict()
        rest = steps(loop, HALF)
    both = Curve(curve.losses + rest.losses, curve.norms + rest.norms, curve.gradients, rest.weights)
    return {
        "said": said,
        "wrong": expected.wrong(both),
        "state": same,
        "own": all(isinstance(key, int) for key in own["state"]),
        "rest": rest,
    }


def goes_on(folder: str, number: int, layout: Layout | None) -> tuple[Curve, list[str]]:
    """The rest of the run in a model that began with other weights."""
    with on_cpu():
        loop = prepared(layout, whole=layout is not None)
        with torch.no_grad():
            for parameter in loop[1].parameters():
                parameter.mul_(0.5)
        if layout:
            before = weights_of(loop[1])
            for broken, words in (("empty", "optimizer.bin"), ("other", "lacks")):
                with pytest.raises(ValueError, match=words):
                    loop[0].load_state(f"{folder}/{broken}")
            assert all(torch.equal(before[name], weight) for name, weight in weights_of(loop[1]).items())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop[0].load_state(f"{folder}/half-{number}")
        return steps(loop, HALF), [str(one.message) for one in caught if "random_states" in str(one.message)]


def break_copies(folder: Path) -> None:
    """A folder without the state of an optimizer, and one with another's; the model's file is whole in both."""
    for name in ("empty", "other"):
        shutil.copytree(folder / "half-0", folder / name)
        (folder / name / "optimizer.bin").unlink()
    state = torch.load(folder / "half-0" / "optimizer.bin")
    state["state"].popitem()
    torch.save(state, folder / "other" / "optimizer.bin")


@pytest.mark.parametrize(
    ("world", "layout", "others"),
    [
        (2, Layout(), [(1, Layout())]),  # which accelerate by itself puts into DistributedDataParallel
        pytest.param(3, Layout(), [(2, Layout()), (4, Layout(2))], marks=pytest.mark.full("three ranks")),
        pytest.param(4, Layout(2, micro=2), [(3, Layout()), (4, Layout(2, True))], marks=pytest.mark.full("replicas")),
        pytest.param(4, Layout(2, True), [(4, Layout(2)), (1, Layout())], marks=pytest.mark.full("cut over replicas")),
    ],
)
def test_a_prepared_loop_is_right_and_its_state_is_saved_whole(
    ranks: Pools, tmp_path: Path, world: int, layout: Layout, others: list[tuple[int, Layout]], full: bool
) -> None:
    expected, folder = alone(), str(tmp_path)
    first, *_ = results = ranks(world).run(saved, folder, layout, expected, timeout=LIMIT_S)
    for found in results:
        assert found["wrong"] == {} and found["state"] and found["own"], found
        assert "data pointer" in found["said"][0] and found["said"][1], "accelerate by itself saves parts, or nothing"
    rest: Curve = first["rest"]
    break_copies(tmp_path)
    for number in (0, 1) if full else (0,):
        for again, _ in ranks(world).run(goes_on, folder, number, layout, timeout=LIMIT_S):
            assert again.losses == rest.losses and again.norms == rest.norms
            assert all(torch.equal(again.weights[name], weight) for name, weight in rest.weights.items())
    # One process, without us: the folder is accelerate's own.
    again, _ = goes_on(folder, 0, None)
    assert expected.wrong(Curve(again.losses, again.norms, {}, again.weights), first=HALF) == {}
    for ranks_now, other in others:
        for rank, (again, said) in enumerate(ranks(ranks_now).run(goes_on, folder, 0, other, timeout=LIMIT_S)):
            assert expected.wrong(Curve(again.losses, again.norms, {}, again.weights), first=HALF) == {}
            missing = [f"random_states_{rank}.pkl"] if rank >= world else []
            assert [one.partition(" ")[0] for one in said] == missing


LAYOUTS = ((2, Layout()), (3, Layout()), (4, Layout(2)))


def varied(variation: str, layout: Layout | None, dtype: torch.dtype = torch.float32) -> tuple[Curve, int]:
    """What the loop shows, with the losses of two held-out batches behind it, and how many graphs were compiled."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with on_cpu():
        loop = prepared(layout, dtype, variation=variation)
        curve = steps(loop)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        accelerator, model, *_ = loop
        held_out: Any = torch.cat(batches(8, rows=ROWS)[6:])
        rows = torch.utils.data.DataLoader(held_out, batch_size=ROWS // (layout.replicas if layout else 1))
        model.eval()
        with torch.no_grad():
            for ids in accelerator.prepare(rows):
                curve.evaluations.append(float(accelerator.reduce(model(input_ids=ids, labels=ids).loss, "mean")))
    return curve, graphs


@pytest.mark.full("under transformers' Trainer they run as well")
@pytest.mark.parametrize("variation", ["bf16", "checkpoints", "compiled"])
def test_variations_of_a_prepared_loop_train_as_on_one_process(ranks: Pools, variation: str) -> None:
    (exact, _), (plain, _) = (varied(variation, None, dtype) for dtype in (torch.float64, torch.float32))
    expected = Reference.of(exact, plain)
    assert len(exact.evaluations) == 2
    for world, layout in LAYOUTS:
        for found, graphs in ranks(world).run(varied, variation, layout, timeout=2 * LIMIT_S):
            assert expected.wrong(found) == {}, (world, layout)
            assert graphs == (variation == "compiled")


def refusals(folder: str) -> list[str]:
    said = []
    with on_cpu():
        accelerator = prepared(Layout(), whole=True)[0]
        with mock.patch.object(dist, "get_world_size", lambda: 4), pytest.raises(ValueError) as caught:
            accelerator.save_state(folder)
        said.append(str(caught.value))
        other = accelerator.prepare_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
        for break_it, mend in (
            (lambda: None, lambda: accelerator._optimizers.remove(other)),
            (lambda: accelerator._models.append(torch.nn.Linear(2, 2)), lambda: None),
            (lambda: accelerator._models.pop(0), lambda: None),
        ):
            break_it()
            with pytest.raises(ValueError) as caught:
                accelerator.save_state(folder)
            said.append(str(caught.value))
            mend()
        del accelerator._optimizers
        with pytest.raises(ValueError) as caught:
            tpk_accelerate.save_whole(accelerator)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_saved_whole_is_refused_before_anything_is_written(ranks: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    expected = [
        "a model that all 4 ranks share",
        "parameter",
        "one model, and this one has 2",
        "the Linear is not parallel",
        "Accelerator._optimizers",
    ]
    for said in ranks(2).run(refusals, str(folder), timeout=LIMIT_S):
        assert len(said) == len(expected) and all(part in one for part, one in zip(expected, said, strict=True)), said
    assert not list(folder.iterdir())
