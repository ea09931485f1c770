"""What leaves a parallel model: attentions, hidden states and caches as the unsharded model gives them, or an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import LIMIT, compare_tensors, differs
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tpkernels.errors import UnprovenCallWarning
from tpkernels.sharding.outputs import whole_outputs
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH = 24


EXTRAS: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda weights: weights,
    "flat": lambda weights: weights.flatten(0, 1),
    "mean": lambda weights: weights.mean(1),
    "top": lambda weights: weights > 0.2,
}


class Attention(zoo.Attention):
    """Gives what it is asked for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, ask: str = "", keep: bool = False, way: str = "") -> Any:
        batch, length, _ = x.shape
        shape = (batch, length, 3, self.num_heads, -1)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        found = (weights.softmax(1) if way == "mixed" else weights) @ v
        found = found.transpose(1, 2).reshape(batch, length, -1)
        found = found * self.gain if way == "scaled" else found
        y = x + self.proj(found.transpose(1, 2) if way == "turned" else found)
        if keep:
            self.last = weights
        if ask == "fail":
            raise KeyError("inside")
        return (y, {"extra": [EXTRAS[ask](weights)]}) if ask else y


def built(plan: str = "auto") -> tuple[Attention, Attention, Tensor]:
    torch.manual_seed(3)
    plain = Attention(WIDTH, 4).double().eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model = copy.deepcopy(plain)
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    found = tpk.make_plan(model, tp_mesh(), example_inputs=x)
    assert {"Column", "Row"} <= {type(entry.style).__name__ for entry in found.entries}
    tpk.parallelize(model, tp_mesh(), found)
    return plain, model, x


@contextmanager
def refused(*texts: str) -> Any:
    with pytest.raises(ValueError) as caught:
        yield
    assert all(text in str(caught.value) for text in texts), caught.value


def gathers_or_refuses() -> None:
    plain, model, x = built()
    for _ in range(2):
        alone = model.num_heads == 1
        for ask in ("weights",) if alone else ("weights", "flat"):
            (y, extra), (expected, wanted) = model(x, ask), plain(x, ask)
            assert differs(y, expected, 1e-11) is None
            assert differs(extra["extra"][0], wanted["extra"][0], 1e-11) is None, ask
        with refused("[1]['extra'][0] is this rank's part", "no rule says", "replicate"):
            model(x, "mean")
        if alone:  # [3 * 1, 7, 7] could be three sequences of one head each, or 1 * 7 rows of one head
            with refused("more than one way"):
                model(x, "flat")
            with refused("more than one way"):
                model(x[:1], "weights")
        with refused("torch.bool cannot be gathered"):
            model(x, "top")
        with refused("last is this rank's part", "takes_parts"):
            model(x, keep=True)
        del model.last
        with pytest.raises(KeyError, match="inside"):
            model(x, "fail")
    assert torch._C._len_torch_dispatch_stack() == 0
    twin = copy.deepcopy(model)
    assert differs(twin(x, "weights")[1]["extra"][0], plain(x, "weights")[1]["extra"][0], 1e-11) is None
    model.takes_parts = True
    model(x, keep=True)
    assert model.last.shape[1] < 4


def flags_of_modules_are_found_out_late() -> None:
    """One that is no argument and in no config."""
    plain, model, x = built()
    model(x, "weights")
    model.forward = lambda *_: (x, {"other": [x]})  # type: ignore[method-assign]
    with refused("returned other things"):
        model(x, "weights")
    del model.forward
    weights = [net(x, "weights")[1]["extra"][0] for net in (model, plain)]
    assert differs(*weights, 1e-11) is None


