"""``tpk.verify``: right models pass in every dtype, and each seeded fault is found and named where it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models import zoo
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tpkernels.sharding import Replicate, verify_model
from tpkernels.testing.spawn import Pools
from tpkernels.verification.verifier import Verifier

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

RIGHT: list[tuple[str, torch.dtype, bool]] = [
    ("llama", torch.bfloat16, True),
    ("gpt2", torch.float32, False),
    ("transformer", torch.float64, False),
    ("transformer", torch.float32, True),
]


def verdicts(cases: list[tuple[str, torch.dtype, bool]]) -> list[str]:
    """What is wrong with the verification of models that are right."""
    wrong = []
    for name, dtype, sequence in cases:
        model, given = zoo.build(name, dtype), zoo.inputs(name, dtype)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        plan = plan_once(model, tp_mesh(), sequence_parallel=sequence, example_inputs=given)
        found = tpk.verify(model, tp_mesh(), given, plan=plan)
        kinds = {row.kind for row in found.rows}
        gradients = sum(row.kind == "gradient" for row in found.rows)
        held = model.state_dict()
        if not found.ok or not {"output", "loss", "gradient"} <= kinds or found.first_difference is not None:
            wrong.append(f"{name}: {found}")
        if gradients != len(list(model.parameters())):
            wrong.append(f"{name}: {gradients} gradients compared")
        if any(not torch.equal(held[key], value) for key, value in before.items()) or held.keys() != before.keys():
            wrong.append(f"{name} was changed")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            wrong.append(f"{name} was cut")
        found.check()
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 1, 3])
def test_what_is_right_is_said_to_be_and_is_left_alone(ranks: Pools, world: int, full: bool) -> None:
    cases = RIGHT if world == 2 and full else RIGHT[world % 2 :: 2]
    assert ranks(world).run(verdicts, cases, timeout=LIMIT_S) == [[]] * world


# ---------------------------------------------------------------- seeded faults


def _no_sum_of_dx(model: nn.Module) -> None:
    layer: Any = model.get_submodule("transformer.h.1.mlp.c_fc")
    layer.forward = lambda x: x @ layer._local_parts()[1].t() + layer.bias.to_local()


def _bias_on_each_rank(model: nn.Module) -> None:
    def hook(module: nn.Module, args: object, y: Tensor) -> Tensor:
        return y + module.bias.to_local()  # type: ignore[operator, union-attr]

    hook.takes_parts = True  # type: ignore[attr-defined]
    model.get_submodule("transformer.h.0.mlp.c_proj").register_forward_hook(hook)


def _raises(model: nn.Module) -> None:
    def refuse(x: Tensor) -> Tensor:
        raise RuntimeError("this layer is broken")

    model.get_submodule("transformer.h.1.mlp.act").forward = refuse


def _loses_a_gradient(model: nn.Module) -> None:
    layer: Any = model.get_submodule("transformer.h.1.ln_2")
    layer._parameters["weight"].requires_grad_(False)


def spoiled(name: str, spoil: Callable[[nn.Module], None], dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The verification of a model that is spoiled once it is parallel."""

    def cut(model: nn.Module, *args: Any) -> nn.Module:
        spoil(tpk.parallelize(model, *args))
        return model

    model, given = zoo.build(name, dtype), zoo.inputs(name, dtype)
    with mock.patch.object(verify_model, "parallelize", cut):
        return said(tpk.verify(model, tp_mesh(), given, plan=plan_of(name, dtype)))


@functools.cache
def plan_of(name: str, dtype: torch.dtype) -> tpk.ShardingPlan:
    return plan_once(zoo.build(name, dtype), tp_mesh(), example_inputs=zoo.inputs(name, dtype))


def said(found: Any) -> tuple[Any, ...]:
    with pytest.raises(tpk.VerificationError, match=r"NOT the unsharded model|raised"):
        found.check()
    return found.ok, found.first_difference.module, found.first_difference.what, str(found)


