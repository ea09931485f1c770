"""What belongs to each head is cut with it: norms over all heads, parameters, numbers of a config; and layers with code
of their own are cut inside of that code."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models.architectures.reference import build
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning import per_head
from tests.planning.by_value import problems
from tests.planning.per_head import Attention
from tpkernels.errors import UnprovenCallWarning
from tpkernels.planning.modules import layers
from tpkernels.planning.modules.layers import layer_of
from tpkernels.planning.modules.numbers import number_of, set_number
from tpkernels.planning.styles import Column, PartNorm, Replicate, Row, Sliced, Vocabulary
from tpkernels.testing.spawn import Pools

X = torch.zeros(2, 5, per_head.WIDTH)
ALIBI = ("alibi one", "alibi each")
CUT = ("norms", "norm of heads", "centred", "layer norm", "sinks", "bias", "bias of a kernel", "gain", "config",
       "kernel", "distances", "disentangled", "latent", "latent with a gate", "convolved",
       "convolution called")  # fmt: skip


def made(how: str) -> nn.Module:
    if how == "words":
        return per_head.Words()
    if how.startswith("disentangled"):
        return per_head.Disentangled(how.removeprefix("disentangled "))
    if how in ("handed", "shared"):
        return per_head.Handed() if how == "handed" else per_head.Shared()
    if how.startswith("alibi"):
        return per_head.Alibi(how.removeprefix("alibi "), 7)  # 4 and 3 heads, or 3, 3 and 1
    if how.startswith("convol"):
        return per_head.Convolved(how)
    return per_head.Latent(how) if how.startswith("latent") else Attention(how)


@pytest.mark.cpu
@pytest.mark.parametrize("how", [
    *CUT[:-1], pytest.param(CUT[-1], marks=pytest.mark.slow("1 s; the same with the number of groups"))
])  # fmt: skip
def test_a_plan_cuts_what_belongs_to_the_heads(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    assert plan["out"].style == Row()
    if how.startswith("latent"):
        assert plan["up"].style == Column(sum_input_gradient=False) and plan["query"].style == Column()
        assert plan["down"].style == Row(split_input=True, summed_gradient=True)
        assert plan["norm"].style == Replicate(sequence_parallel=True)
    elif how == "norms":
        assert plan["query_norm"].style == plan["key_norm"].style == PartNorm(1e-5)
        assert plan["query_norm"].wire_bytes == 2 * 2 * 4 * 10 // 2
    elif how.startswith("convol"):
        runs = (12, 12, 24)
        assert plan["qkv"].style == Column(segments=runs) and plan["gate"].style == Column()
        assert plan[""].style == Sliced((("decay", 0),))
        assert plan["conv"].style == Sliced((("bias", 0), ("weight", 0)), (("bias", runs), ("weight", runs)))
        assert plan["conv"].wire_bytes == 2 * 4 * (48 + 3 * 48) // 2
        assert plan.attributes.get("conv.groups", 0) == ((48, (24, 24)) if how == "convolution called" else 0)
    elif how == "disentangled":
        assert plan["key"].style == Column() and plan.attributes == {"heads": (6, (3, 3))} and not plan.whole_draws
    elif how == "distances":
        assert plan["query"].style == Column() and plan["distances"].style == Replicate(sequence_parallel=True)
    elif how == "norm of heads":
        assert plan["query_norm"].style == PartNorm(1e-5)
    elif how in ("centred", "layer norm"):
        assert plan["query_norm"].style == PartNorm(1e-5, centred=True)
        assert plan["query_norm"].wire_bytes == 2 * 2 * 4 * 10
        assert not any(cut.dim for cut in plan["query_norm"].parameters), "weight and bias are cut"
    elif how == "config":
        assert plan["qkv"].style == Column(segments=(24, 24, 24)) and plan.attributes == {"config.heads": (6, (3, 3))}
    elif how == "kernel":
        assert plan[""].style == Sliced((("kernel", 1),))
    elif how.startswith("bias"):
        assert plan["bias"].style == Sliced((("table", 1),))
        assert plan["bias"].parameters[0].local_shapes == ((9, 3), (9, 3))
    else:
        assert plan[""].style == Sliced((("gain" if how == "gain" else "sinks", 0),))
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    plan.validate(made(how))


@pytest.mark.cpu
def test_queries_whose_latent_an_indexer_reads_are_cut_by_heads() -> None:
    """The latent and what reads it are a pair as well, of fewer bytes than the heads."""
    plan = tpk.make_plan(per_head.Indexed(), 2, example_inputs=X)
    assert plan["query"].style == plan["key"].style == plan["value"].style == Column() and plan["out"].style == Row()


@pytest.mark.cpu
@pytest.mark.parametrize("how", [*ALIBI, "alibi learned", "alibi reversed"])
def test_a_rank_is_given_its_heads_of_a_constant_for_all(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    if how in ALIBI:
        assert plan.arguments == {"attention.slopes": (0, 7)}
        assert plan["attention.out"].style == Row(unit=per_head.EACH)
        assert "argument attention.slopes: this rank's of 7 heads" in str(plan)
        again = tpk.ShardingPlan.from_json(plan.to_json())
        assert again == plan and again.cut_arguments == {"attention": {"slopes": (0, 7)}}
        plan.validate(made(how))
        with pytest.raises(ValueError, match="no module 'attention'"):
            plan.validate(Attention(""))
    else:  # its gradient, or the order of the heads, says that a rank needs all
        assert not plan.arguments and plan["attention.out"].style == Column(gather_output=True)


@pytest.mark.cpu
def test_what_one_block_makes_for_its_heads_and_hands_on_is_a_part_of_the_next() -> None:
    plan = tpk.make_plan(per_head.Handed(), 2, example_inputs=X)
    assert plan["first.out"].style == plan["second.out"].style == Row()
    assert plan.attributes == {"first.heads": (6, (3, 3))} and not plan.cut_arguments


@pytest.mark.cpu
def test_tables_of_biases_are_cut_with_the_heads_of_all_blocks() -> None:
    plan = tpk.make_plan(per_head.Shared(), 2, example_inputs=X)
    assert plan["first.out"].style == plan["second.out"].style == Row()
    assert plan[""].style == Sliced((("other", 0), ("table", 1)))


@pytest.mark.cpu
@pytest.mark.parametrize("how", [
    "around the median", "norm of both", "bias of a norm", "order of heads", "sum of all", "read twice",
    "distances read twice", "distances that leave", "disentangled one place", "disentangled places of heads",
    "disentangled places in another order",
    "latent with a whole activation", "latent that leaves", "latent read by a whole layer",
    "convolved over features",
])  # fmt: skip
def test_what_only_looks_so_is_not_cut(how: str) -> None:
    plan = tpk.make_plan(made(how), 2, example_inputs=X)
    styles = [entry.style for entry in plan.entries]
    assert not any(isinstance(style, PartNorm | Sliced) for style in styles)
    if how == "read twice":
        assert plan["out"].style == Row()
    else:
        assert plan["out"].style == Column(gather_output=True)


@pytest.mark.cpu
def test_a_layer_norm_of_heads_is_whole_where_its_sums_would_be_in_no_blocks() -> None:
    plan = tpk.make_plan(made("layer norm"), 2, example_inputs=X, same_bits=2)
    assert plan["query_norm"].style == Replicate() and plan["out"].style == Column(gather_output=True)


@pytest.mark.cpu
@pytest.mark.slow("3 s: builds a model of transformers")
def test_what_is_seen_as_one_head_does_not_refuse_a_model() -> None:
    plan = tpk.make_plan(build("mra"), 2)  # four heads; its blocks of keys have a dimension of one
    attention = "mra.encoder.layer.0.attention"
    assert (
        plan[f"{attention}.self.query"].style == plan[f"{attention}.output.dense"].style == Column(gather_output=True)
    )


@pytest.mark.cpu
def test_layers_with_code_of_their_own_are_cut_inside_of_it() -> None:
    plan = tpk.make_plan(per_head.Words(), 2, example_inputs=torch.zeros(2, 5, dtype=torch.long))
    assert plan["up"].style == Column() and plan["down"].style == Row()
    assert plan["table"].style == Vocabulary() and plan["head"].style == Column(gather_output=True)
    plan = tpk.make_plan(per_head.Words(per_head.Rounded), 2, example_inputs=torch.zeros(2, 5, dtype=torch.long))
    assert plan["up"].style == Replicate() and layer_of(per_head.Rounded(3, 5)) is None


@pytest.mark.cpu
def test_a_number_of_a_config_is_another_one_for_one_module_alone() -> None:
    first, second = Attention("config"), Attention("config")
    second.config = config = first.config
    set_number(first, "config.heads", 2)
    assert (number_of(first, "config.heads"), number_of(second, "config.heads")) == (2, 6)
    config.other = 5
    both = nn.ModuleList([first, second])
    for pair in (both, copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert isinstance(pair[0].config, type(config)) and (pair[0].config.heads, pair[0].config.other) == (2, 5)
        assert (pair[1].config.heads, pair[1].config.other) == (6, 5)
        pair[1].config.other = 7
        assert pair[0].config.other == 7, "it follows the config that it is a view of"
        pair[1].config.other = 5


@pytest.mark.cpu
@pytest.mark.parametrize("how", ["in one module", "by blocks", "drops itself"])
def test_what_cannot_be_drawn_alike_is_gathered(how: str) -> None:
    model = per_head.Disentangled(how, p=0.5)
    if how == "in one module":
        model.drop = model.drop_places
    plan = tpk.make_plan(model, 2, example_inputs=X, same_bits=2 if how == "by blocks" else 0)
    assert plan["query"].style == Column(gather_output=True) and not plan.whole_draws


def draws(checkpointed: bool) -> dict[str, Any]:
    """What dropout gives of places and of heads, on each rank; gradients with and without a second forward."""
    torch.manual_seed(0)
    plain = per_head.Disentangled(p=0.5).double()
    plan = tpk.make_plan(plain, tp_mesh(), example_inputs=X.double())
    model = tpk.parallelize(plain, tp_mesh(), tpk.ShardingPlan.from_json(plan.to_json()))
    found: dict[str, Any] = {"plan": (plan.random, plan.whole_draws)}
    masks: dict[str, Tensor] = {}
    for name in ("drop_places", "drop"):

        def dropped(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            masks[name] = output.detach() == 0

        dropped.takes_parts = True  # type: ignore[attr-defined]
        model.get_submodule(name).register_forward_hook(dropped)
    x = torch.ones(2, 5, per_head.WIDTH, dtype=torch.float64, requires_grad=True)
    for again in (False, True):
        torch.manual_seed(7)
        y = checkpoint(model, x, use_reentrant=False) if again and checkpointed else model(x)
        y.square().sum().backward()
        found[f"gradient {again}"], x.grad = x.grad, None
    tpk.nn.check_rng(tp_mesh())
    return found | masks


@pytest.mark.gloo
def test_what_all_ranks_have_is_dropped_alike_between_layers_whose_heads_are_not(ranks: Pools) -> None:
    """DeBERTa's places: the layer that begins the heads is called for them as well, once they have begun."""
    one, other = ranks(2).run(draws, True, timeout=LIMIT_S)
    assert one["plan"] == other["plan"] == ((("query", "out"),), ("drop_places",))
    assert torch.equal(one["drop_places"], other["drop_places"]) and one["drop_places"].any()
    assert not torch.equal(one["drop"], other["drop"])
    for found in (one, other):
        assert torch.equal(found["gradient False"], found["gradient True"])


