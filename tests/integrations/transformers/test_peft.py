"""Adapters of PEFT: put on a model that transformers has cut with our ops, or on one that ``prepare`` then cuts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.kept_mesh import once_per_pool
from tests.models.compare import differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.nn.parameters import local
from tpkernels.nn.whole_linear import WholeLinear
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
peft = pytest.importorskip("peft", reason="the package peft is missing: pip install peft")

import tpkernels.integrations.transformers as tpk_transformers  # noqa: E402
from tests.integrations.curves import Curve, Reference, step  # noqa: E402
from tests.integrations.transformers import scenarios  # noqa: E402
from tests.integrations.transformers.running import train  # noqa: E402
from tests.integrations.transformers.scenarios import Scenario, ids  # noqa: E402
from tpkernels.integrations.transformers import adapters, registered  # noqa: E402

pytestmark = pytest.mark.gloo

LLAMA = Scenario("llama", "register")
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24}
UNEVEN = {**THREE, "intermediate_size": 55}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapters(model: Any) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS))


def fill(model: Any) -> None:
    """B is zero at first, and A has no gradient then; a cut model draws other numbers for A."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 10
            with torch.no_grad():
                parameter.copy_(_like(values, parameter))


def _like(values: Tensor, parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def mesh_of(replicas: int) -> Any:
    return _meshes(replicas) if replicas > 1 else tp_mesh()


@once_per_pool
def _meshes(replicas: int) -> Any:
    return tpk.init(dp=replicas, tp=dist.get_world_size() // replicas)


def mine(replicas: int) -> Tensor:
    """The rows of this rank's replica."""
    return ids().chunk(replicas)[dist.get_rank() * replicas // dist.get_world_size()]


def mean(loss: float) -> float:
    """Over the replicas, of what all their ranks have."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def step_of(model: Any, replicas: int) -> Curve:
    curve = step(model, mine(replicas))
    curve.losses = [mean(loss) for loss in curve.losses]
    return curve


def reference(scenario: Scenario, run: Callable[[Any], Curve]) -> Reference:
    """In one process, in fp64 and in fp32."""
    models = [with_adapters(scenario.build().double()).double(), with_adapters(scenario.build())]
    for model in models:
        fill(model)
    return Reference.of(*map(run, models))


OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}


def registered_model(path: str) -> tuple[Any, tpk_transformers.Registration]:
    """Of all ranks, with adapters that come after ``register()``."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    tp_mesh()
    with tpk_transformers.register(strict=True) as registration:
        config = DistributedConfig(tp_size=dist.get_world_size())
        model = with_adapters(AutoModelForCausalLM.from_pretrained(path, distributed_config=config, **OPTIONS))
    fill(model)
    return model, registration


def prepared_model(path: str, replicas: int, shard: bool, **options: Any) -> Any:
    """With adapters that come before ``prepare()``."""
    from transformers import AutoModelForCausalLM

    model = with_adapters(AutoModelForCausalLM.from_pretrained(path, **OPTIONS))
    fill(model)
    return tpk_transformers.prepare(model, mesh_of(replicas), shard=shard, **options)


def adapted(path: str, folder: str, trained: bool) -> dict[str, Any]:
    """Adapters after ``register()``: a step, the files, the merged model; with a partial gradient; and a run of
    Trainer."""
    model, registration = registered_model(path)
    found: dict[str, Any] = {"step": step(model, ids())}
    found["used"] = sorted(name for name in registration.used if "lora" in name)
    real = registered._Forward.__call__

    def partly(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, local(self.layer.weight)) if self.layer.weight.shape[1] == 4 else real(self, x)

    with mock.patch.object(registered._Forward, "__call__", partly):  # B alone has four columns
        found["partial"] = step(model, ids())
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(f"{folder}-merged")  # halves of an adapter: a DTensor and a plain tensor
    with torch.no_grad():
        found["merged"] = float(model.base_model.model(input_ids=ids(), labels=ids()).loss)
    if trained:
        found["run"] = train(registered_model(path)[0], f"{folder}-run")
    return found


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {}),
        pytest.param(3, THREE, marks=pytest.mark.full("three ranks")),
    ],
)
def test_adapters_on_a_model_that_runs_our_ops(
    ranks: Pools, tmp_path: Path, world: int, changes: dict[str, Any], full: bool
) -> None:
    scenario = replace(LLAMA, changes=changes)
    expected, folder = reference(scenario, partial(step, ids=ids())), str(tmp_path / "adapter")
    results = ranks(world).run(adapted, scenarios.saved(scenario, tmp_path), folder, full, timeout=LIMIT_S)
    for found in results:
        assert expected.wrong(found["step"]) == {}
        assert len(found["used"]) == 2 * len(TARGETS), "B of columns and A of rows run our ops, too"
        assert expected.right(found["merged"])
        wrong = expected.wrong(found["partial"])
        assert wrong and all(name.startswith("gradient ") for name in wrong)
    check_files(scenario, folder, expected)
    if full:
        curve = reference(scenario, partial(train, folder=tmp_path / "plain"))
        for found in results:
            assert curve.wrong(found["run"]) == {}