def a_call_that_takes_another_way_than_the_proven_one_is_told() -> None:
    _, model, x = built()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnprovenCallWarning)
        model(x)
        model(x, "weights")
    rank = tp_mesh().get_local_rank()
    with pytest.warns(UnprovenCallWarning, match="the inputs of proj .* tpk.verify") if rank == 0 else nullcontext():
        model(x, way="mixed")
    square = torch.randn(3, model.num_heads * WIDTH // 4, WIDTH, dtype=torch.float64)
    with refused("gives 'proj', a row of the plan, a part that is not cut by features", "another path"):
        model(square, way="turned")


def gradients_that_a_call_would_leave_incomplete_are_refused() -> None:
    plain, model, x = built()
    with refused("another path", "a gradient would be incomplete, that of aten.mul of a tensor of []"):
        model(x, way="scaled")
    with torch.no_grad():
        assert differs(model(x, way="scaled"), plain(x, way="scaled"), 1e-11) is None


def hooks_are_not_shown_parts() -> None:
    _, model, x = built()
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, output: Any = None) -> None:
        seen.append(tuple((args[0] if output is None else output).shape))

    model(x)
    for register in (model.qkv.register_forward_hook, model.proj.register_forward_pre_hook):
        handle = register(look)
        with refused("look", "would see this rank's part", "takes_parts"):
            model(x)
        handle.remove()
        model(x)
    handle = model.qkv.register_forward_pre_hook(look)
    model(x)
    handle.remove()
    assert seen[-1] == tuple(x.shape)
    look.takes_parts = True  # type: ignore[attr-defined]
    model.qkv.register_forward_hook(look)
    model(x)
    assert seen[-1][-1] < 3 * WIDTH


def gradients_flow_through_what_is_gathered() -> list[str]:
    plain, model, x = built()
    weights = torch.randn(3, 4, 7, 7, dtype=torch.float64)
    for net in (plain, model):
        y, extra = net(x, "weights")
        (y.square().sum() + (extra["extra"][0] * weights).sum()).backward()
    return compare_tensors(model, plain, LIMIT[False])


def explicit_plans_are_left_alone() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
    whole = copy.deepcopy(model)(torch.ones(2, 4))
    tpk.parallelize(model, tp_mesh(), {"1": "column"})
    part = model(torch.ones(2, 4))
    assert part.shape[1] < 8
    whole_outputs(model, tp_mesh())
    assert torch.allclose(model(torch.ones(2, 4)), whole)


def compiled_code_is_left_alone() -> None:
    plain, model, x = built()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert differs(compiled(x), plain(x), 1e-11) is None
    assert differs(model(x, "weights")[1]["extra"][0], plain(x, "weights")[1]["extra"][0], 1e-11) is None
    model.proj.compile(backend="aot_eager")
    assert differs(model(x, "weights")[0], plain(x, "weights")[0], 1e-11) is None


def small_models() -> None:
    gathers_or_refuses()
    flags_of_modules_are_found_out_late()
    hooks_are_not_shown_parts()
    a_call_that_takes_another_way_than_the_proven_one_is_told()
    gradients_that_a_call_would_leave_incomplete_are_refused()
    assert not gradients_flow_through_what_is_gathered()
    explicit_plans_are_left_alone()
    compiled_code_is_left_alone()


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 4])
def test_parts_are_gathered_or_refused_by_name(ranks: Pools, world: int) -> None:
    ranks(world).run(small_models, timeout=LIMIT_S)


# ------------------------------------------------------------------ transformers


def everything_is_whole(name: str, options: dict[str, Any]) -> list[str]:
    """Outputs and gradients, flags given and configured."""
    plain, model = (zoo.build(name, attn_implementation="eager") for _ in range(2))
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh(), **options))
    limit, wrong = LIMIT[zoo.is_single(name)], []
    given = {key: value for key, value in zoo.inputs(name).items() if key != "use_cache"}
    asked = {"output_attentions": True, "output_hidden_states": True}

    def compare(where: str, **extra: Any) -> tuple[Any, Any]:
        results = plain(**given, **extra), model(**given, **extra)
        for key in results[0]:
            pairs = zip(tensors(results[1][key]), tensors(results[0][key]), strict=True)
            wrong.extend(f"{where} {key}: {p}" for p in (differs(a, b, limit) for a, b in pairs) if p)
        return results

    model(**given)
    for where in ("first", "second"):
        for result, net in zip(compare(where, **asked), (plain, model), strict=True):
            shown = [key for key in result if "attentions" in key or "hidden_states" in key]
            assert sum("attentions" in key for key in shown) in (1, 2, 3)
            loss = sum((t * t).sum() for key in shown for t in tensors(result[key]))
            net.zero_grad(set_to_none=True)
            (loss + (zoo.output(result) ** 2).sum()).backward()  # type: ignore[operator]
        wrong += [f"{where}: {problem}" for problem in compare_tensors(model, plain, limit)]
    with torch.no_grad():
        compare("without gradients", **asked)
        for net in (plain, model):
            net.config.output_attentions = True
        results = compare("configured")
    flagged = not name.startswith("t5")  # whose stacks have configs of their own
    assert any("attentions" in key for key in results[1]) is flagged, "the flag in the config was not seen"
    return wrong


