"""Fabric and Lightning's Trainer with our plans: as on one process; checkpoints; models without values."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.integrations import causal_models
from tests.integrations.curves import CLIP, Curve, Reference, adamw, batches, gradients_of, reference, weights_of
from tests.integrations.curves import train as plain_train
from tests.nn.reference import LIMIT_S, whole
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


@pytest.mark.parametrize(("world", "replicas", "name"), [(2, 1, "gpt2"), (4, 2, "llama"), (3, 1, "gpt2")])
def test_fabric_trains_and_goes_on_as_one_process_does(
    ranks: Pools, tmp_path: Path, world: int, replicas: int, name: str, full: bool
) -> None:
    if world > 2 and not full:
        pytest.skip("--full: more than two ranks")
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
    return found


def test_a_model_without_values_is_loaded_or_refused(ranks: Pools, tmp_path: Path) -> None:
    plain = causal_models.llama()
    plain.save_pretrained(tmp_path)
    ids = batches(1)[0]
    expected = float(plain(input_ids=ids, labels=ids).loss.detach())
    for found in ranks(2).run(empty, str(tmp_path), timeout=LIMIT_S):
        assert "has no values (empty_init=True)" in found["refused"]
        assert found["loaded"] == pytest.approx(expected, rel=1e-6)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, name: str, parallel: bool) -> None:
        super().__init__()
        self.model, self.parallel, self.losses, self.norms = MODELS[name](), parallel, [], []
        self.seen: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.parallel and not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            tpk_lightning.parallelize()(self.model, self.device_mesh)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = self.seen or gradients_of(self.model)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(whole(nn.utils.get_total_norm(grads))))

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


def in_trainer(name: str, folder: str, expected: Reference) -> dict[str, Any]:
    world = dist.get_world_size()
    with as_a_rank():
        curves = []
        for path, limit, resume in (("first", 3, None), ("rest", 6, f"{folder}/half.ckpt")):
            module = Module(name, parallel=True)
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=world,
                strategy=TrainerStrategy(data_parallel_size=1, tensor_parallel_size=world),
                max_steps=limit,
                gradient_clip_val=CLIP,
                logger=False,
                callbacks=[ModelCheckpoint(folder, "half", every_n_train_steps=3)],
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                default_root_dir=f"{folder}/{path}",
            )
            given = batches()[:3] if resume is None else batches()[3:]  # Lightning does not skip batches itself
            trainer.fit(module, torch.utils.data.DataLoader(given, batch_size=None), ckpt_path=resume)
            curves.append(Curve(module.losses, module.norms, module.seen, weights_of(module.model)))
    first, rest = curves
    both = Curve(first.losses + rest.losses, first.norms + rest.norms, first.gradients, rest.weights)
    return expected.wrong(both)


def test_lightnings_trainer_trains_and_goes_on_as_one_process_does(ranks: Pools, tmp_path: Path) -> None:
    expected = reference(MODELS["llama"](), run)
    assert ranks(2).run(in_trainer, "llama", str(tmp_path), expected, timeout=2 * LIMIT_S) == [{}, {}]