def check_files(scenario: Scenario, folder: str, expected: Reference) -> None:
    """Those of the adapter, and of the model that it was merged into, without us."""
    adapted = peft.PeftModel.from_pretrained(scenario.build(), folder)
    merged, info = type(scenario.build()).from_pretrained(
        f"{folder}-merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        for alone in (adapted, merged):
            assert expected.right(float(alone(input_ids=ids(), labels=ids()).loss))


def before_prepare(path: str, folder: str, replicas: int, shard: bool, trained: bool) -> dict[str, Any]:
    """Adapters before ``prepare()``: a step, the adapter's files, the merged model; and a run of Trainer."""
    model = prepared_model(path, replicas, shard)
    found: dict[str, Any] = {"step": step_of(model, replicas)}
    model.save_pretrained(folder)
    merged = model.merge_and_unload()
    merged.save_pretrained(f"{folder}-merged")
    with torch.no_grad():
        found["merged"] = float(merged(input_ids=ids(), labels=ids()).loss)
    if trained:
        found["run"] = train(
            prepared_model(path, replicas, shard), f"{folder}-run", per_device_train_batch_size=2 // replicas
        )
    return found


@pytest.mark.parametrize(
    ("world", "replicas", "shard", "changes"),
    [
        (2, 1, False, {}),
        pytest.param(3, 1, False, UNEVEN, marks=pytest.mark.full("three ranks, sizes that do not divide")),
        pytest.param(4, 2, False, {}, marks=pytest.mark.full("two replicas")),
        pytest.param(4, 2, True, {}, marks=pytest.mark.full("parameters cut over two replicas")),
    ],
)
def test_a_model_with_adapters_is_prepared_merged_and_trained(
    ranks: Pools, tmp_path: Path, world: int, replicas: int, shard: bool, changes: dict[str, Any], full: bool
) -> None:
    pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install accelerate")
    scenario = replace(LLAMA, changes=changes)
    expected, folder = reference(scenario, partial(step, ids=ids())), str(tmp_path / "adapter")
    path = scenarios.saved(scenario, tmp_path)
    results = ranks(world).run(before_prepare, path, folder, replicas, shard, full, timeout=LIMIT_S)
    for found in results:
        assert expected.wrong(found["step"]) == {} and expected.right(found["merged"])
    check_files(scenario, folder, expected)
    if full:
        curve = reference(scenario, partial(train, folder=tmp_path / "plain"))
        for found in results:
            assert curve.wrong(found["run"]) == {}


def too_small(path: str) -> str:
    """Adapters after ``register()`` of a model that FSDP has cut, too."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    mesh_of(2)
    with tpk_transformers.register(strict=True), pytest.raises(ValueError) as caught:
        config = DistributedConfig(tp_size=2, fsdp_size=2)
        with_adapters(AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype=torch.float32))
    return str(caught.value)


@pytest.mark.full("two replicas")
def test_an_adapter_of_which_peft_makes_a_part_of_a_part_is_refused(ranks: Pools, tmp_path: Path) -> None:
    for said in ranks(4).run(too_small, scenarios.saved(LLAMA, tmp_path), timeout=LIMIT_S):
        assert "8 of the 32 features of" in said and "add adapters before prepare()" in said


def small(kind: str) -> Any:
    """In fp64, with adapters: projections apart, or packed."""
    import transformers

    config: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "GPT2":  # keeps [in, out], and its projections are packed
        config |= {"n_embd": 24, "n_layer": 1, "n_head": 4}
    else:
        config |= {"hidden_size": 24, "intermediate_size": 38, "num_hidden_layers": 1, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2}
    packed = {"Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "GPT2": ["c_attn", "c_fc", "c_proj"]}
    names, head = packed.get(kind, TARGETS), "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    torch.manual_seed(7)
    plain = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**config)).double().eval()
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names)).double()
    fill(model)
    return model


def let_merge(patch: pytest.MonkeyPatch) -> None:
    """:func:`let_adapters_merge`, to be undone for other tests of this process."""
    for cls in (getattr(peft.tuners.lora.layer, kind) for kind in adapters.KINDS):
        for name in adapters.NAMES:
            patch.setattr(cls, name, inspect.unwrap(getattr(cls, name)))  # prepare() may have been called here
    adapters.let_adapters_merge.__wrapped__()


def merged_after_parallelize(kind: str, safe: bool) -> list[str]:
    """What differs from merging before; ``safe`` after :func:`let_adapters_merge` alone."""
    plain, model, tokens = small(kind), small(kind), ids() % 50
    tpk.parallelize(model, tp_mesh(), example_inputs={"input_ids": tokens})
    halves = [module for module in model.modules() if type(module) is WholeLinear]
    half = halves[0].weight if halves else None
    found = [] if isinstance(half, DTensor) and half.placements[0].is_replicate() else ["the whole half is plain"]
    with pytest.MonkeyPatch.context() as patch:
        if safe:
            let_merge(patch)
        model = model.merge_and_unload(safe_merge=safe)
    plain = plain.merge_and_unload()
    state = tpk.full_state_dict(model)
    found += [name for name, value in plain.state_dict().items() if why_differs(state[name], value)]
    with torch.no_grad():
        logits = [one(tokens).logits for one in (model, plain)]
    told = [one.generate(tokens, max_new_tokens=4, do_sample=False) for one in (model, plain)]
    return found + [f"logits {why}" for why in [why_differs(*logits)] if why] + ["tokens"] * (not torch.equal(*told))


def why_differs(found: Tensor, expected: Tensor) -> str | None:
    return differs(found, expected, 1e-11)


@pytest.mark.parametrize(
    ("kind", "world", "safe"),
    [
        ("Llama", 3, False),
        ("Phi3", 2, False),
        ("Phi3", 2, True),
        ("GPT2", 2, False),
    ],
)
def test_adapters_merge_after_parallelize_alone(ranks: Pools, kind: str, world: int, safe: bool) -> None:
    assert ranks(world).run(merged_after_parallelize, kind, safe, timeout=LIMIT_S) == [[]] * world


class Convolutions(nn.Module):
    """Of 6 channels and of 5, which three ranks share unevenly; kernels of one and of nine numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pointwise, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 1), nn.Conv1d(5, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.pointwise(self.stem(x).relu()).flatten(2)))