def tensors(value: Any) -> list[Tensor]:
    """Those of a result; a cache is read as a user reads it."""
    if isinstance(value, Tensor):
        return [value.full_tensor() if isinstance(value, DTensor) else value]
    if hasattr(value, "self_attention_cache"):
        return tensors(value.self_attention_cache) + tensors(value.cross_attention_cache)
    if hasattr(value, "layers"):
        return [tensor for layer in value.layers for kept in (layer.keys, layer.values) for tensor in tensors(kept)]
    return [tensor for item in value or () for tensor in tensors(item)]


def generates(name: str) -> None:
    """Tokens of the unsharded model, however the cache is used."""
    plain, model = (zoo.build(name) for _ in range(2))
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh()))
    ids = torch.tensor([[5, 7, 9, 11], [4, 8, 15, 16]])
    ways: list[dict[str, Any]] = [
        {}, {"num_beams": 3, "num_return_sequences": 2}, {"cache_implementation": "static"},
        {"do_sample": True, "top_k": 5},
    ]  # fmt: skip
    for way in ways:
        found = []
        for net in (plain, model):
            torch.manual_seed(1)
            options = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None} | way
            found.append(net.generate(ids, attention_mask=torch.ones_like(ids), **options))
        assert torch.equal(*found), (way, found)


def caches_are_read_whole(name: str) -> None:
    plain, model = (zoo.build(name) for _ in range(2))
    tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh()))
    ids, limit = torch.tensor([[5, 7, 9, 11], [4, 8, 15, 16]]), LIMIT[zoo.is_single(name)]
    with torch.no_grad():
        caches = [net(ids, use_cache=True).past_key_values for net in (plain, model)]
        layer = caches[1].layers[0]
        assert isinstance(layer.keys, DTensor)
        caches.append(copy.deepcopy(caches[1]))
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.crop(-1)
            cache.batch_repeat_interleave(2)
        keys = caches[0].layers[0].keys
        for cache in caches[1:]:
            assert differs(cache.layers[0].keys.full_tensor(), keys, limit) is None
        layer.keys, layer.values = layer.keys * 1, caches[0].layers[0].values  # a DTensor, and a whole tensor
        outputs = []
        for net, cache in ((plain, caches[0]), (model, caches[1]), (model, caches[2])):
            outputs.append(net(torch.ones(4, 1, dtype=torch.int64), past_key_values=cache).logits)
        assert all(differs(output, outputs[0], limit) is None for output in outputs[1:])
        assert [cache.layers[0].keys.shape for cache in caches[1:]] == [caches[0].layers[0].keys.shape] * 2


def compiled_blocks() -> tuple[float, int]:
    """Blocks that are compiled one by one, as trainers do: the largest error of three calls, and how many graphs."""
    traced: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        traced.append(graph)
        return graph.forward

    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)]).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = model(x).detach()
    tpk.parallelize(model, tp_mesh(), example_inputs=x)
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    return max((model(x) - expected).abs().max().item() for _ in range(3)), len(traced)


def test_blocks_may_be_compiled_before_the_first_call_which_is_followed(ranks: Pools) -> None:
    for error, traced in ranks(2).run(compiled_blocks, timeout=LIMIT_S):
        assert error < 1e-12 and traced


def run(cases: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    return [function(*arguments) for function, arguments in cases]


CASES: dict[int, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    2: [
        (everything_is_whole, ("gpt2", {})),
        (everything_is_whole, ("llama", {"sequence_parallel": True})),
        (generates, ("gpt2",)),
        (generates, ("llama",)),
        (caches_are_read_whole, ("llama",)),
    ],
    3: [
        (everything_is_whole, ("llama 10", {})),
        (everything_is_whole, ("t5 10", {})),
        (generates, ("gpt2 10",)),
        (caches_are_read_whole, ("gpt2 10",)),
    ],
}


@pytest.mark.full("tests/models compare what models give; small models stand for the ways of giving it")
@pytest.mark.parametrize("world", CASES)
def test_transformers_give_what_they_give_unsharded(ranks: Pools, world: int, full: bool) -> None:
    pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
    for results in ranks(world).run(run, CASES[world][:: 1 if full else 2], timeout=3 * LIMIT_S):
        assert not any(results), results
