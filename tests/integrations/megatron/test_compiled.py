"""Megatron's layers under torch.compile: ours are one graph, with the bits of eager; its own are not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.megatron import models
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

pytest.importorskip("megatron.core", reason="the package megatron-core is missing: pip install megatron-core")

from megatron.core import tensor_parallel

from tpkernels.integrations import megatron as tpk_megatron


def layers() -> dict[tuple[str, str, bool], str]:
    """By library, layer and whether the sequence is cut: "same", or why there is no graph."""
    found, world, rank = {}, dist.get_world_size(), dist.get_rank()
    with models.on_cpu(world):
        for name, library in (("ours", tpk_megatron), ("stock", tensor_parallel)):
            for kind in ("ColumnParallelLinear", "RowParallelLinear"):
                for sequence_parallel in (True, False):
                    config = models.config(world, sequence_parallel=sequence_parallel)
                    given = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False}
                    if kind == "RowParallelLinear":
                        given["input_is_parallel"] = True
                    layer: Any = getattr(library, kind)(12, 18, skip_bias_add=False, **given)
                    whole = torch.ones(6, 2, 12)
                    x = whole.chunk(world, -1)[rank] if kind == "RowParallelLinear" else whole
                    x = x.chunk(world)[rank] if kind != "RowParallelLinear" and sequence_parallel else x
                    runs = []
                    for compiled in (False, True):
                        torch._dynamo.reset()
                        leaf = x.clone().requires_grad_()
                        call = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
                        try:
                            y = (call if compiled else layer)(leaf)[0]
                        except torch._dynamo.exc.Unsupported as error:
                            found[name, kind, sequence_parallel] = str(error).partition("\n")[0]
                            break
                        y.square().sum().backward()
                        runs.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
                        layer.weight.grad = None
                    else:
                        same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
                        found[name, kind, sequence_parallel] = "same" if same else "other bits"
    return found


def whole() -> dict[str, str]:
    found = {}
    with models.on_cpu(2):
        for name in ("ours", "stock"):
            swap = functools.partial(tpk_megatron.layer_spec, strict=True) if name == "ours" else (lambda spec: spec)
            for part in ("block", "model"):
                torch._dynamo.reset()
                model = models.gpt(2, swap, sequence_parallel=True)
                if name == "ours":
                    tpk_megatron.convert_output(model, strict=True)
                for one in model.decoder.layers if part == "block" else [model]:
                    one.compile(backend="aot_eager", fullgraph=True)
                try:
                    models.loss_of(model, 0).backward()
                    found[f"{name} {part}"] = "ok"
                except Exception as error:
                    found[f"{name} {part}"] = f"{type(error).__name__} {error}"[:1500]
    return found


@pytest.mark.gloo
def test_probe(ranks: Pools) -> None:
    for key, value in ranks(2).run(layers, timeout=LIMIT_S)[0].items():
        print(key, value)
    for key, value in ranks(2).run(whole, timeout=LIMIT_S)[0].items():
        print("====", key, value)
