"""Plans as data: what they say, how they are printed, saved and checked, and which mistakes they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models import zoo
from tests.planning.leaking import Leaking
from tpkernels import cli
from tpkernels.nn.digests import json_digest
from tpkernels.planning.entries.plan import VERSION
from tpkernels.sharding import Channels, Column, CopiedHeads, Replicate, Row, Vocabulary

pytestmark = pytest.mark.cpu


def kinds(plan: tpk.ShardingPlan) -> dict[str, str]:
    return {entry.path: type(entry.style).__name__ for entry in plan.entries}


# ---------------------------------------------------------------- what is found


def test_a_column_is_followed_by_its_row_and_loners_are_whole_in_and_out() -> None:
    plan = tpk.make_plan(zoo.mlp(), 2)
    assert plan["0"].style == Column() and plan["2"].style == Row()
    assert plan["4"].style == Column() and plan["5"].style == Row()
    loner = tpk.make_plan(nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)), 2)
    assert loner["0"].style == Column(gather_output=True), "a softmax needs all features"
    assert loner["2"].style == Row(split_input=True)
    assert "expands" in loner["0"].reason and "contracts" in loner["2"].reason


def test_the_strategy_of_rules_takes_every_layer_by_itself() -> None:
    plan = tpk.make_plan(zoo.mlp(), 2, strategy="rules")
    assert kinds(plan) == {"0": "Column", "2": "Row", "4": "Column", "5": "Row"}
    assert all(e.style in (Column(gather_output=True), Row(split_input=True)) for e in plan.entries)


def test_a_packed_projection_is_cut_by_segments_and_the_count_of_heads_is_localised() -> None:
    plan = tpk.make_plan(zoo.Attention(), 2)
    assert plan["qkv"].style == Column(segments=(24, 24, 24))
    assert plan.attributes == {"num_heads": (4, (2, 2))}
    assert "4 heads, 2 per rank" in plan["qkv"].reason


def test_layers_in_lists_dicts_and_under_several_names_are_planned_once() -> None:
    plan = tpk.make_plan(zoo.Nested(), 2)
    assert plan["again.layers.up"] is plan["inner.1.layers.up"]
    assert [entry.path for entry in plan.entries].count("inner.1.layers.up") == 1
    assert plan["head"].style == Column(gather_output=True), "the residual in front of it is whole"


def test_what_cannot_be_cut_is_reported_with_a_reason() -> None:
    plan = tpk.make_plan(zoo.ConvLSTM(), 3)
    assert plan["head"].style == Row(split_input=True)
    for path, words in (("lstm", "LSTM"), ("norm", "norm")):
        assert plan[path].style == Replicate() and words in plan[path].reason
    assert plan["conv"].style == Channels(), "8 channels are 3, 3 and 2"
    assert plan.replicated_bytes == 4 * (sum(p.numel() for p in zoo.ConvLSTM().parameters()) - 36 - 8 * 5 * 3 - 8)


LEAKS = (
    "softmax", "sum", "roll", "residual", "scalar activation", "vector parameter", "size", "shuffle", "second output",
    "flip", "interleaved pairs", "weight read", "whole matrix", "complex", "size of a tensor",
    "size that fills", "size that scales", "size that chooses", "own backward", "kept", "parameter returned",
    "evaluation",
)  # fmt: skip


@pytest.mark.parametrize("how", [*LEAKS, "integer", "none"])  # no gradient passes an integer
def test_features_that_meet_those_of_other_ranks_are_not_cut_in_one_go(how: str) -> None:
    plan = tpk.make_plan(Leaking(how), 2, example_inputs=torch.zeros(5, 6))
    assert (plan["up"].style == Column()) is (plan["down"].style == Row()) is (how in ("integer", "none"))


def test_code_that_reshapes_a_whole_tensor_in_place_leaves_the_layers_beside_it_cut() -> None:
    """The masks of BigBird's sparse attention."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            mask = x.detach()[..., 0].sign()
            mask.unsqueeze_(-1)
            y: Tensor = mask * self.down(self.up(x).relu())
            return y

    plan = tpk.make_plan(Masked(), 2, example_inputs=torch.zeros(5, 6))
    assert (plan["up"].style, plan["down"].style) == (Column(), Row())


