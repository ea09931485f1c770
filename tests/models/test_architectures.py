"""The sweep over transformers' architectures (`benchmarks/architectures.py`): a few of them, and that it can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

from benchmarks.default_sizes import CHANGES, published_bytes
from benchmarks.looked_up import tables
from benchmarks.never_called import never_called
from benchmarks.plan_shares import output_heads, told
from tests.models.architectures import compare
from tests.models.architectures.catalogue import architectures
from tests.models.architectures.compare import examine
from tests.models.architectures.reference import CannotBuild, Reference, computing, reference_of
from tests.models.architectures.shrink import small_config
from tests.models.architectures.sweep import verdict_of
from tpkernels.testing.spawn import Pools

LIMIT_S = 180.0
SAMPLE = ("qwen3_moe", "deepseek_v2", "llama4_text", "beit relative", "ctrl", "jamba")
"""What was wrong or raised once, each for a reason of its own: norms of heads, latent attention, complex numbers,
fake tensors in caches, additions in place, weights that the model reads itself."""


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.slow("5 s: architectures of the day")
def test_an_architecture_computes_what_the_unsharded_model_computes(ranks: Pools, name: str) -> None:
    if name not in architectures():
        pytest.skip(f"this transformers has no {name}")
    row = verdict_of(ranks(2).run(examine, reference_of(name), False, False, timeout=LIMIT_S))
    assert row["status"] == "right", row


MIXTURES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "gemma4_text", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kimi_linear", "kolibri1", "laguna", "llama4_text", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral4", "mistral_large4_text", "mixtral",
    "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text",
    "qwen4_exp_text", "solar_open",
)  # fmt: skip
"""Of language alone, with experts in 3-dimensional parameters."""


@pytest.mark.sample(0)
@pytest.mark.gloo
@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_an_architecture_are_cut_and_compute_what_they_did(ranks: Pools, name: str) -> None:
    if name not in architectures():
        pytest.skip(f"this transformers has no {name}")
    row = verdict_of(ranks(2).run(examine, reference_of(name), False, False, timeout=LIMIT_S))
    assert row["status"] == "right" and row["cut"] >= 0.95, row


def _scale_a_gradient(given: Reference, factor: float) -> dict[str, Any]:
    """What the comparison says of a model that is right, and of one with a gradient that is off."""
    found = examine(given, False, False)
    first = next(name for name, gradient in given.exact.gradients.items() if gradient is not None)
    changed = given.exact.gradients[first]
    assert changed is not None
    given.exact.gradients[first] = factor * changed
    return {"first": first, "right": found["wrong"], "wrong": examine(given, False, False)["wrong"]}


@pytest.mark.full("test_models.py has faults that its comparison, the same one, must find")
@pytest.mark.gloo
@pytest.mark.parametrize("factor", [1 + 1e-8, 1.02])
def test_a_gradient_that_is_off_is_wrong(ranks: Pools, factor: float) -> None:
    """Also by less than what a model that amplifies its roundings may be: this one does not."""
    for found in ranks(2).run(_scale_a_gradient, reference_of("gpt2"), factor, timeout=LIMIT_S):
        assert not found["right"]
        assert f"gradient of {found['first']}" in found["wrong"]


@pytest.mark.cpu
def test_what_cannot_be_built_says_why() -> None:
    part = next(name for name, known in architectures().items() if not known.kind)
    with pytest.raises(CannotBuild) as raised:
        reference_of(part)
    assert raised.value.stage == "class" and raised.value.reason


@pytest.mark.cpu
def test_missing_gradients_and_shapes_count() -> None:
    ones = torch.ones(3)
    assert compare._gradient_apart(None, ones, 1.0) > 0.5
    assert compare._gradient_apart(ones, None, 1.0) > 0.5
    assert compare._gradient_apart(None, None, 1.0) == 0
    assert compare._gradient_apart(ones[:2], ones, 1.0) == float("inf")
    assert compare._gradient_apart(ones * float("nan"), ones, 1.0) == float("inf")
    assert list(compare._apart({}, {"logits": ones}, 1e-9)) == ["output logits is gone"]


@pytest.mark.cpu
@pytest.mark.parametrize("asks", ["float", "to", "softmax"])
def test_what_asks_for_fp32_inside_is_judged_in_fp64(asks: str) -> None:
    """A norm that rounds to fp32 in the judge would let an error of 1e-6 pass."""
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)

    def norm(x: torch.Tensor) -> torch.Tensor:
        if asks == "softmax":
            return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)
        wide = x.float() if asks == "float" else x.to(torch.float32)
        return (wide * torch.rsqrt(wide.square().mean() + 1e-6)).to(x.dtype)

    exact = torch.softmax(x, -1) if asks == "softmax" else x * torch.rsqrt(x.square().mean() + 1e-6)
    with computing(torch.float64, doubles=True):
        torch.testing.assert_close(norm(x), exact, rtol=1e-15, atol=1e-15)
    assert not torch.allclose(norm(x), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.cpu
def test_small_configurations_fit_together() -> None:
    from transformers import LlamaConfig, LlavaConfig, Qwen3NextConfig

    small = small_config(LlamaConfig, {"vocab_size": 77})
    assert small.hidden_size == small.num_attention_heads * small.head_dim
    assert (small.num_hidden_layers, small.num_key_value_heads, small.vocab_size) == (2, 2, 77)
    assert small_config(LlavaConfig, {}).vision_config.hidden_size == small.hidden_size
    kinds = small_config(Qwen3NextConfig, {}).layer_types
    assert len(kinds) == 2 == len(set(kinds))


@pytest.mark.cpu
def test_a_small_backbone_hands_on_as_many_stages_as_the_large_one() -> None:
    from transformers import DepthAnythingConfig, UperNetConfig

    layers = small_config(DepthAnythingConfig, {}).backbone_config
    assert layers.num_hidden_layers == 4 == len(layers.out_features)
    assert small_config(UperNetConfig, {}).backbone_config.out_features == ["stage1", "stage2", "stage3", "stage4"]


@pytest.mark.cpu
def test_windows_of_merged_patches_hold_several() -> None:
    from transformers import Qwen2_5_VLConfig

    vision = small_config(Qwen2_5_VLConfig, {}).vision_config
    assert vision.window_size == 2 * vision.spatial_merge_size * vision.patch_size


@pytest.mark.cpu
def test_a_part_is_built_where_the_whole_has_no_forward() -> None:
    if "bark" not in architectures():
        pytest.skip("this transformers has no bark")
    found = reference_of("bark semantic")
    assert found.kind == "BarkSemanticModel"
    assert float(found.plain["logits"].abs().max()) > 0


@pytest.mark.cpu
def test_rows_by_the_sizes_of_a_small_model_are_counted_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum(published_bytes("autoformer").values()) > 100_000
    monkeypatch.delitem(CHANGES, "autoformer")
    with pytest.raises(ValueError, match="prediction_length"):
        published_bytes("autoformer")
    told([{"cut": 1.0, "pairs": 0.95}, {"cut": 1.0, "pairs": 0.5}, {"cut": 1.0, "pairs": 1.0, "small": "why"}, {}])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("2 planned, by the sizes of the default") and "body cut, 1 with" in first
    assert second.startswith("1 planned, by the sizes of the small model")


def test_output_heads_are_no_part_of_the_body_whatever_they_are_called() -> None:
    named, unnamed, body = nn.Linear(2, 3), nn.ModuleList([nn.Linear(2, 3)]), nn.Linear(2, 2)
    model = nn.ModuleDict({"named": named, "lm_heads": unnamed, "body": body})
    model.get_output_embeddings = lambda: named  # type: ignore[assignment]
    assert {name for name, one in model.named_modules() if id(one) in output_heads(model)} == {
        "named", "lm_heads", "lm_heads.0"
    }  # fmt: skip


@pytest.mark.cpu
def test_a_layer_that_is_declared_to_be_tied_to_a_table_is_an_output_head() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "out": nn.Linear(4, 8), "last": nn.Linear(4, 8)})
    model._tied_weights_keys = {"out.weight": "table.weight", "last.weight": "out.weight"}  # type: ignore[assignment]
    assert {name for name, one in model.named_modules() if id(one) in output_heads(model)} == {"out"}


class Positions(nn.Module):
    """Parameters that are added, and others."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"added": (1, 4, 8), "picked": (9, 8), "resized": (1, 8, 2, 2), "beside": (1, 2, 8), "once": (9, 8)}
        shapes |= {"bias": (8,), "gain": (4, 8), "weight": (8, 8), "both": (8, 8)}
        self.tables = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})

    def forward(self, x: torch.Tensor, *, other: bool = False) -> torch.Tensor:
        one = self.tables
        x = x + one["added"] + 2 * one["picked"][torch.arange(4)] + one["bias"]
        x = x + nn.functional.interpolate(one["resized"], size=(1, 4), mode="bicubic").flatten(2).transpose(1, 2)
        x = x * one["gain"] @ one["weight"] + one["both"][:4]
        x = torch.cat([x, one["beside"].expand(len(x), -1, -1)], 1)
        return x @ one["both"] if other else x


@pytest.mark.cpu
def test_parameters_whose_rows_are_looked_up_and_added_are_tables() -> None:
    x = torch.randn(2, 4, 8)
    calls = [("wrong", {}), ("one", {"x": x}), ("other", {"x": x, "other": True})]
    expected = {f"tables.{name}" for name in ("added", "picked", "resized", "beside")}
    assert tables(Positions(), calls) == expected
    assert tables(Positions(), calls[:2]) == expected | {"tables.both"}, "as far as its calls show"


class _Unfinished(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.listed = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])
        self.dropped: nn.Module = nn.Linear(2, 2)
        self.forgotten = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.listed:
            x = one(x)
        y: torch.Tensor = self.called(x)
        return y


@pytest.mark.cpu
def test_modules_that_no_code_mentions_are_told_from_those_that_some_does() -> None:
    assert [path[:4] for path in never_called(_Unfinished())] == ["drop", "forg"]
