"""Our ops behind transformers' style names: which run, what is said of the others, generation, and how it is undone."""

from __future__ import annotations

import contextlib
import os
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from tests.integrations import causal_models
from tests.integrations.curves import Curve, reference, step
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

import tpkernels as tpk
import tpkernels.integrations.transformers as tpk_transformers
from tests.gpu import test_trainers as on_gpus
from tests.integrations.transformers import scenarios
from tests.integrations.transformers.scenarios import Scenario, ids
from tpkernels.integrations.transformers import prepared, private_names
from tpkernels.integrations.transformers.experts import experts_forward

LLAMA = Scenario("llama", "register", {"intermediate_size": 57})
MIXTRAL = Scenario("mixtral", "register", {"intermediate_size": 57, "num_hidden_layers": 1})
OPS_OF_A_STEP = {"copy_matmul": 2 * 2 + 1, "matmul_all_reduce": 2 * 2, "all_reduce": 1}
"""In each of two layers one op for query, key and value, one for gate and up, two rows; the head; the table."""
OPS_OF_EXPERTS = {"copy_matmul": 1 + 1, "matmul_all_reduce": 1, "all_reduce": 1} | {
    "copy_grouped_matmul": 1,
    "grouped_matmul_all_reduce": 1,
}


def by_the_plans_name(path: str) -> Any:
    """As older scripts load a model: transformers still takes the argument, and has the size from the environment."""
    from transformers import AutoModelForCausalLM

    tp_mesh()
    told = mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())})
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with told, tpk_transformers.register(strict=True), pytest.warns(FutureWarning, match="tp_plan"):
        return AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", **options)


def steps(path: str, moe: str) -> dict[str, Any]:
    experts = by_the_plans_name(moe)
    found: dict[str, Any] = {"experts counts": scenarios.step_counts(experts), "experts": step(experts, ids())}
    for way in ("register", "stock"):
        model = scenarios.load(way, path)
        found[f"{way} counts"] = scenarios.step_counts(model)
        if way == "stock":
            continue
        found["step"] = step(model, ids())
        kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
        found["kinds"] = kinds == {nn.Linear, nn.Embedding}
        found["tokens"] = scenarios.tokens(model)
    found["prepare counts"] = scenarios.step_counts(scenarios.load("prepare", path))
    return found


@pytest.mark.gloo
def test_every_module_of_the_plan_runs_an_op_of_ours_and_without_register_none_does(
    ranks: Pools, tmp_path: Path
) -> None:
    path, plain = scenarios.saved(LLAMA, tmp_path), LLAMA.build()
    moe = scenarios.saved(MIXTRAL, tmp_path / "moe")
    expected, of_experts = (reference(model, partial(step, ids=ids())) for model in (plain, MIXTRAL.build()))
    said = scenarios.tokens(plain)
    for found in ranks(2).run(steps, path, moe, timeout=LIMIT_S):
        assert found["register counts"] == OPS_OF_A_STEP == found["prepare counts"]
        assert found["experts counts"] == OPS_OF_EXPERTS and of_experts.wrong(found["experts"]) == {}
        assert found["stock counts"] == {}, "register() without effect looks like this"
        assert found["kinds"], "layers keep their classes, which PEFT and the key-value cache look at"
        assert expected.wrong(found["step"]) == {}
        for way, tokens in said.items():
            assert torch.equal(found["tokens"][way], tokens), way


def compiled(path: str) -> dict[str, tuple[Curve, Curve, int]]:
    found = {}
    for way in ("register", "prepare"):
        model = scenarios.load(way, path)
        eager = step(model, ids())
        torch._dynamo.reset()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model.compile(backend="aot_eager", fullgraph=True)
        found[way] = eager, step(model, ids()), torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    return found


