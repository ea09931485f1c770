"""Fabric and Lightning's Trainer with our plans: as on one process; checkpoints; models without values."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.integrations import causal_models
from tests.integrations.counting import counted
from tests.integrations.curves import (
    CLIP,
    STEPS,
    Curve,
    Reference,
    adamw,
    batches,
    gradients_of,
    reference,
    step,
    weights_of,
)
from tests.integrations.curves import train as plain_train
from tests.nn.reference import LIMIT_S, tp_mesh, whole
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
lightning = pytest.importorskip("lightning", reason="the package lightning is missing: pip install lightning")

from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy  # noqa: E402

from tpkernels.integrations import lightning as tpk_lightning  # noqa: E402

pytestmark = pytest.mark.gloo

MODELS: dict[str, Callable[[], Any]] = {"llama": causal_models.llama, "gpt2": causal_models.gpt2}


@contextlib.contextmanager
def as_a_rank() -> Iterator[None]:
    """What torchrun would have told Lightning."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    told = {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, told), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fabric(fn: Any, replicas: int = 1) -> Any:
    world = dist.get_world_size()
    strategy = FabricStrategy(fn, data_parallel_size=replicas, tensor_parallel_size=world // replicas)
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    made.launch()
    return made


def mine(ids: Tensor, replicas: int) -> Tensor:
    return ids.chunk(replicas)[dist.get_rank() * replicas // dist.get_world_size()]


def steps(made: Any, model: Any, optimizer: Any, given: list[Tensor], replicas: int) -> Curve:
    curve = Curve()
    for ids in given:
        part = mine(ids, replicas)
        loss = model(input_ids=part, labels=part).loss
        made.backward(loss)
        curve.gradients = curve.gradients or gradients_of(model.module)
        norm = made.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        curve.losses.append(float(mean) / dist.get_world_size())
        curve.norms.append(float(whole(norm)))
    curve.weights = weights_of(model.module)
    return curve


def in_fabric(name: str, replicas: int, folder: str, expected: Reference, shard: bool) -> dict[str, Any]:
    """Six steps; a checkpoint after three, and the rest again from it, in a model that began with other weights."""
    with as_a_rank():
        made = fabric(tpk_lightning.parallelize(shard=shard), replicas)
        model = made.setup_module(MODELS[name]())
        optimizer = made.setup_optimizers(adamw(model.parameters()))
        given = batches()
        first = steps(made, model, optimizer, given[:3], replicas)
        made.save(folder, {"model": model, "optimizer": optimizer})
        rest = steps(made, model, optimizer, given[3:], replicas)
        other = made.setup_module(MODELS[name]())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        fresh = made.setup_optimizers(adamw(other.parameters()))
        made.load(folder, {"model": other, "optimizer": fresh})
        again = steps(made, other, fresh, given[3:], replicas)
    whole_run = Curve(first.losses + rest.losses, first.norms + rest.norms, first.gradients, rest.weights)
    same = all(torch.equal(again.weights[key], weight) for key, weight in rest.weights.items())
    return {"wrong": expected.wrong(whole_run), "again": same and again.losses == rest.losses}


def run(model: nn.Module) -> Curve:
    return plain_train(model, batches())


@pytest.mark.full("Lightning's Trainer runs the same strategy, and the page runs Fabric")
@pytest.mark.parametrize(("world", "replicas", "name"), [(2, 1, "gpt2"), (4, 2, "llama"), (3, 1, "gpt2")])
def test_fabric_trains_and_goes_on_as_one_process_does(
    ranks: Pools, tmp_path: Path, world: int, replicas: int, name: str
) -> None:
    expected = reference(MODELS[name](), run)
    arguments = (name, replicas, str(tmp_path / "checkpoint"), expected, True)
    for found in ranks(world).run(in_fabric, *arguments, timeout=2 * LIMIT_S):
        assert found == {"wrong": {}, "again": True}


def empty(folder: str) -> dict[str, Any]:
    """Models without values: refused, loaded, and as Lightning would leave them."""
    ids, found = batches(1)[0], {}
    with as_a_rank():
        for key, fn in (
            ("refused", tpk_lightning.parallelize()),
            ("loaded", tpk_lightning.parallelize(checkpoint=folder)),
        ):
            made = fabric(fn)
            with made.init_module(empty_init=True):
                model = causal_models.bare_llama()
            try:
                model = made.setup_module(model)
                found[key] = float(model(input_ids=ids, labels=ids).loss.detach())
            except ValueError as error:
                found[key] = str(error)
    hooked = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError) as caught:
        tpk_lightning.parallelize(strict=True)(hooked, tp_mesh())
    return {**found, "whole": str(caught.value)}


def test_a_model_without_values_is_loaded_or_refused(ranks: Pools, tmp_path: Path) -> None:
    plain = causal_models.llama()
    plain.save_pretrained(tmp_path)
    ids = batches(1)[0]
    expected = reference(plain, partial(step, ids=ids))
    for found in ranks(2).run(empty, str(tmp_path), timeout=LIMIT_S):
        assert "has no values (empty_init=True)" in found["refused"]
        assert expected.right(found["loaded"])
        assert found["whole"].startswith("0 does not run an op of tpkernels, each rank does all of its work: ")


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(
        self, name: str, replicas: int, *, compiled: bool = False, checkpoints: bool = False, eps: float = 1e-4
    ) -> None:
        super().__init__()
        self.compiled, self.checkpoints, self.eps = compiled, checkpoints, eps
        self.model, self.replicas, self.losses, self.norms = MODELS[name](), replicas, [], []
        self.evaluations: list[float] = []
        self.seen: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.replicas and not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            # Compiled as one graph, replicas are one unit of communication.
            units = () if self.compiled else None
            tpk_lightning.parallelize(units=units)(self.model, self.device_mesh)
        if self.checkpoints:
            self.model.gradient_checkpointing_enable()
        if self.compiled and self.replicas:  # the reference is as it is
            self.model.compile(backend="aot_eager", fullgraph=True)

    def loss_of(self, batch: Tensor) -> tuple[Tensor, float]:
        """Of the rows that are this replica's, and the mean over all."""
        part = mine(batch, self.replicas) if self.replicas else batch
        loss = self.model(input_ids=part, labels=part).loss
        mean = loss.detach().clone()
        if self.replicas:
            dist.all_reduce(mean)
        return loss, float(mean) / (dist.get_world_size() if self.replicas else 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss, mean = self.loss_of(batch)
        self.losses.append(mean)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        _, mean = self.loss_of(batch)
        self.evaluations.append(mean)
        self.log("evaluation", mean)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = self.seen or gradients_of(self.model)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(whole(nn.utils.get_total_norm(grads))))

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters(), self.eps)


