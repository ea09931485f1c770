"""torchtitan's Trainer with our blocks: the numbers of one process, whatever the ranks, replicas and sizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.integrations.curves import Curve, Reference
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("torchtitan", reason="torchtitan is missing: pip install --no-deps torchtitan spmd_types, and tyro")

from tests.integrations.torchtitan import running
from tests.integrations.torchtitan.models import STEPS, counted
from tests.integrations.torchtitan.running import Options, Way
from tpkernels.integrations import torchtitan as tpk_torchtitan

pytestmark = pytest.mark.gloo

UNEVEN = {"hidden": 50, "vocabulary": 67}
HALF = STEPS // 2
EVALUATED = Way(evaluated_every=HALF)
BF16 = Way(computes_in="bfloat16", eps=1e-2)
MICRO = Way(micro=2, checkpoints=True)
SIX: Options = {"heads": 6}
"""Of which three ranks hold as many each."""


def exact_and_plain(folder: str, options: Options, way: Way) -> Reference:
    """torchtitan's own blocks in one process, in fp64 and as they are."""
    plain = replace(way, replicas=1, copies=1, ours=False)
    ways = replace(plain, dtype="float64", computes_in=None), plain
    return Reference.of(*(running.run(folder, options, way) for way in ways))


def trained(folder: str, options: Options, way: Way, expected: Reference) -> dict[str, Any]:
    with counted() as counts:
        curve = running.run(folder, options, way)
    return {"wrong": expected.wrong(curve), "counts": dict(counts), "curve": curve}


@pytest.mark.parametrize(
    ("world", "options", "way"),
    [
        (2, UNEVEN, Way()),
        pytest.param(3, {**SIX, **UNEVEN}, Way(), marks=pytest.mark.full("three ranks, sizes that do not divide")),
        pytest.param(2, UNEVEN, EVALUATED, marks=pytest.mark.full("evaluation")),
        pytest.param(3, {**SIX, **UNEVEN}, EVALUATED, marks=pytest.mark.full("evaluation")),
        pytest.param(4, UNEVEN, replace(EVALUATED, replicas=2), marks=pytest.mark.full("evaluation")),
        pytest.param(4, {"hidden": 51, "vocabulary": 67}, Way(2), marks=pytest.mark.full("two replicas of two ranks")),
        pytest.param(4, {"fused": False}, Way(copies=2), marks=pytest.mark.full("replicas whose parameters are whole")),
        pytest.param(2, {}, BF16, marks=pytest.mark.full("bf16")),
        pytest.param(3, SIX, BF16, marks=pytest.mark.full("bf16")),
        pytest.param(4, {}, replace(BF16, replicas=2), marks=pytest.mark.full("bf16")),
        pytest.param(2, {}, MICRO, marks=pytest.mark.full("micro-batches, recomputed")),
        pytest.param(3, SIX, MICRO, marks=pytest.mark.full("micro-batches, recomputed")),
        pytest.param(4, {}, replace(MICRO, replicas=2), marks=pytest.mark.full("micro-batches, recomputed")),
    ],
)
def test_the_trainer_with_our_blocks_is_as_exact_as_one_process(
    ranks: Pools, tmp_path: Path, world: int, options: Options, way: Way
) -> None:
    folder = str(tmp_path)
    (expected,) = ranks(1).run(exact_and_plain, folder, options, way, timeout=LIMIT_S)
    for found in ranks(world).run(trained, folder, options, way, expected, timeout=LIMIT_S):
        assert found["wrong"] == {}
        evaluations = 3 if way.evaluated_every else 0  # behind the first, the third and the last step
        assert len(found["curve"].evaluations) == evaluations
        calls = 2 * (STEPS * way.micro * (1 + way.checkpoints) + evaluations * running.HELD_OUT)
        assert found["counts"] == {"all_gather_matmul": calls, "matmul_reduce_scatter": calls}


