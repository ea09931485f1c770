"""torchtitan 0.2: its Trainer with our train spec, on Llama 3, as on one process."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from tests.integrations.counting import counted
from tests.integrations.curves import CLIP, STEPS, Curve, Reference, gradients_of, weights_of
from tests.integrations.torchtitan.stand_ins import exactly, on_cpu, without_unused
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("torchtitan", reason="torchtitan is missing: pip install --no-deps torchtitan spmd_types, and tyro")

with without_unused():
    from torchtitan.components import validate
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import JobConfig
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.protocols import train_spec as specs
    from torchtitan.train import Trainer

    from tpkernels.integrations import torchtitan_02 as tpk_torchtitan

pytestmark = pytest.mark.gloo

LENGTH, ROWS, HELD_OUT, VOCABULARY = 12, 4, 2, 67
DIVISION = "torchtitan.models.llama3.infra.parallelize.disable_fsdp_gradient_division"


class Batches:
    """A replica's rows of the same batches, whatever the number of replicas."""

    def __init__(self, dp_world_size: int, dp_rank: int, micro: int, first: int = 0) -> None:
        self.replicas, self.replica, self.micro, self.step = dp_world_size, dp_rank, micro, first

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.step)
            ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[0, : self.step] = -100  # replicas have different numbers of tokens
            self.step += 1
            mine = (whole.chunk(self.replicas)[self.replica].chunk(self.micro) for whole in (ids, labels))
            for rows, of_rows in zip(*mine, strict=True):
                yield {"input": rows[:, :-1]}, of_rows

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@dataclass(frozen=True)
class Way:
    """How torchtitan's trainer is told to run."""

    replicas: int = 1
    heads: int = 4
    ours: bool = True
    dtype: str = "float32"
    computes_in: str = "float32"
    eps: float = 1e-4
    compiled: bool = False
    checkpoints: bool = False
    micro: int = 1
    evaluated_every: int = 0
    """So many steps, and behind the first one."""
    saved_at: int = 0

    def sizes(self) -> TransformerModelArgs:
        """Two heads share a key; features and vocabulary do not divide."""
        heads = {"n_heads": self.heads, "n_kv_heads": self.heads // 2}
        return TransformerModelArgs(dim=8 * self.heads, n_layers=2, vocab_size=VOCABULARY, multiple_of=25, **heads)


def spec_of(way: Way) -> Any:
    base = specs.get_train_spec(tpk_torchtitan.NAME if way.ours else "llama3")

    def batches(dp_world_size: int, dp_rank: int, **_: Any) -> Batches:
        return Batches(dp_world_size, dp_rank, way.micro)

    return replace(base, model_args={"small": way.sizes()}, build_tokenizer_fn=None, build_dataloader_fn=batches)


def configuration(folder: str, way: Way) -> JobConfig:
    told = JobConfig()
    told.job.dump_folder = folder
    told.model.name, told.model.flavor = tpk_torchtitan.NAME if way.ours else "llama3", "small"
    told.optimizer.lr, told.optimizer.eps, told.optimizer.implementation = 3e-3, way.eps, "for-loop"
    told.lr_scheduler.warmup_steps, told.metrics.log_freq = 2, 1
    told.training.local_batch_size, told.training.global_batch_size = ROWS // way.replicas // way.micro, ROWS
    told.training.seq_len, told.training.max_norm, told.training.steps = LENGTH, CLIP, STEPS
    told.training.dtype = told.training.mixed_precision_reduce = way.dtype
    told.training.mixed_precision_param = way.computes_in if way.dtype == "float32" else way.dtype
    told.parallelism.tensor_parallel_degree = dist.get_world_size() // way.replicas
    told.parallelism.data_parallel_shard_degree = way.replicas
    told.compile.enable, told.compile.components, told.compile.backend = way.compiled, ["model"], "aot_eager"
    told.activation_checkpoint.mode = "full" if way.checkpoints else "none"
    told.validation.enable, told.validation.freq = bool(way.evaluated_every), way.evaluated_every or STEPS
    told.validation.steps, told.validation.seq_len = HELD_OUT, LENGTH
    told.validation.local_batch_size = ROWS // way.replicas
    told.checkpoint.enable, told.checkpoint.interval = bool(way.saved_at), way.saved_at or STEPS
    told.checkpoint.last_save_model_only = False
    return told


def plain_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what compiled and recomputed blocks add."""
    wraps = ("_orig_mod.", "_checkpoint_wrapped_module.")
    return {name.replace(wraps[0], "").replace(wraps[1], ""): value for name, value in values.items()}


def run(folder: str, way: Way) -> Curve:
    """torchtitan's own loop on all ranks, from the weights of one seed or from the checkpoint in ``folder``."""
    curve = Curve()

    def log(self: Any, step: int, loss: float, maximum: float, norm: float, **_: Any) -> None:
        curve.losses.append(loss)
        curve.norms.append(norm)

    def log_evaluation(self: Any, loss: float, step: int) -> None:
        assert not model.training
        curve.evaluations.append(loss)

    def held_out(*, dp_world_size: int, dp_rank: int, **_: Any) -> Batches:
        return Batches(dp_world_size, dp_rank, 1, first=STEPS)

    clip = distributed.clip_grad_norm_

    def clipped(parameters: Any, *given: Any, **named: Any) -> Any:
        curve.gradients = curve.gradients or plain_names(gradients_of(model))
        return clip(parameters, *given, **named)

    torch.manual_seed(0)
    plain = Transformer(way.sizes())
    with torch.no_grad():
        plain.init_weights()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of autocast, which torchtitan asks for in fp32
        stack.enter_context(on_cpu(distributed, DIVISION))
        stack.enter_context(exactly(way.dtype == "float64"))
        spec = spec_of(way)
        stack.enter_context(mock.patch.object(specs, "get_train_spec", lambda name: spec))
        stack.enter_context(mock.patch.object(validate, "build_text_validation_dataloader", held_out))
        trainer = Trainer(configuration(folder, way))
        (model,) = trainer.model_parts
        with torch.no_grad():
            for held, given in zip(model.parameters(), plain.parameters(), strict=True):
                given = given.to(held.dtype)
                if hasattr(held, "placements"):
                    given = distribute_tensor(given, held.device_mesh, held.placements, src_data_rank=None)
                held.copy_(given)
        stack.enter_context(mock.patch.object(MetricsProcessor, "log", log))
        stack.enter_context(mock.patch.object(MetricsProcessor, "log_validation", log_evaluation))
        stack.enter_context(mock.patch.object(distributed, "clip_grad_norm_", clipped))
        trainer.train()
        trainer.close()
    curve.weights = plain_names(weights_of(model))
    return curve


def reference(ranks: Pools, folder: str, way: Way) -> Reference:
    """torchtitan's own model in one process, in fp64 and as it is.

    In bf16 the second one of replicas runs on two ranks, with the replicas of torchtitan, which compute in bf16
    throughout: without them it runs under autocast, which leaves what is between linear layers in fp32.
    """
    plain, world = replace(way, replicas=1, ours=False, compiled=False), 1
    (exact,) = ranks(1).run(run, folder, replace(plain, dtype="float64"), timeout=LIMIT_S)
    if way.computes_in == "bfloat16" and way.replicas > 1:
        plain, world = replace(plain, replicas=2), 2
    return Reference.of(exact, ranks(world).run(run, folder, plain, timeout=LIMIT_S)[0])


def trained(folder: str, way: Way, expected: Reference) -> tuple[dict[str, float], dict[str, int], int]:
    """What is wrong, how often each op was called, and how many graphs were compiled."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with contextlib.nullcontext({}) if way.compiled else counted() as counts:
        curve = run(folder, way)
    return expected.wrong(curve), dict(counts), torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


VARIATIONS = {
    "evaluation": Way(evaluated_every=STEPS // 2),
    "bf16": Way(computes_in="bfloat16", eps=1e-2),
    "micro-batches, recomputed": Way(micro=2, checkpoints=True),
    "compiled blocks": Way(compiled=True),
}
PLACES = {2: {}, 3: {"heads": 6}, 4: {"replicas": 2}}
"""By the number of ranks, of which four are two replicas."""


@pytest.mark.parametrize(
    ("world", "way"),
    [
        (2, Way()),
        pytest.param(3, Way(heads=6), marks=pytest.mark.full("three ranks")),
        pytest.param(4, Way(2), marks=pytest.mark.full("two replicas of two ranks")),
        *(
            pytest.param(world, replace(way, **changes), marks=pytest.mark.full(variation))
            for variation, way in VARIATIONS.items()
            for world, changes in PLACES.items()
        ),
    ],
)
def test_the_trainer_with_our_train_spec_is_as_exact_as_one_process(
    ranks: Pools, tmp_path: Path, world: int, way: Way
) -> None:
    folder = str(tmp_path)
    expected = reference(ranks, folder, way)
    evaluations = 3 if way.evaluated_every else 0  # behind the first, the third and the last step
    passes, evaluated = STEPS * way.micro, evaluations * HELD_OUT
    blocks = 2 * passes * (1 + way.checkpoints)
    # In each of two blocks query, key and value, gate and up, which are two calls where gradients flow and five
    # otherwise; two rows; the head; the table.
    calls = {
        "copy_matmul": 2 * blocks + passes + (2 * 5 + 1) * evaluated,
        "matmul_all_reduce": 2 * blocks + 2 * 2 * evaluated,
        "all_reduce": passes + evaluated,
    }
    for wrong, counts, graphs in ranks(world).run(trained, folder, way, expected, timeout=2 * LIMIT_S):
        assert wrong == {} and sum(name.startswith("evaluation") for name in expected.numbers) == evaluations
        if way.compiled:
            assert graphs == 1, "both blocks have one code"
        else:
            assert counts == calls


@pytest.mark.full("a checkpoint on four, two and one ranks")
def test_a_checkpoint_of_the_trainer_goes_on_at_any_number_of_ranks(ranks: Pools, tmp_path: Path) -> None:
    folder, half = str(tmp_path), STEPS // 2
    expected = reference(ranks, folder, Way())
    for curve in ranks(4).run(run, folder, Way(2, saved_at=half), timeout=2 * LIMIT_S):
        assert expected.wrong(curve) == {}
    for world, way in ((2, Way(saved_at=half)), (1, Way(ours=False, saved_at=half))):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{STEPS}")
        for curve in ranks(world).run(run, folder, way, timeout=LIMIT_S):
            assert len(curve.losses) == STEPS - half
            assert expected.wrong(curve, first=half) == {}, (world, way)


@pytest.mark.cpu
def test_what_was_not_tested_is_refused_by_name() -> None:
    told = JobConfig()
    model = SimpleNamespace(model_args=SimpleNamespace(attn_type="sdpa"))
    dims = SimpleNamespace(tp_enabled=True, pp_enabled=False, cp_enabled=False)
    for change, said in (
        (lambda: setattr(dims, "pp_enabled", True), "pipeline_parallel_degree"),
        (lambda: setattr(dims, "cp_enabled", True), "context_parallel_degree"),
        (lambda: setattr(told.parallelism, "enable_async_tensor_parallel", True), "enable_async_tensor_parallel"),
        (lambda: told.model.converters.append("quantize.linear.float8"), "float8"),
        (lambda: setattr(model.model_args, "attn_type", "flex"), "attn_type 'flex'"),
    ):
        change()
        with pytest.raises(ValueError, match=f"llama3_tpkernels does not serve .*{said}"):
            tpk_torchtitan.parallelize_llama(model, dims, told)  # type: ignore[arg-type]
        dims.pp_enabled = dims.cp_enabled = told.parallelism.enable_async_tensor_parallel = False
        told.model.converters.clear()


@pytest.mark.cpu
def test_the_first_name_of_torchtitan_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpk_torchtitan.first_missing() is None
    monkeypatch.delattr("torchtitan.protocols.train_spec.register_train_spec")
    assert "has no torchtitan.protocols.train_spec.register_train_spec" in str(tpk_torchtitan.first_missing())
    monkeypatch.setattr(tpk_torchtitan, "NAMES", {"torchtitan.overrides": ("override",)})
    assert "has no module torchtitan.overrides" in str(tpk_torchtitan.first_missing())