class PerHead(nn.Module):
    """A norm with weights for every head's features: whole parameters that work on parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(3), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x).view(*x.shape[:-1], -1, 3))
        y: Tensor = self.down(h.flatten(-2))
        return y


def test_whole_parameters_that_work_on_parts_have_their_gradients_summed() -> None:
    plan = tpk.make_plan(PerHead(), 2, example_inputs=torch.zeros(5, 6))
    assert plan["up"].style == Column() and plan["norm"].style == Replicate(sequence_parallel=True)
    assert plan["norm"].backward == "all-reduce of dw"


def test_a_model_that_cannot_be_traced_is_planned_layer_by_layer_and_says_so() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(x).relu()) if x.sum().item() > 0 else x
            return y

    plan = tpk.make_plan(Moody(), 2)
    assert plan["up"].style == Column(gather_output=True) and plan["down"].style == Row(split_input=True)
    assert "it cannot be traced" in plan.notes[0] and "note: no data flow" in str(plan)
    assert plan.fallback == plan.notes[0] and not tpk.make_plan(nn.Sequential(nn.Linear(6, 12)), 2).fallback
    assert plan.example == ""
    assert "in one step: ? (what 2 modules send, whose rows are not known); pass example_inputs" in str(plan)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_without_data_flow_nobody_is_believed_who_recommends_a_cut(name: str) -> None:
    """A tp_plan, or a plan file, is made for other code than ours: without a proof every layer is whole in and out."""
    model = zoo.build(name)
    for one in (model, getattr(model, model.base_model_prefix)):

        class Moody(type(one)):  # type: ignore[misc]
            def forward(self, input_ids: Tensor, **given: Any) -> Any:
                return super().forward(input_ids if input_ids.sum().item() >= 0 else -input_ids, **given)

        one.__class__ = Moody
    plan = tpk.make_plan(model, 2)
    assert "it cannot be traced" in plan.notes[0]
    for entry in plan.entries:
        alone = not isinstance(entry.style, Column) or entry.style.gather_output
        assert alone and (not isinstance(entry.style, Row) or entry.style.split_input), entry
    said = [entry.reason for entry in plan.entries if "says" in entry.reason]
    assert said and not plan.attributes


class ReadsWeights(nn.Module):
    """Uses one layer's weight without calling it, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.called(nn.functional.linear(x if x.sum().item() > 0 else -x, self.read.weight))
        return y


def test_without_data_flow_a_layer_whose_weight_is_read_stays_whole() -> None:
    plan = tpk.make_plan(ReadsWeights(), 2)
    assert "cannot be traced" in plan.notes[0]
    assert plan["read"].style == Replicate() and "ReadsWeights" in plan["read"].reason
    assert plan["called"].style == Row(split_input=True)


def centred(x: Tensor) -> Tensor:
    """x, whose gradient loses its mean over all features, or over those of a rank."""
    if x.requires_grad:
        x.register_hook(lambda dx: dx - dx.mean(-1, keepdim=True))
    return x


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_is_cut_where_code_hooks_gradients_which_a_run_does_not_show(inside: bool) -> None:
    class Hooks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

        if inside:

            def forward(self, x: Tensor) -> Tensor:
                h = self.up(x)
                if h.requires_grad:
                    h.register_hook(lambda dh: dh - dh.mean(-1, keepdim=True))
                y: Tensor = self.down(h)
                return y
        else:

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.down(centred(self.up(x)))
                return y

    plan = tpk.make_plan(nn.ModuleList([Hooks(), zoo.mlp()])[0], 2, example_inputs=torch.zeros(5, 6))
    assert plan["up"].style == Column(gather_output=True) and plan["down"].style == Row(split_input=True)


def test_attention_of_torch_whose_weight_is_read_stays_whole() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.attention(x, x, x)[0] * self.attention.in_proj_weight.mean())
            return y

    plan = tpk.make_plan(Reads(), 2)
    assert plan["attention"].style == Replicate() and "without calling" in plan["attention"].reason
    assert plan["head"].style == Column(gather_output=True)


def test_a_parameter_that_a_closure_keeps_is_refused_by_name_and_a_module_is_not() -> None:
    class Closure(nn.Module):
        def __init__(self, of_module: bool) -> None:
            super().__init__()
            self.up, self.down, self.scale = nn.Linear(6, 12), nn.Linear(12, 6), nn.Parameter(torch.ones(1))
            up, scale = self.up, self.scale
            self.first = up if of_module else lambda x: up(x) * scale

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.first(x).relu())
            return y

    with pytest.raises(ValueError, match=r"\['scale'\] are used by code that keeps them"):
        tpk.make_plan(Closure(False), 2)
    assert tpk.make_plan(Closure(True), 2)["down"].style == Row()