@pytest.mark.gloo
def test_a_step_is_compiled_as_one_graph_with_the_bits_of_eager(ranks: Pools, tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("--full: seconds of compiling")
    for found in ranks(2).run(compiled, scenarios.saved(LLAMA, tmp_path), timeout=2 * LIMIT_S):
        for eager, one, graphs in found.values():
            assert graphs == 1 and one.losses == eager.losses
            assert all(torch.equal(one.gradients[name], value) for name, value in eager.gradients.items())


class Loud(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def registrations(path: str, moe: str) -> list[Any]:
    """What is said of modules that keep transformers' forward."""
    from transformers import LlamaForCausalLM, MixtralForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.models.llama import modeling_llama
    from transformers.models.mixtral import modeling_mixtral

    class Odd(modeling_mixtral.MixtralExperts):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x, index, weights)
            return y * y.abs()

    found: list[Any] = []
    tp_mesh()

    def load(kind: Any, source: str, registration: Any) -> None:
        with registration, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = DistributedConfig(tp_size=2)
            kind.from_pretrained(source, distributed_config=config, dtype=torch.float32)
        found.append((registration.used, registration.not_used, [str(w.message) for w in caught if "op of" in str(w)]))

    own = mock.patch.object(modeling_llama, "nn", types.SimpleNamespace(**{**vars(nn), "Linear": Loud}))
    with own:
        load(LlamaForCausalLM, path, tpk_transformers.register())
    with own, contextlib.suppress(ValueError):
        load(LlamaForCausalLM, path, tpk_transformers.register(strict=True))
        found.append("strict did not raise")
    with mock.patch.object(modeling_mixtral, "MixtralExperts", Odd):
        load(MixtralForCausalLM, moe, tpk_transformers.register())
        whole = MixtralForCausalLM.from_pretrained(moe)
        with pytest.raises(ValueError) as refused:
            tpk_transformers.prepare(whole, tp_mesh(), strict=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpk_transformers.prepare(whole, tp_mesh())
        found.append((str(refused.value), [str(one.message) for one in caught if "op of" in str(one.message)]))
    experts = modeling_mixtral.MixtralExperts(MixtralForCausalLM.config_class.from_pretrained(moe))
    whole = experts.gate_up_proj.detach()  # cut in two, the gate is on one rank, and up on the other
    experts.gate_up_proj = nn.Parameter(distribute_tensor(whole, tp_mesh(), [Shard(1)]))
    found.append(experts_forward(experts, tp_mesh(), {}))
    return found


@pytest.mark.gloo
def test_a_module_that_runs_no_op_of_ours_is_named_with_the_reason_and_strict_raises(
    ranks: Pools, tmp_path: Path
) -> None:
    path, moe = scenarios.saved(LLAMA, tmp_path), scenarios.saved(MIXTRAL, tmp_path / "moe")
    first, _ = ranks(2).run(registrations, path, moe, timeout=LIMIT_S)
    assert len(first) == 4, first
    (used, not_used, said), (moe_used, moe_not_used, moe_said), (refused, kept), cut_otherwise = first
    assert set(used) == {"model.embed_tokens"}
    assert not_used["model.layers.*.mlp.down_proj"] == "it is a Loud with a forward of its own"
    assert (
        len(not_used) == 8
        and len(said) == 8
        and all("does not run an op of tpkernels: it is a Loud" in x for x in said)
    )
    assert moe_used["model.layers.0.self_attn.q_proj"] == "ColumnParallelLinear (column)"
    assert list(moe_not_used) == ["model.layers.*.mlp.experts"] and len(moe_said) == 1
    assert "its forward computes something else than experts with a known gate" in moe_said[0]
    assert kept == [refused] and refused.startswith("model.layers.*.mlp.experts does not run an op of tpkernels, each ")
    assert "its gate_up_proj is cut as (Shard(dim=1),)" in cut_otherwise


class Biased(nn.Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=True)


def phi3(linear: type[nn.Module] = nn.Linear) -> Any:
    """Gate and up in one weight."""
    from transformers import Phi3Config, Phi3ForCausalLM
    from transformers.models.phi3 import modeling_phi3

    with mock.patch.object(modeling_phi3, "nn", types.SimpleNamespace(**{**vars(nn), "Linear": linear})):
        torch.manual_seed(0)
        return Phi3ForCausalLM(Phi3Config(**causal_models.LLAMA | {"num_hidden_layers": 1}))


def packed(path: str, biased: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.models.phi3 import modeling_phi3

    tp_mesh()
    plan = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    given: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=2, tp_plan=plan), "dtype": torch.float32}
    with tpk_transformers.register(strict=True) as registration:
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **given)
    found = step(model, ids())
    state = {name: value.clone() for name, value in tpk.full_state_dict(model).items()}
    with pytest.raises(ValueError) as no_snapshot:
        prepared.speak_for_trainer(model)
    with mock.patch.object(modeling_phi3, "nn", types.SimpleNamespace(**{**vars(nn), "Linear": Biased})):
        with tpk_transformers.register(), pytest.raises(ValueError) as caught:
            AutoModelForCausalLM.from_pretrained(biased, **given)
    said = str(caught.value), str(no_snapshot.value)
    return {"used": registration.used["model.layers.0.mlp.gate_up_proj"], "step": found, "said": said, "state": state}