def by_value(how: str) -> list[str]:
    torch.manual_seed(0)
    x = torch.randint(0, per_head.WORDS, (2, 5)) if how == "words" else torch.randn(2, 5, per_head.WIDTH).double()
    rows = {"words": "down", "handed": "second.out", "shared": "second.out"} | dict.fromkeys(ALIBI, "attention.out")
    return problems(how, made(how), x, rows.get(how, "out"))


def all_by_value(full: bool) -> list[str]:
    some = (
        "disentangled",
        "norms",
        "norm of heads",
        "bias",
        "distances",
        "latent with a gate",
        "convolved",
        "alibi each",
    )
    hows = (*(CUT + ALIBI if full else some), "words", "shared", *(["handed"] if full else []))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)  # each first call is followed, with rules for these layouts
        return [problem for how in hows for problem in by_value(how)]


def layer_norm_by_value() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        return by_value("layer norm")


@pytest.mark.gloo
def test_a_layer_norm_of_heads_is_the_one_over_all_ranks(ranks: Pools) -> None:
    assert ranks(2).run(layer_norm_by_value, timeout=LIMIT_S) == [[], []]


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize("world", [3, 2])
@pytest.mark.slow("5 s; that they are cut is asked without training")
def test_they_compute_and_train_as_the_unsharded_model(ranks: Pools, world: int, full: bool) -> None:
    assert ranks(world).run(all_by_value, full, timeout=LIMIT_S) == [[]] * world