def test_a_plan_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = zoo.build("bert")
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    state, kinds_before = torch.get_rng_state(), [type(module) for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    tpk.make_plan(model, 2, sequence_parallel=True)
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    assert kinds_before == [type(module) for module in model.modules()]
    assert all(vars(module).keys() == old.keys() for module, old in zip(model.modules(), attributes, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_key_value_heads_that_do_not_divide_are_copied() -> None:
    plan = tpk.make_plan(zoo.build("qwen2"), 4)
    assert plan["model.layers.0.self_attn.k_proj"].style == CopiedHeads(heads=2, copies=4)
    assert plan.attributes["model.layers.0.self_attn.num_key_value_groups"] == (6, (3, 3, 3, 3))
    assert tpk.make_plan(zoo.build("qwen2"), 2)["model.layers.0.self_attn.k_proj"].style == Column()


def test_sources_are_named_in_their_order() -> None:
    plan = tpk.make_plan(zoo.build("llama"), 2, overrides={"*.lm_head": "replicate"})
    assert plan["lm_head"].source == "override"
    assert plan["model.layers.0.mlp.up_proj"].source == "tp_plan"
    assert plan["model.embed_tokens"].style == Vocabulary()
    assert tpk.make_plan(zoo.build("bert"), 2)["bert.encoder.layer.0.output.dense"].source == "plan file"
    assert tpk.make_plan(zoo.mlp(), 2)["0"].source == "data flow"
    assert tpk.make_plan(zoo.mlp(), 2, strategy="rules")["0"].source == "rule"


# ---------------------------------------------------------------- print, save, check


def test_bytes_follow_from_the_plan() -> None:
    plan = tpk.make_plan(nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 4)), 3,
                         example_inputs=torch.zeros(7, 4))  # fmt: skip
    assert plan.full_bytes == 4 * (4 * 10 + 10 + 10 * 4 + 4)
    assert plan.replicated_bytes == 4 * 4, "the row's bias"
    assert plan.bytes_per_rank == tuple(4 * (4 * n + n + 4 * n + 4) for n in (4, 4, 2))
    # An all-reduce of 7 rows of 4 numbers forward, at best 2 (W - 1) / W of the payload per rank; backward the model's
    # input needs no gradient.
    assert plan["2"].wire_bytes == 2 * 7 * 4 * 4 * 2 // 3 and plan["0"].wire_bytes == 0
    assert plan.wire_bytes == plan["2"].wire_bytes + plan["0"].wire_bytes


def test_a_plan_survives_json_and_a_changed_or_cut_off_one_is_refused() -> None:
    plan = tpk.make_plan(zoo.build("gpt2"), 2, sequence_parallel=True)
    text = plan.to_json()
    assert tpk.ShardingPlan.from_json(text) == plan
    for broken, words in (
        (text[: len(text) // 2], "cut off"),
        (text.replace('"world_size": 2', '"world_size": 4', 1), "does not match|do not match its digest"),
        ("[]", "must say"),
        (text.replace(f'"version": {VERSION}', '"version": 99', 1), "version 99"),
        (f'{{"format": "tpkernels.ShardingPlan", "version": {VERSION}}}', "digest"),
    ):
        with pytest.raises(ValueError, match=words):
            tpk.ShardingPlan.from_json(broken)


def test_plans_of_earlier_versions_are_read() -> None:
    plan = tpk.make_plan(nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 4)), 2)
    document = json.loads(plan.to_json())
    older = replace(plan, fused=(), unfused=(), example="")
    for version, without, expected in (
        (7, ("statistics", "statistic_bytes"), plan),
        (6, ("statistics", "statistic_bytes", "strategy"), plan),
        (4, ("statistics", "statistic_bytes", "strategy", "by_weight", "arguments"), plan),
        (3, ("arguments", "fused", "unfused", "example"), older),
    ):
        body = {key: value for key, value in document["plan"].items() if key not in without}
        old = document | {"version": version, "plan": body, "digest": json_digest(body)}
        assert tpk.ShardingPlan.from_json(json.dumps(old)) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.pop("entries"), "must have"),
        (lambda body: body.update(extra=1), "must have"),
        (lambda body: body["entries"][0].update(style={"style": "pickle"}), "must name one of"),
        (lambda body: body["entries"][0].update(style={"style": "column", "unit": "3"}), "must be a int"),
        (lambda body: body["entries"][0].update(style={"style": "column", "device": 1}), "no option"),
        (lambda body: body["entries"][0].update(path=3), "must be text"),
        (lambda body: body["entries"][0]["parameters"][0].update(shape=[-1]), "list of sizes"),
        (lambda body: body.update(world_size=0), "world_size|local shapes"),
        (lambda body: body.update(attributes=[1]), "not those of a plan"),
        (lambda body: body.update(shared=[["0", "2"]]), "cannot share an input"),
        (lambda body: body.update(arguments={"0.x": [0, 1]}), "a dimension and a number of heads"),
        (lambda body: body.update(arguments={"0.x": 3}), "not those of a plan"),
        (lambda body: body.update(statistics={"0": [14, [14]]}), "values for 1 ranks"),
        (lambda body: body.update(cut_results=[[0, 1]]), "a result that is cut has a number"),
        (lambda body: body.update(statistics={"0": [14, [14, 0]]}), "those of its ranks"),
    ],
)
def test_a_plan_file_with_contents_of_the_wrong_kind_is_refused(change: Any, words: str) -> None:
    document = json.loads(tpk.make_plan(zoo.mlp(), 2).to_json())
    body = document["plan"]
    assert document["digest"] == json_digest(body)
    change(body)
    with pytest.raises(ValueError, match=words):
        tpk.ShardingPlan.from_json(json.dumps(document | {"digest": json_digest(body)}))