@pytest.mark.gloo
def test_a_packed_weight_runs_our_op_is_gathered_and_refused_with_a_bias_or_for_snapshots(
    ranks: Pools, tmp_path: Path
) -> None:
    plain = phi3()
    plain.save_pretrained(tmp_path / "packed")
    phi3(Biased).save_pretrained(tmp_path / "biased")
    expected = reference(plain, partial(step, ids=ids()))
    for found in ranks(2).run(packed, str(tmp_path / "packed"), str(tmp_path / "biased"), timeout=LIMIT_S):
        assert found["used"] == "ColumnParallelLinear (column)"
        assert expected.wrong(found["step"]) == {}
        assert all(torch.equal(found["state"][name], value) for name, value in plain.state_dict().items())
        bias, snapshot = found["said"]
        assert "model.layers.0.mlp.gate_up_proj has a bias" in bias
        assert snapshot.startswith("model.layers.0.mlp.gate_up_proj has two layers in one weight")


@pytest.mark.cpu
def test_the_handle_gives_transformers_its_styles_back() -> None:
    styles = private_names.styles()
    before = {name: styles[name] for name in styles}
    registration = tpk_transformers.register()
    assert styles["colwise"] is not before["colwise"] and isinstance(styles["colwise"], type(before["colwise"]))
    assert styles["replicate"] is before["replicate"]
    with pytest.raises(ValueError, match="ours already"):
        tpk_transformers.register()
    registration.remove()
    assert {name: styles[name] for name in styles} == before


@pytest.mark.cpu
def test_the_first_private_name_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed import tensor_parallel

    assert private_names.first_missing() is None
    monkeypatch.delattr(tensor_parallel, "EmbeddingParallel")
    with pytest.raises(ValueError, match=r"has no transformers\.distributed\.tensor_parallel\.EmbeddingParallel"):
        tpk_transformers.register()


@pytest.mark.cpu
def test_examples_skip_on_gpus_where_an_older_transformers_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed import tensor_parallel

    example = "transformers_trainer.py"
    monkeypatch.setitem(on_gpus.EXAMPLES, example, "transformers")
    monkeypatch.setattr(on_gpus, "version", lambda package: "5.22.1")
    on_gpus.skip_what_cannot_run(example)  # it has all names
    monkeypatch.delattr(tensor_parallel, "EmbeddingParallel")
    with pytest.raises(pytest.skip.Exception, match=r"no .*EmbeddingParallel.*: this integration was tested"):
        on_gpus.skip_what_cannot_run(example)
    on_gpus.skip_what_cannot_run("parallelize_module.py")
    monkeypatch.setattr(on_gpus, "version", lambda package: "6.0")
    on_gpus.skip_what_cannot_run(example)  # a newer one is not excused


@pytest.mark.cpu
def test_what_prepare_refuses() -> None:
    with pytest.raises(ValueError, match=r"prepare\(\) takes a model of transformers"):
        tpk_transformers.prepare(nn.Linear(2, 2), None)  # type: ignore[arg-type]