def fit(
    module: Module,
    folder: str,
    limit: int,
    resume: str | None,
    callbacks: Sequence[Any] = (),
    given: Sequence[Tensor] = (),
    single: bool = False,
    held_out: Sequence[Tensor] = (),
    **more: Any,
) -> Any:
    options: dict[str, Any] = {"devices": 1, **more}
    if module.replicas:
        world = dist.get_world_size()
        sizes = {"data_parallel_size": module.replicas, "tensor_parallel_size": world // module.replicas}
        strategy = TrainerStrategy(**sizes, save_distributed_checkpoint=not single)
        options |= {"devices": world, "strategy": strategy, "use_distributed_sampler": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=limit,
        gradient_clip_val=CLIP,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    # Lightning does not skip batches itself.
    given = given or (batches()[:3] if resume is None else batches()[3:])
    loaders = [torch.utils.data.DataLoader(rows, batch_size=None) for rows in (given, held_out) if rows]
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer


def joined(first: Module, rest: Module) -> Curve:
    return Curve(first.losses + rest.losses, first.norms + rest.norms, first.seen, weights_of(rest.model))


def in_trainer(name: str, folder: str, expected: Reference, replicas: int) -> tuple[dict[str, Any], dict[str, int]]:
    """What is wrong, and how often each of our ops was called."""
    with as_a_rank(), counted() as counts:
        first, rest = Module(name, replicas), Module(name, replicas)
        callback = ModelCheckpoint(folder, "half", every_n_train_steps=3)
        fit(first, f"{folder}/first", 3, None, [callback])
        fit(rest, f"{folder}/rest", 6, f"{folder}/half.ckpt")
    return expected.wrong(joined(first, rest)), dict(counts)


@pytest.mark.parametrize(
    ("world", "replicas"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.full("more than two ranks")),
        pytest.param(4, 2, marks=pytest.mark.full("more than two ranks")),
    ],
)
@pytest.mark.slow("6 s")
def test_lightnings_trainer_trains_and_goes_on_as_one_process_does(
    ranks: Pools, tmp_path: Path, world: int, replicas: int
) -> None:
    expected = reference(MODELS["llama"](), run)
    results = ranks(world).run(in_trainer, "llama", str(tmp_path), expected, replicas, timeout=2 * LIMIT_S)
    # In each of two layers an op for query, key and value, one for gate and up, and two rows; the head; the table.
    counts = {name: STEPS * count for name, count in (("copy_matmul", 5), ("matmul_all_reduce", 4), ("all_reduce", 1))}
    assert results == [({}, counts)] * world


def half(name: str, folder: str) -> dict[str, Tensor]:
    """Writes a checkpoint after three steps; returns the weights that it must have."""
    module = Module(name, 1)
    with as_a_rank():
        fit(module, f"{folder}/first", 3, None, [ModelCheckpoint(folder, "half", every_n_train_steps=3)])
    return weights_of(module.model)


def single_file(folder: str) -> str:
    with as_a_rank(), pytest.raises(ValueError) as caught:
        fit(Module("gpt2", 1), folder, 1, None, [ModelCheckpoint(folder, "single", every_n_train_steps=1)], single=True)
    return str(caught.value)


def rest(name: str, folder: str, expected: Reference, replicas: int) -> dict[str, float]:
    module = Module(name, replicas)
    with as_a_rank():
        fit(module, f"{folder}/rest-{dist.get_world_size()}", 6, f"{folder}/half.ckpt")
    return expected.wrong(Curve(module.losses, module.norms, {}, weights_of(module.model)), first=3)


@pytest.mark.full("checkpoints of transformers' Trainer go on so in the quick run")
@pytest.mark.parametrize(("name", "worlds"), [("llama", (3,)), ("gpt2", (1, 3))])
def test_a_checkpoint_goes_on_at_another_number_of_ranks_and_is_the_unsharded_model(
    ranks: Pools, tmp_path: Path, name: str, worlds: tuple[int, ...]
) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    folder = str(tmp_path)
    weights = ranks(2).run(half, name, folder, timeout=LIMIT_S)[0]
    plain = Module(name, 0)
    plain.load_state_dict(_load_distributed_checkpoint(tmp_path / "half.ckpt")["state_dict"])  # Lightning alone
    assert all(torch.equal(value, weights[key].view_as(value)) for key, value in plain.model.named_parameters())
    expected = reference(MODELS[name](), run)
    for world in worlds:
        assert ranks(world).run(rest, name, folder, expected, 1, timeout=LIMIT_S) == [{}] * world
    for said in ranks(2).run(single_file, folder, timeout=LIMIT_S) if name == "gpt2" else ():
        assert "leave save_distributed_checkpoint=True" in said


def after_fit(folder: str, replicas: int, dtype: torch.dtype = torch.float32) -> Curve:
    """What goes on from the checkpoint that ``save_checkpoint`` writes when ``fit`` has returned."""
    first, rest = Module("llama", replicas).to(dtype), Module("llama", replicas).to(dtype)
    with as_a_rank() if replicas else contextlib.nullcontext():
        fit(first, folder, 3, None).save_checkpoint(f"{folder}/after.ckpt")
        fit(rest, folder, 6, f"{folder}/after.ckpt")
    return joined(first, rest)


@pytest.mark.full("a variation")
def test_what_is_saved_after_fit_goes_on_as_lightning_does(ranks: Pools, tmp_path: Path) -> None:
    """Lightning itself then finishes the last epoch again, with one batch, before it begins anew."""
    exact, plain = (after_fit(str(tmp_path / str(dtype)), 0, dtype) for dtype in (torch.float64, torch.float32))
    expected = Reference.of(exact, plain)
    for found in ranks(2).run(after_fit, str(tmp_path / "parallel"), 1, timeout=2 * LIMIT_S):
        assert expected.wrong(found) == {}


MICRO = 2
LAYOUTS = ((2, 1), (3, 1), (4, 2))
"""Ranks, and how many replicas they make."""
VARIATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro-batches": ({}, {"accumulate_grad_batches": MICRO}),
    "checkpoints": ({"checkpoints": True}, {}),
    "compiled": ({"compiled": True}, {}),
    "bf16": ({"eps": 1e-2}, {"precision": "bf16-mixed"}),
    "evaluation": ({}, {"val_check_interval": 3, "num_sanity_val_steps": 0}),
}
"""What the module is told, and what Lightning's Trainer is."""


