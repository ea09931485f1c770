"""Overrides of torchtitan's blocks on Llama 3, beside torchtitan's own on two ranks: the numbers of one process."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.integrations.curves import adamw
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR, bounds_of

pytest.importorskip("torchtitan", reason="torchtitan is missing: pip install --no-deps torchtitan spmd_types, and tyro")

from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward

from tests.integrations.torchtitan.models import (
    IMPORTS,
    LENGTH,
    MODEL,
    OUTSIDE,
    STEPS,
    VOCABULARY,
    Attention,
    build,
    config,
    counted,
)
from tpkernels.integrations import torchtitan as tpk_torchtitan

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "torchtitan_llama3.py"
Options = dict[str, Any]


def overridden(model: Any) -> Any:
    said = apply_overrides(OverrideConfig(imports=list(IMPORTS)), model)
    assert len(said) >= 2, said
    return model


@contextlib.contextmanager
def mesh_of() -> Iterator[Any]:
    world = dist.get_world_size()
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=world, pp=1, ep=1, world_size=world)
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
        dims.build_mesh()
    yield dims


def local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def train(model: Any, steps: int = STEPS) -> dict[str, Tensor]:
    """Losses, the first step's gradients and the last weights, by name, as this rank holds them."""
    optimizer = adamw(model.parameters())
    found: dict[str, Tensor] = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        logits = local(model(ids))
        if logits.shape[-1] != VOCABULARY:  # of this rank: a loss of all columns, whose gradient reaches its own
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, logits.detach().contiguous())
            parts[dist.get_rank()] = logits
            logits = torch.cat(parts, -1)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            if dist.is_initialized() and dist.get_world_size() > 1 and "norm" in name:
                dist.all_reduce(local(parameter.grad))  # as torchtitan's trainer does with sequence parallelism
        if step == 0:
            found |= {f"gradient {n}": local(p.grad).clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {name}": local(p).detach().clone() for name, p in model.named_parameters()}


def alone(**options: Any) -> tuple[dict[str, Tensor], ...]:
    """One process in fp64 and in fp32, and with our blocks."""
    exact, plain = train(build(config(**options)).double()), train(build(config(**options)))
    return exact, plain, train(build(overridden(config(**options))))


def cut(name: str, whole: Tensor, shape: torch.Size) -> Tensor:
    dims = [dim for dim, size in enumerate(shape) if whole.shape[dim] != size]
    return whole.chunk(dist.get_world_size(), dims[0])[dist.get_rank()] if dims else whole


def on_mesh(make: Callable[[Any], Any], dims: ParallelDims, options: Options, compiled: bool = False) -> Any:
    plain = build(config(**options))
    model = build(make(config(**options)))
    names = set(model.state_dict())
    assert names == set(plain.state_dict()), "checkpoints have torchtitan's names"
    model.parallelize(dims)
    with torch.no_grad():
        for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            local(parameter).copy_(cut(name, whole, local(parameter).shape))
    if compiled:
        for layer in model.layers.values():  # as torchtitan does, block by block
            layer.compile(fullgraph=True, backend="aot_eager")
    return model


def trained(options: Options, compiled: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with mesh_of() as dims, set_current_spmd_mesh(dims.spmd_dense_mesh()):
        found["stock"] = train(on_mesh(lambda cfg: cfg, dims, options))
        model = on_mesh(overridden, dims, options)
        with counted() as counts:
            found["ours"] = train(model)
        found["counts"] = dict(counts)
        if compiled:
            found["compiled"] = train(on_mesh(overridden, dims, options, compiled=True), 2)
    return found


def whole(parts: list[dict[str, Tensor]], plain: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, expected in plain.items():
        dims = [dim for dim, size in enumerate(expected.shape) if parts[0][name].shape[dim] != size]
        found[name] = torch.cat([part[name] for part in parts], dims[0]) if dims else parts[0][name]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        pytest.param(2, {"fused": False}, marks=pytest.mark.full("query, key and value in three weights")),
        pytest.param(3, {"heads": 6}, marks=pytest.mark.full("three ranks")),
        pytest.param(3, {"heads": 6, "fused": False}, marks=pytest.mark.full("three ranks")),
    ],
)
def test_llama_with_our_blocks_is_as_exact_as_one_process(
    ranks: Pools, world: int, options: Options, full: bool
) -> None:
    ((exact, plain, ours),) = ranks(1).run(partial(alone, **options), timeout=LIMIT_S)
    assert all(torch.equal(ours[name], plain[name]) for name in plain), "one rank runs torchtitan's blocks"
    bounds = bounds_of({name: (exact[name], plain[name]) for name in exact}, {})
    results = ranks(world).run(trained, options, full, timeout=LIMIT_S)
    for result in results:
        assert result["counts"] == {"all_gather_matmul": 2 * STEPS, "matmul_reduce_scatter": 2 * STEPS}
    for kind in ("stock", "ours"):
        found = whole([result[kind] for result in results], plain)
        worst = {name: bounds[name].ratio(found[name]) / FACTOR for name in bounds}
        assert max(worst.values()) <= 1, (kind, max(worst.items(), key=lambda item: item[1]))
    for result in results:
        for name in ("loss 0", "loss 1") if full else ():
            assert torch.equal(result["compiled"][name], result["ours"][name]), name


def run_example(path: str) -> tuple[str, dict[str, int]]:
    """As a file, with torch's attention and no masks in the place of CUDA's kernels."""
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"))
        enter(mock.patch.object(FlexAttention, "forward", Attention.forward))
        enter(mock.patch.object(Decoder, "get_attention_masks", lambda self, positions: None))
        enter(mock.patch.object(sys, "argv", [path, "--steps", "3", "--layers", "1"]))
        counts = enter(counted())
        enter(contextlib.redirect_stdout(output))
        runpy.run_path(path, run_name="__main__")
    return output.getvalue(), dict(counts)


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.M)]