def test_validate_names_the_differences_of_another_model() -> None:
    plan = tpk.make_plan(zoo.mlp(), 2)
    plan.validate(zoo.mlp())
    with pytest.raises(ValueError, match=r"'0' has parameters .*\(14, 6\)"):
        plan.validate(nn.Sequential(nn.Linear(6, 14), *list(zoo.mlp())[1:]))
    with pytest.raises(ValueError, match="there is no module '0'"):
        plan.validate(zoo.Nested())
    heads = tpk.make_plan(zoo.Attention(heads=4), 2)
    with pytest.raises(ValueError, match="num_heads is 6, the plan expects 4"):
        heads.validate(zoo.Attention(heads=6))


# ---------------------------------------------------------------- bad input


def test_bad_input_is_refused_with_what_to_do() -> None:
    for model, mesh, options, words in (
        (nn.Sequential(nn.Conv2d(3, 1, 3)), 2, {}, r"nothing to shard.*too few channels \(1\)"),
        (zoo.mlp(), 2, {"overrides": {"0": "channels"}}, "is a Linear that cannot be cut by channels"),
        (zoo.mlp(), 0, {}, "number of ranks from 1"),
        (zoo.mlp(), 2, {"strategy": "best"}, "strategy must be one of"),
        (zoo.mlp(), 2, {"example_inputs": torch.zeros(3, 5)}, "does not run with the example_inputs"),
        (zoo.mlp(), 2, {"example_inputs": 3}, "must be a tensor, a tuple"),
        (zoo.build("bert"), 5, {}, "5 ranks are more than the 4 heads"),
        (zoo.mlp(), 2, {"strategy": "rules", "sequence_parallel": True}, "give example_inputs"),
    ):
        with pytest.raises(ValueError, match=words):
            tpk.make_plan(model, mesh, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the command


def test_the_command_plans_a_configuration_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "plan.json"
    options = ["--tp", "8", "--sequence-parallel", "--override", "*.lm_head=replicate", "--json", str(file)]
    assert cli.main(["plan", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    assert "14336x4096 -> 1792x4096" in printed and "32 heads, 4 per rank" in printed
    assert tpk.ShardingPlan.from_json(file.read_text())["lm_head"].style == Replicate()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("tests.models.zoo:nothing", "has no function 'nothing'"),
        ("no_such_module_here:mlp", "no_such_module_here"),
    ],
)
def test_the_command_explains_bad_arguments(source: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", source])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_plans_what_a_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tests.models.zoo:mlp", "--tp", "2"]) == 0
    assert "13x6 -> 7x6 .. 6x6" in capsys.readouterr().out


def test_a_configuration_that_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such"')
    assert cli.main(["plan", str(tmp_path), "--tp", "2"]) == 2
    assert "not a configuration that transformers understands" in capsys.readouterr().err