def adapters_on_convolutions(before: bool, safe: bool) -> list[str]:
    """What differs from merging on one rank; ``before``: adapters are added before the cut."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["stem", "pointwise", "last"])

    def adapted(model: nn.Module) -> Any:
        model = peft.get_peft_model(model, config)
        fill(model)
        return model.double()

    torch.manual_seed(7)
    plain, x = Convolutions().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    model: Any = copy.deepcopy(plain)
    if before:
        model = tpk.parallelize(adapted(model), tp_mesh(), example_inputs=x)
    else:
        in_pairs = tpk.parallelize(copy.deepcopy(model), tp_mesh(), example_inputs=x)
        with pytest.raises(ValueError, match="add adapters before parallelize"):
            adapted(in_pairs)
        model = adapted(tpk.parallelize(model, tp_mesh(), {"**": "channels"}))
    expected = adapted(plain)
    found = [f"with adapters {why}" for why in [why_differs(model(x), expected(x))] if why]
    with pytest.MonkeyPatch.context() as patch:
        let_merge(patch)
        if safe:
            broken = model.base_model.model.stem.lora_A["default"].weight
            kept = broken.detach().clone()
            with torch.no_grad():
                broken.mul_(float("nan"))
            with pytest.raises(ValueError, match="would not be finite"):
                model.base_model.model.stem.merge(safe_merge=True)
            with torch.no_grad():
                broken.copy_(kept)
        model.merge_adapter()
        model.unmerge_adapter()
        found += [f"merged and back {why}" for why in [why_differs(model(x), expected(x))] if why]
        model = model.merge_and_unload(safe_merge=safe)
    expected = expected.merge_and_unload()
    state = tpk.full_state_dict(model)
    found += [name for name, value in expected.state_dict().items() if why_differs(state[name], value)]
    return found + [f"merged {why}" for why in [why_differs(model(x), expected(x))] if why]


@pytest.mark.parametrize(
    ("world", "before", "safe"),
    [(2, True, True), (3, False, False), pytest.param(3, True, False, marks=pytest.mark.full("both orders"))],
)
def test_adapters_on_convolutions_merge(ranks: Pools, world: int, before: bool, safe: bool) -> None:
    assert ranks(world).run(adapters_on_convolutions, before, safe, timeout=LIMIT_S) == [[]] * world


def test_what_would_not_be_finite_is_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    let_merge(monkeypatch)
    model = small("Phi3")
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    before = layer.base_layer.weight.clone()
    with torch.no_grad():
        layer.lora_A["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="would not be finite"):
        layer.merge(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, before) and not layer.merged


def merged_where_one_rank_is_broken(name: str) -> list[str]:
    """What is wrong where rank 0 alone has a part that is not finite."""
    model = small("Phi3")
    tpk.parallelize(model, tp_mesh(), example_inputs={"input_ids": ids() % 50})
    layer = model.base_model.model.model.layers[0].mlp.get_submodule(name)
    weight = layer.base_layer.weight
    parts = [part.to_local() for part in getattr(weight, "parts", [weight])]
    if tp_mesh().get_local_rank() == 0:
        with torch.no_grad():
            parts[-1][0, 0] = float("nan")
    before = [part.clone() for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        let_merge(patch)
        with pytest.raises(ValueError, match="would not be finite"):
            layer.merge(safe_merge=True)
    same = all(torch.allclose(now, old, 0, 0, True) for now, old in zip(parts, before, strict=True))
    return ["the weight has changed"] * (not same) + ["it says that it is merged"] * layer.merged


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj"])
@pytest.mark.slow("2 s")
def test_what_would_not_be_finite_on_one_rank_is_merged_on_none(ranks: Pools, name: str) -> None:
    assert ranks(2).run(merged_where_one_rank_is_broken, name, timeout=LIMIT_S) == [[], []]


@pytest.mark.parametrize("name", adapters.NAMES)
@pytest.mark.parametrize("kind", adapters.KINDS)
def test_the_name_of_peft_that_merging_needs_is_named_where_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    from peft.tuners.lora import layer

    monkeypatch.delattr(getattr(layer, kind), name)
    with pytest.raises(ValueError, match=rf"has no peft\.tuners\.lora\.layer\.{kind}\.{name}"):
        adapters.let_adapters_merge.__wrapped__()
