"""Streams of convolutions that stay cut by channels: what is sent between two that are cut, and at the stream's end."""

from __future__ import annotations

import copy

import pytest
import torch

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, tp_mesh
from tests.planning.paired_convolutions import Backbone, inputs, made
from tests.planning.test_convolution_pairs import PAIRS, differing, paired, planned
from tpkernels.planning.styles import Channels
from tpkernels.testing.spawn import Pools


@pytest.mark.cpu
def test_a_convolution_between_two_that_are_cut_scatters_what_it_sums() -> None:
    """The streams of 23 and 26 channels stay cut, and nothing is sent of them but for what the shortcut makes."""
    plan, both = planned("stream", 2), Channels(gather_output=False, inputs=True)
    gathering = Channels(gather_output=False, inputs=True, gather_input=True)
    frozen = tpk.make_plan(made("stream").requires_grad_(False), 2, example_inputs=inputs("stream"))
    elements, item = 2 * 8 * 6, 8
    for name, style, channels, forward, backward in (
        ("2.layers.0", both, 5, "reduce-scatter of y", "all-gather of dy"),
        ("2.layers.3", both, 5, "reduce-scatter of y", "all-gather of dy"),
        ("2.layers.6", gathering, 5, "all-gather of x", "reduce-scatter of dx"),
        ("3.beside", gathering, 23, "all-gather of x", "reduce-scatter of dx"),
    ):
        entry = plan[name]
        assert (entry.style, entry.forward, entry.backward) == (style, forward, backward), name
        assert entry.wire_bytes == elements * item * channels, f"{name} sends both halves of what is summed"
        assert frozen[name].backward == "-", "nobody wants a gradient"
    assert frozen["3.beside"].wire_bytes == elements * item * 23 // 2
    assert plan["3.beside"].reason == "gathers what 0, 6 cut, and gives channels, up to 4"
    assert frozen["2.layers.0"].wire_bytes == elements * item * 5 // 2
    assert plan["2.layers.0"].reason == "sums what 0, 6 cut, and scatters the sum, up to 3"
    bias = planned("bottleneck", 2)["layers.3"].parameters[1]
    assert (bias.dim, bias.local_shapes) == (0, ((4,), (3,))), "a rank adds what it has of the bias to what it gives"
    groups = {"2.layers.6": "replicate"}  # the stream of 23 is whole now, and what is within the blocks is not
    assert (
        paired(planned("stream", 2, overrides=groups))
        == "2.layers.0 2.layers.3 3.layers.0 3.layers.3 3.layers.6 3.beside 4"
    )


@pytest.mark.cpu
def test_a_convolution_that_gives_more_than_it_takes_gathers_what_it_takes() -> None:
    """Each block of the decoder of a codec gives more numbers than it takes: with sums scattered, all that is cut would
    send more than two of its blocks do by themselves."""
    plan = planned("decoder", 2)
    gathering = {entry.path for entry in plan.entries if isinstance(entry.style, Channels) and entry.style.gather_input}
    assert gathering == {"3", "6"}
    assert plan["6"].wire_bytes == 2 * 8 * (48 * 4) * 8, "what goes in, both ways"
    assert (plan["6"].forward, plan["6"].backward) == ("all-gather of x", "reduce-scatter of dx")
    with pytest.raises(ValueError, match="an input is gathered by a convolution that takes and gives this rank's"):
        Channels(inputs=True, gather_input=True)


@pytest.mark.cpu
def test_a_stream_may_end_in_what_the_model_returns() -> None:
    def made_with(what: str) -> tpk.ShardingPlan:
        return tpk.make_plan(Backbone(what).double(), 2, example_inputs=inputs("two"))

    plan, elements, item = made_with(""), 2 * 8 * 6, 8
    assert paired(plan) == PAIRS["backbone"][0]
    assert plan.cut_results == ((0, 1, 23), (2, 1, 23)), "the one between is whole"
    assert plan.result_bytes == (elements + 2) * item * 23 // 2
    assert plan.wire_bytes == plan.result_bytes + sum(entry.wire_bytes or 0 for entry in plan.entries)
    assert "2 of the results are gathered, which sends 8.8 KiB" in str(plan)
    assert tpk.ShardingPlan.from_json(plan.to_json()) == plan
    alone = dict.fromkeys(PAIRS["backbone"][0].split(), "channels")
    gathered_each = tpk.make_plan(Backbone().double(), 2, example_inputs=inputs("two"), overrides=alone)
    assert plan.wire_bytes < gathered_each.wire_bytes
    for what in ("mixed", "dropped", "asked"):
        assert made_with(what).cut_results == () and "stem" not in paired(made_with(what)).split(), what


def returns_whole() -> list[str]:
    """Nested results of a stream that is cut, called as it is and compiled."""
    torch.manual_seed(3)
    plain, x = Backbone().double().eval(), inputs("two")
    plan = tpk.make_plan(plain, tp_mesh(), example_inputs=x)
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), tpk.ShardingPlan.from_json(plan.to_json()))
    wrong = [] if plan.cut_results else ["no result is cut"]
    for how, called in (("as it is", model), ("compiled", torch.compile(model, backend="eager", fullgraph=True))):
        gradients = []
        for one in (called, plain):
            y = x.clone().requires_grad_()
            maps = one(y)["maps"]
            sum((found * found).sum() for found in maps).backward()  # type: ignore[union-attr]
            gradients.append({"dx": y.grad} | {str(place): found.detach() for place, found in enumerate(maps)})
        wrong += differing(how, *gradients)  # type: ignore[arg-type]
    return wrong


@pytest.mark.gloo
def test_results_of_a_stream_that_is_cut_are_whole_also_in_compiled_code(ranks: Pools) -> None:
    for world in (2, 3):
        assert ranks(world).run(returns_whole, timeout=LIMIT_S) == [[]] * world