@pytest.fixture
def _registered() -> Any:
    tpk.register_layer(per_head.Projection, "linear")
    yield
    del layers._REGISTERED[per_head.Projection]


def registered_by_value() -> list[str]:
    tpk.register_layer(per_head.Projection, "linear")
    torch.manual_seed(0)
    plain = nn.Sequential(per_head.Projection(6, 14), nn.GELU(), per_head.Projection(14, 6)).double()
    model, x = copy.deepcopy(plain), torch.randn(3, 6).double()
    tpk.parallelize(model, tp_mesh(), example_inputs=x)
    del layers._REGISTERED[per_head.Projection]
    outputs = [net(x) for net in (model, plain)]
    for out in outputs:
        out.square().sum().backward()
    problem = differs(outputs[0], outputs[1], 1e-11)
    kinds = [type(module) for module in model]
    cut = issubclass(kinds[0], tpk.nn.ColumnParallelLinear) and issubclass(kinds[2], tpk.nn.RowParallelLinear)
    return ([] if cut else [f"{kinds}"]) + ([problem] if problem else []) + compare_tensors(model, plain, 1e-11)


@pytest.mark.gloo
def test_a_registered_class_is_cut_as_torchs_layer(ranks: Pools) -> None:
    assert ranks(2).run(registered_by_value, timeout=LIMIT_S) == [[], []]