def faults(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    return [spoiled("gpt2", spoil, dtype) for spoil in (_no_sum_of_dx, _bias_on_each_rank, _loses_a_gradient, _raises)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_seeded_faults_are_named_at_their_modules(ranks: Pools, world: int, dtype: torch.dtype) -> None:
    results = ranks(world).run(faults, dtype, timeout=LIMIT_S)
    assert all(result == results[0] for result in results), "the ranks disagree"
    (dx, bias, lost, broken) = results[0]
    assert dx[:3] == (False, "transformer.h.1.mlp.c_fc", "the gradient of its input"), dx[3]
    assert bias[:3] == (False, "transformer.h.0.mlp.c_proj", "its output"), bias[3]
    assert lost[:3] == (False, "transformer.h.1.ln_2", "the gradient of its weight"), lost[3]
    assert "gradient of transformer.h.1.ln_2.weight: there is none" in lost[3]
    assert broken[1] == "transformer.h.1.mlp.act" and "this layer is broken" in broken[3]


def wrong_plans() -> list[tuple[Any, ...]]:
    """Plans that compute garbage, silently or not."""
    mesh = tp_mesh()
    model, given = zoo.build("attention", torch.float32), zoo.inputs("attention", torch.float32)
    packed = {"qkv": "column", "proj": "row"}  # cut across query, key and value
    plan = tpk.make_plan(model, mesh, example_inputs=given)
    heads = replace(plan, attributes={"num_heads": (4, (1,) * mesh.size())})
    normed, tokens = zoo.build("qwen3", torch.float32), zoo.inputs("qwen3", torch.float32)
    plan = tpk.make_plan(normed, mesh, example_inputs=tokens)
    summed = tuple(
        replace(entry, style=Replicate()) if entry.path.endswith("q_norm") else entry for entry in plan.entries
    )
    return [
        said(tpk.verify(model, mesh, given, plan=packed)),
        said(tpk.verify(model, mesh, given, plan=heads)),
        said(tpk.verify(normed, mesh, tokens, plan=replace(plan, entries=summed))),
    ]


@pytest.mark.slow("4 s; faults of modules are named in the loop")
def test_plans_that_compute_garbage_are_named_where_they_do(ranks: Pools) -> None:
    for packed, heads, norm in ranks(2).run(wrong_plans, timeout=LIMIT_S):
        for found in (packed, heads):
            assert found[1:3] == ("", "what it gives to 'proj'"), found[3]
            assert "its own code, between 'qkv' and 'proj'" in found[3]
        assert norm[1:3] == ("model.layers.1.self_attn.q_norm", "the gradient of its weight"), norm[3]
        assert "of 25 wrong" in norm[3]


# ---------------------------------------------------------------- ranks that differ


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def ranks_that_differ() -> list[str]:
    mesh, rank = tp_mesh(), dist.get_rank()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)
    own = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    torch.manual_seed(0)
    same = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    return [
        refusal(lambda: tpk.verify(own, mesh, x)),
        refusal(lambda: tpk.verify(same, mesh, x + rank)),
        refusal(lambda: tpk.verify(same, mesh, torch.randn(4, 7) if rank == 1 else x)),
        refusal(lambda: tpk.verify(tpk.parallelize(same, mesh), mesh, x)),
        refusal(lambda: tpk.verify(zoo.build("conv_lstm"), mesh, torch.zeros(3, 4, dtype=torch.float64))),
    ]


def test_ranks_that_differ_are_refused_on_all_of_them(ranks: Pools) -> None:
    for weights, inputs, shapes, twice, unfit in ranks(3).run(ranks_that_differ, timeout=LIMIT_S):
        assert "weights.0.weight and 3 more differ between ranks 0 and 1" in weights
        assert "input [0] differ between ranks 0 and 1" in inputs
        assert "input [0] differ between ranks 0 and 1" in shapes and "(4, 7)" in shapes
        assert "is a DTensor already" in twice
        assert "does not run with the example_inputs given" in unfit


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x))) * scale
        return y