def compiled(folder: str) -> list[Curve]:
    return [running.run(folder, UNEVEN, Way(2, compiled=wanted)) for wanted in (False, True)]


def faulty(folder: str, expected: Reference) -> list[dict[str, float]]:
    """Sums that stay parts, replicas with the rows of the first one, and gradients that are averaged over replicas."""

    def part(x: Tensor, weight: Tensor, group: Any, *, scatter_dim: int) -> Tensor:
        return F.linear(x, weight).chunk(group.size(), scatter_dim)[group.rank()]

    found = []
    for fault in (
        mock.patch.object(tpk_torchtitan, "matmul_reduce_scatter", part),
        mock.patch.object(running.Batches, "mine", lambda self, rows: rows.chunk(self.replicas)[0]),
        mock.patch("torchtitan.distributed.fsdp.disable_fsdp_gradient_division", lambda model: None),
    ):
        with fault:
            found.append(expected.wrong(running.run(folder, UNEVEN, Way(2))))
    return found


@pytest.mark.full("blocks compiled, and three faults")
def test_compiled_blocks_have_the_same_numbers_and_faults_are_seen(ranks: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    (expected,) = ranks(1).run(exact_and_plain, folder, UNEVEN, Way(), timeout=LIMIT_S)
    for eager, faster in ranks(4).run(compiled, folder, timeout=LIMIT_S):
        assert expected.wrong(eager) == {} and expected.wrong(faster) == {}
    for found in zip(*ranks(4).run(faulty, folder, expected, timeout=LIMIT_S), strict=True):
        assert all(found), "each rank sees each fault"


@pytest.mark.full("a checkpoint on four, two and one ranks")
def test_a_checkpoint_of_the_trainer_goes_on_at_any_number_of_ranks(ranks: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    (expected,) = ranks(1).run(exact_and_plain, folder, UNEVEN, Way(), timeout=LIMIT_S)
    for found in ranks(4).run(trained, folder, UNEVEN, Way(2, saved_at=HALF), expected, timeout=LIMIT_S):
        assert found["wrong"] == {}
    for world, way in ((2, Way(saved_at=HALF)), (2, Way(2, saved_at=HALF)), (1, Way(ours=False, saved_at=HALF))):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{STEPS}")
        for curve in ranks(world).run(running.run, folder, UNEVEN, way, timeout=LIMIT_S):
            assert len(curve.losses) == STEPS - HALF
            assert expected.wrong(curve, first=HALF) == {}, (world, way)


def on_spmd_types(folder: str) -> str:
    with pytest.raises(ValueError) as caught:
        running.run(folder, {}, Way(backend="spmd_types"))
    return str(caught.value)


def test_fully_shard_takes_no_parameters_of_spmd_types(ranks: Pools, tmp_path: Path) -> None:
    """Where this fails, torch has learnt to: the trainer can run that backend, too, and the page has to say so."""
    for said in ranks(2).run(on_spmd_types, str(tmp_path), timeout=LIMIT_S):
        assert "all parameters must be DTensors" in said and "Got plain tensor for parameter" in said


def refused() -> list[str]:
    """What a block of ours says to DTensors that torchtitan's do not give it."""
    layer = tpk_torchtitan.ScatteringLinear.Config(in_features=6, out_features=4).build()
    meshes = {name: init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("tp", "dp")}
    said = []
    for width, name, placement in ((6, "dp", Shard(2)), (6, "tp", Replicate()), (5, "tp", Shard(2))):
        x = distribute_tensor(torch.ones(1, 2, width), meshes[name], [placement])
        with pytest.raises(ValueError) as caught:
            layer(x)
        said.append(str(caught.value))
    return said


def test_tensors_of_another_layout_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(refused, timeout=LIMIT_S):
        expected = ["the mesh ('tp',), got one of ('dp',)", "got (Replicate(),)", "does not divide by 2 ranks"]
        assert all(part in one for part, one in zip(expected, said, strict=True)), said