@pytest.mark.cpu
def test_a_registered_class_that_holds_more_stays_whole(_registered: None) -> None:
    layer: Any = per_head.Projection(6, 14)
    assert layer_of(layer) == layers.Layer("linear", 6, 14) and layers.kind_of(layer) == "Linear"
    layer.gain = nn.Parameter(torch.ones(1))
    assert layer_of(layer) is None
    for cls, kind in ((per_head.Projection, "row"), (nn.Linear, "linear"), (3, "linear")):
        with pytest.raises(ValueError, match=r"kind must be one of|cls must be a subclass"):
            tpk.register_layer(cls, kind)  # type: ignore[arg-type]


@pytest.mark.cpu
def test_what_any_of_several_calls_runs_is_cut_and_the_plan_holds_for_all() -> None:
    text, image = torch.zeros(2, 5, 8), torch.zeros(2, 3, 8)
    alone = tpk.make_plan(per_head.Towers(), 2, example_inputs=text)
    assert alone["text.0"].style == Column() and alone["image.0"].style == Column(gather_output=True)
    assert "not called by the example" in alone["image.0"].reason
    both = tpk.make_plan(per_head.Towers(), 2, example_inputs=[(text,), {"text": text, "image": image}])
    assert both["text.0"].style == both["image.0"].style == Column() and both["image.2"].style == Row()
    assert "text 2x5x8; and text 2x5x8, image 2x3x8" in both.example
    assert tpk.make_plan(per_head.Between(), 2, example_inputs=text)["text.2"].style == Row()
    plan = tpk.make_plan(per_head.Between(), 2, example_inputs=[(text,), (text, image)])
    assert plan["text.2"].style != Row(), "the second call flips the features"
    with pytest.raises(ValueError, match=r"example_inputs\[1\]"):
        tpk.make_plan(per_head.Towers(), 2, example_inputs=[(text,), (text, torch.zeros(2, 3, 9))])