@pytest.mark.gloo
def test_the_example_runs_as_a_file_and_learns(ranks: Pools, full: bool) -> None:
    path = str(ROOT / "examples" / EXAMPLE)
    (output, counts), (other, _) = ranks(2).run(run_example, path, timeout=LIMIT_S)
    two = losses_of(output)
    assert len(two) == 3 and two[2] < two[0] and other == "", output
    if full:
        ((alone, _),) = ranks(1).run(run_example, path, timeout=LIMIT_S)
        # Printed with four digits: each is off by 5e-5, so that two right ones may differ by one in the last.
        steps = [round(abs(a - b) * 1e4) for a, b in zip(losses_of(alone), two, strict=True)]
        assert max(steps) <= 1, (alone, output)
    assert counts == {"all_gather_matmul": 2 * 3, "matmul_reduce_scatter": 2 * 3}


@pytest.mark.cpu
def test_the_page_names_the_override_and_the_example() -> None:
    page = ROOT.joinpath("docs", "trainers.md").read_text(encoding="utf-8")
    assert f"--override.imports {MODEL}\n" in page and f"`examples/{EXAMPLE}`" in page


@pytest.mark.cpu
def test_layers_without_an_op_of_ours_are_named_or_refused() -> None:
    """The override of a whole model does what those of its blocks do, and says what is left."""

    def changed(**changes: Any) -> Any:
        model = config()
        (layer,) = model.layers
        for name, fields in changes.items():
            setattr(layer.feed_forward, name, replace(getattr(layer.feed_forward, name), **fields))
        return model

    outside = r"; lm_head: torchtitan's Linear, in no block.*; tok_embeddings: torchtitan's Embedding, in no block"
    with pytest.warns(UserWarning, match=f"^some layers run no op of tpkernels{outside}"):
        model = tpk_torchtitan.model(config())
    assert repr(model) == repr(overridden(config()))
    with pytest.raises(ValueError, match=r"^some layers run no op of tpkernels; lm_head: torchtitan's Linear"):
        tpk_torchtitan.model(config(), strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpk_torchtitan.model(config(), strict=True, leave=OUTSIDE)
    biased = {"w1": {"bias": True}}
    with pytest.warns(UserWarning, match=r"; layers\.\*\.feed_forward: it has a bias in w1 or w3, .*; lm_head: "):
        model = tpk_torchtitan.model(changed(**biased))
    (layer,) = model.layers
    assert type(layer.feed_forward) is FeedForward.Config
    assert type(layer.attention.wo) is tpk_torchtitan.ScatteringLinear.Config
    with pytest.raises(ValueError, match=r"^some layers run no op .*; layers\.\*\.feed_forward: it has a bias"):
        tpk_torchtitan.model(changed(**biased), strict=True, leave=OUTSIDE)
    with pytest.raises(ValueError, match=r"leave has 'head', which is none of .*'lm_head'"):
        tpk_torchtitan.model(config(), leave=["head"])
    with pytest.raises(ValueError, match=r"no block of Llama3Model\.Config runs an op .*enable_sequence_parallel"):
        tpk_torchtitan.model(config(sequence_parallel=False))


@pytest.mark.cpu
def test_what_our_blocks_do_not_have_is_refused() -> None:
    from torchtitan.models.common.linear import Linear

    def refused(message: str, model: Any) -> None:
        with pytest.raises(ValueError, match=message):
            overridden(model)

    refused("enable_sequence_parallel", config(sequence_parallel=False))
    model = config()
    model.layers[0].feed_forward.w1 = replace(model.layers[0].feed_forward.w1, bias=True)
    refused("bias in w1 or w3", model)
    model = config()
    model.layers[0].attention.wo = replace(model.layers[0].attention.wo, bias=True)
    refused("GQAttention: its last layer has a bias", model)
    model = config()
    model.layers[0].attention.sharding_config = None
    refused(r"overrides come after update_from_config\(\)", model)

    @dataclass(kw_only=True, slots=True)
    class Quantized(Linear.Config):  # type: ignore[misc]
        pass

    model = config()
    wo = model.layers[0].attention.wo
    model.layers[0].attention.wo = Quantized(in_features=32, out_features=32, sharding_config=wo.sharding_config)
    refused("our block takes the place of", model)
    model = config()
    set_spmd_backend("full_dtensor")
    try:
        refused("needs a parallelism.spmd_backend of .*, got 'full_dtensor'", model)
    finally:
        set_spmd_backend("spmd_types")


@pytest.mark.cpu
def test_the_first_name_of_torchtitan_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpk_torchtitan.first_missing() is None
    with monkeypatch.context() as patch:
        patch.delattr("torchtitan.config.derive")
        with pytest.raises(ImportError, match=r"cannot import name 'derive' from 'torchtitan\.config'"):
            importlib.reload(tpk_torchtitan)

    @dataclass
    class Config:
        w1: int

    model = config()
    monkeypatch.setattr(tpk_torchtitan, "FIELDS", {Config: tpk_torchtitan.FIELDS[FeedForward.Config]})
    with pytest.raises(ValueError, match=r"torchtitan \S+ has no .*Config\.w2: this integration was tested with 0\.3"):
        overridden(model)
