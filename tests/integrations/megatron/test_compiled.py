"""Our layers in Megatron, and a GPT with them, under torch.compile: one graph each, with the bits of eager."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations.megatron import models
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("megatron.core", reason="the package megatron-core is missing: pip install megatron-core")

from megatron.core import tensor_parallel

from tpkernels.integrations import megatron as tpk_megatron

KINDS = ("ColumnParallelLinear", "RowParallelLinear")


def made(library: Any, kind: str, sequence_parallel: bool) -> tuple[Any, Tensor]:
    """A layer, and what a rank gives it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    config = models.config(world, sequence_parallel=sequence_parallel)
    given: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False}
    if kind == "RowParallelLinear":
        given["input_is_parallel"] = True
    torch.manual_seed(1)
    layer = getattr(library, kind)(12, 18, skip_bias_add=False, **given)
    x = torch.randn(6, 2, 12)
    if kind == "RowParallelLinear":
        return layer, x.chunk(world, -1)[rank]
    return layer, x.chunk(world)[rank] if sequence_parallel else x


def run(layer: Any, call: Any, x: Tensor) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    layer.weight.grad = None
    y = call(leaf)[0]
    y.square().sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad, layer.weight.grad


def compiled(sequence_parallel: bool) -> list[bool]:
    """Of each layer of ours, whether it has the bits of eager; torch refuses to trace Megatron's column layer."""
    same = []
    with models.on_cpu(dist.get_world_size()):
        for kind in KINDS:
            torch._dynamo.reset()
            layer, x = made(tpk_megatron, kind, sequence_parallel)
            call = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
            same.append(all(map(torch.equal, run(layer, layer, x), run(layer, call, x))))
        # Megatron's row layer is not tried: where one rank traces it and the other one does not, one of them waits.
        if sequence_parallel:
            torch._dynamo.reset()
            layer, x = made(tensor_parallel, KINDS[0], sequence_parallel)
            with pytest.raises(torch._dynamo.exc.Unsupported):  # it warns, and then gathers with async_op=True
                torch.compile(layer.forward, backend="aot_eager", fullgraph=True)(x)
    return same


@pytest.mark.gloo
@pytest.mark.full("seconds of compiling")
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_is_one_graph_with_the_bits_of_eager(ranks: Pools, sequence_parallel: bool) -> None:
    """Where Megatron's own compiles, too, torch or Megatron has learnt to, and docs/trainers.md has to say so."""
    assert ranks(2).run(compiled, sequence_parallel, timeout=LIMIT_S) == [[True, True]] * 2


STEPS = 2


def trained(
    tp: int, sequence_parallel: bool, way: str, ours: bool = True, fullgraph: bool = True
) -> tuple[Any, int, int]:
    """What a run shows, how many graphs were compiled for it, and how often torch gave up tracing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # before a name of torch's is replaced, for it goes by names
    swap: Any = partial(tpk_megatron.layer_spec, strict=True) if ours else lambda spec: spec
    with models.on_cpu(tp):
        model = models.gpt(tp, swap, sequence_parallel=sequence_parallel, num_layers=2)
        model = tpk_megatron.convert_output(model, strict=True) if ours else model
        models.loss_of(model, 0)  # makes the buffer of Megatron's attention, without which its code is another
        for module in {"eager": [], "blocks": model.decoder.layers, "whole": [model]}[way]:
            module.compile(backend="aot_eager", fullgraph=fullgraph)
        found = models.train(model, STEPS)
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.gloo
@pytest.mark.full("seconds of compiling")
@pytest.mark.parametrize(
    ("tp", "replicas", "sequence_parallel"), [(2, 1, True), (2, 1, False), (3, 1, True), (2, 2, True)]
)
def test_a_gpt_is_one_graph_and_its_blocks_are_where_megatrons_own_break(
    ranks: Pools, tp: int, replicas: int, sequence_parallel: bool
) -> None:
    pool, given = ranks(tp * replicas), (tp, sequence_parallel)
    eager = pool.run(trained, *given, "eager", timeout=LIMIT_S)
    for way in ("whole", "blocks"):
        compiled = pool.run(trained, *given, way, timeout=LIMIT_S)
        for (expected, *_), (found, graphs, breaks) in zip(eager, compiled, strict=True):
            assert (graphs, breaks) == (1, 0), way
            assert all(torch.equal(found[name], value) for name, value in expected.items()), way
    for _, graphs, breaks in pool.run(trained, *given, "blocks", False, False, timeout=LIMIT_S) if tp == 2 else ():
        assert graphs > 1 and breaks > 0, "Megatron's own are traced: docs/trainers.md has to say so"