def verified_first() -> dict[str, Any]:
    mesh, rank = tp_mesh(), dist.get_rank()
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 6)
    expected = model(x)
    with mock.patch.object(Verifier, "verify", return_value=tpk.Verification(False, "Scaled", 2, "float32", ())):
        with pytest.raises(tpk.VerificationError):
            tpk.parallelize(model, mesh, verify=True)
    untouched = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    wrong = {"up": "column_gather", "down": "column"}  # half of the features leave the model
    with pytest.raises(tpk.VerificationError) as caught:
        tpk.parallelize(model, mesh, wrong, verify=True, example_inputs=x)
    untouched &= not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    tpk.parallelize(model, mesh, verify=True, example_inputs=x)
    close = torch.allclose(model(x), expected, atol=1e-5)
    other = refusal(lambda: model(x + rank))
    scale = refusal(lambda: model(x, scale=1.0 + rank))
    shape = refusal(lambda: model(x[: 2 + rank]))
    again = torch.allclose(model.eval()(x, scale=2.0), 2 * expected, atol=1e-5)
    return {
        "untouched": untouched, "why": str(caught.value), "close": close, "again": again,
        "messages": [other, scale, shape],
    }  # fmt: skip


def test_parallelize_verifies_first_and_compares_batches_from_then_on(ranks: Pools) -> None:
    for found in ranks(2).run(verified_first, timeout=LIMIT_S):
        assert found["untouched"] and found["close"] and found["again"]
        assert "is torch.float32 (4, 3) instead of torch.float32 (4, 6)" in found["why"]
        assert "first difference: the model itself (Scaled, not in the plan): its output" in found["why"]
        other, scale, shape = found["messages"]
        assert "different batches: argument 0 differs (rank 0: torch.float32 (4, 6) with digest" in other
        assert "scale differs (rank 0: 1.0; rank 1: 2.0)" in scale
        assert "rank 0: torch.float32 (2, 6)" in shape and "rank 1: torch.float32 (3, 6)" in shape


# ---------------------------------------------------------------- options


class Stateful(nn.Module):
    """A norm with statistics, dropout, an output that is no float, a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y: Tensor = self.down(self.drop(torch.tanh(self.up(self.norm(x)))))
        return {"y": y, "best": y.argmax(-1), "loss": y.square().mean()}


def options() -> dict[str, Any]:
    mesh = tp_mesh()
    torch.manual_seed(0)
    model = Stateful().train()
    x = torch.randn(4, 6, requires_grad=True)
    asked = tpk.verify(model, mesh, {"x": x}, loss=lambda out: out["loss"])
    with torch.device("meta"):
        meta = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 20))
    derived = tpk.verify(meta, mesh)
    half = tpk.verify(zoo.build("mlp", torch.bfloat16), mesh, dtype=torch.float64)
    frozen = tpk.verify(zoo.build("mlp", torch.float32).requires_grad_(False), mesh, torch.ones(2, 6))
    return {
        "kinds": sorted({row.kind for row in asked.rows}), "rows": {row.name for row in asked.rows},
        "ok": [one.ok for one in (asked, derived, half, frozen)], "said": str(derived), "dtype": half.dtype,
        "left": x.grad is None and int(model.norm.num_batches_tracked) == 0 and model.drop.p == 0.5,
        "frozen": frozen.notes, "json": derived.to_json(),
    }  # fmt: skip


def test_losses_buffers_meta_models_and_dtypes(ranks: Pools) -> None:
    for found in ranks(2).run(options, timeout=LIMIT_S):
        assert found["ok"] == [True] * 4
        assert found["kinds"] == ["buffer", "gradient", "gradient of input", "loss", "output"]
        assert {"norm.running_var", "best", "y", "x"} <= found["rows"]
        assert "meta device: verified with small random weights" in found["said"]
        assert found["left"] and found["dtype"] == "float64" and '"ok": true' in found["json"]
        assert found["frozen"] == ("nothing that the model returns has a gradient: outputs alone were compared",)