def varied(folder: str, variation: str, replicas: int, dtype: torch.dtype = torch.float32) -> tuple[Curve, int]:
    """What a run shows, and how many graphs were compiled for it."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    options, trainer = VARIATIONS[variation]
    module, callbacks, held_out = Module("llama", replicas, **options).to(dtype), [], ()
    if dtype == torch.float64:
        trainer = {key: value for key, value in trainer.items() if key != "precision"}
    if variation == "evaluation":
        callbacks = [ModelCheckpoint(folder, "best", monitor="evaluation", mode="max")]  # of the two, the first
        held_out = batches(8)[6:]
    given = batches(6 * trainer.get("accumulate_grad_batches", 1))
    with as_a_rank() if replicas else contextlib.nullcontext():
        ran = fit(module, folder, 6, None, callbacks, given, held_out=held_out, **trainer)
        weights = weights_of(module.model)
        if callbacks:
            rows = torch.utils.data.DataLoader(held_out, batch_size=None)
            ran.validate(module, rows, ckpt_path="best", verbose=False)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    return Curve(module.losses, module.norms, module.seen, weights, module.evaluations), graphs


@pytest.mark.full("micro-batches, evaluation and compiled models run under transformers' Trainer as well")
@pytest.mark.parametrize("variation", VARIATIONS)
def test_lightnings_variations_train_as_on_one_process(ranks: Pools, tmp_path: Path, variation: str) -> None:
    dtypes = torch.float64, torch.float32
    (exact, _), (plain, _) = (varied(str(tmp_path / str(dtype)), variation, 0, dtype) for dtype in dtypes)
    expected = Reference.of(exact, plain)
    evaluations = exact.evaluations
    assert len(evaluations) == (6 if variation == "evaluation" else 0) and evaluations[4:] == evaluations[:2]
    for world, replicas in LAYOUTS:
        folder = str(tmp_path / f"{world}")
        for found, graphs in ranks(world).run(varied, folder, variation, replicas, timeout=2 * LIMIT_S):
            assert expected.wrong(found) == {}, (world, replicas)
            assert (len(found.losses), len(found.norms)) == (MICRO * 6 if variation == "micro-batches" else 6, 6)
            assert found.evaluations[4:] == found.evaluations[:2], "the best checkpoint is what was evaluated"
            assert graphs == (variation == "compiled")


def test_the_first_name_of_lightning_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpk_lightning.first_missing() is None
    strategy = "lightning.pytorch.strategies.model_parallel.ModelParallelStrategy"
    for there, said in (
        (SimpleNamespace(load_checkpoint=None), r"lightning\.pytorch has no .*ModelParallelStrategy\.optimizer_state"),
        (None, r"lightning\.pytorch has no .*ModelParallelStrategy: this integration was tested with"),
    ):
        if there is None:
            monkeypatch.delattr(strategy)
        else:
            monkeypatch.setattr(strategy, there)
        with pytest.raises(ValueError, match=said):
            tpk_lightning.parallelize()(nn.Linear(2, 2), None)  # type: ignore[arg-type]
