"""Plans as data, cuts, actions, rules and the communicator; and which private names of Keras are used."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import models
from tests.integrations.keras.test_meta import compress
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.testing.spawn import Pools

pytest.importorskip("keras")
pytestmark = pytest.mark.gloo


def pieces(folder: str) -> bool:
    """In one process of its own, because Keras reads its backend from the environment."""
    from tpkernels.integrations.keras import backend

    keras = models.keras_on_torch()
    assert backend.missing_names() == []
    backend.PRIVATE_NAMES["invented"] = ("keras.src.layers.layer:Layer._invented",)
    assert backend.missing_names() == ["keras.src.layers.layer:Layer._invented"]
    with pytest.raises(ImportError, match=r"_invented, which tpk\.keras uses"):
        backend.private("invented")
    del backend.PRIVATE_NAMES["invented"]
    _plans()
    _whole()
    _actions()
    _files(folder)
    for ratio, said in ((15, "generic_dense"), (16, "up_projection"), (6, "down_projection"), (7, "generic_dense")):
        layer = keras.layers.Dense(ratio)
        layer.build((None, 10))
        assert tpk.keras.analyze_dense_layer(layer) == said
    with pytest.raises(ValueError, match="must be a layer of Keras, got Linear"):
        tpk.keras.analyze_dense_layer(torch.nn.Linear(2, 3))
    return True


def _plans() -> None:
    model = models.small(heads=5)
    before = model.get_weights()
    plan = tpk.keras.make_plan(model, 4)
    assert "attention.query" in str(plan) and "5 heads, 2/1/1/1 per rank" in str(plan)
    assert tpk.keras.KerasPlan.from_json(plan.to_json()) == plan
    styles = {layer.name: layer.style for layer in plan.layers}
    assert styles["grouped.query"] == "column" and styles["grouped.key"] == "copied"
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert model.get_layer("up").call.__func__ is type(model.get_layer("up")).call, "tracing puts everything back"
    three = tpk.keras.make_plan(model, 3)
    head = (0, 3)  # the only key-value head, once for each query head of the rank
    assert [one.copied for one in three.layers if one.style == "copied"] == [((head, head), (head,), (head,))] * 2
    assert sum(three.elements_on(rank) for rank in range(3)) < 1.5 * model.count_params()
    config = tpk.keras.get_default_config(model, ["cpu:0", "cpu:1", "cpu:2"])
    assert set(config.state_rules) == set(three.cuts)
    for variable in model.variables:
        action = config.state_rules.get(variable.path, tpk.keras.Gather(3))
        parts = [action(variable.value.detach(), rank) for rank in range(3)]
        assert torch.equal(action.undo(parts), variable.value.detach())
        if variable.path in three.cuts:
            assert [part.shape for part in parts] == [three.cuts[variable.path].shape_on(rank) for rank in range(3)]
    assert isinstance(config.output_rules["down"][0], tpk.keras.Sum) and "up" not in config.output_rules


def _whole() -> None:
    """Layers that no rule cuts stay whole, and the plan says why."""
    keras = models.keras_on_torch()
    layers = keras.layers
    quantized = layers.Dense(8, name="quantized", dtype="float32")
    inputs = keras.Input((6, 8))
    x = layers.LSTM(8, name="recurrent")(layers.Conv1D(8, 2, name="convolution")(inputs))
    model = keras.Model(inputs, layers.Dense(20, name="plain")(quantized(x)))
    quantized.quantize("int8")
    found = {layer.name: (layer.style, layer.reason) for layer in tpk.keras.make_plan(model, 2).layers}
    assert found["plain"][0] == "column_gather"
    for name, word in (("quantized", "is quantized (int8)"), ("recurrent", "LSTM"), ("convolution", "Conv1D")):
        style, reason = next(said for known, said in found.items() if known.startswith(name))
        assert style == "whole" and word in reason, (name, style, reason)


def _actions() -> None:
    x = torch.randn(10, 3)
    x[0, 0] = -0.0
    for action in (tpk.keras.Split(3), tpk.keras.Split(3, 0, 5), tpk.keras.Split(2, 1), tpk.keras.Sum(3)):
        parts = [action(x, rank) for rank in range(action.world_size)]
        undone = action.undo(parts)
        assert torch.equal(undone, x) and torch.equal(undone.signbit(), x.signbit())
        with pytest.raises(ValueError, match="rank must be"):
            action(x, action.world_size)
        with pytest.raises(ValueError, match="ranks holds"):
            action.undo(parts[1:])
    for unit in (3, 0):
        with pytest.raises(ValueError, match=rf"unit \({unit}\) does not divide dimension 0"):
            tpk.keras.Split(2, 0, unit)(x, 0)  # parts would lack the last row
    assert [len(part) for part in tpk.keras.array_split(np.zeros((10, 2)), 3)] == [4, 3, 3]
    with pytest.raises(ValueError, match="something else than rank 0"):
        tpk.keras.Gather(2).undo([x, x + 1])
    packed = tpk.keras.Cut((6, 2), 0, (((0, 1), (3, 4)), ((1, 3), (4, 6))))
    whole = torch.arange(12).reshape(6, 2)
    assert torch.equal(packed.joined(torch.cat([packed.part(whole, 0), packed.part(whole, 1)])), whole)
    assert tpk.keras.Cut.from_json(packed.to_json()) == packed


def _files(folder: str) -> None:
    """Parts of variables in a weight file, of several pieces, and of a dtype that HDF5 and torch do not share.

    In one file, in shards of one variable each, in an archive, and in one that somebody has compressed.
    """
    keras = models.keras_on_torch()
    from tpkernels.integrations.keras.stored import Stored, member, unread

    cuts = (
        tpk.keras.Cut((6, 3), 0, (((0, 1), (3, 4)), ((1, 3), (4, 6)), ())),
        tpk.keras.Cut((6, 3), 1, (((0, 2),), ((2, 3),))),
    )
    seen: list[str] = []

    def look(value: Any) -> None:
        assert isinstance(value, Stored)
        held = layer.kernel.value.detach()
        assert (value.shape, len(value), value.dtype.name) == ((6, 3), 6, dtype)
        assert np.array_equal(np.asarray(value).astype("float32"), held.float().numpy())
        assert np.array_equal(value[2], np.asarray(value)[2])
        for cut in cuts:
            for rank in range(len(cut.ranges)):
                part = value.part(cut, rank)
                assert part.dtype == held.dtype and tuple(part.shape) == cut.shape_on(rank)
                assert not part.numel() or torch.equal(part, cut.part(held, rank))
        with pytest.raises(ValueError, match="has to be read"):
            np.array(value, copy=False)
        seen.append(dtype)

    layer: Any = None
    for dtype in ("float32", "bfloat16"):
        layer = keras.layers.Dense(3, dtype=dtype)
        model = keras.Sequential([keras.Input((6,)), layer])
        model.save_weights(f"{folder}/some.weights.h5")
        model.save_weights(f"{folder}/some.weights.json", max_shard_size=80 / 2**30)
        assert dtype == "bfloat16" or len(list(Path(folder).glob("some_0*.weights.h5"))) == 2
        model.save(f"{folder}/some.keras")
        object.__setattr__(layer.kernel, "assign", look)
        compress(Path(shutil.copy(f"{folder}/some.keras", f"{folder}/small.keras")))
        for name in ("some.weights.h5", "some.weights.json", "some.keras", "small.keras"):
            with unread():
                model.load_weights(f"{folder}/{name}")
            assert seen.pop() == dtype and not seen, (dtype, name)
    whole: list[Any] = []
    object.__setattr__(layer.kernel, "assign", whole.append)
    model.load_weights(f"{folder}/some.keras")
    assert not isinstance(whole[0], Stored), "Keras reads files as before"
    assert np.array_equal(np.asarray(whole[0], "float32"), layer.kernel.value.detach().float().numpy())
    with zipfile.ZipFile(f"{folder}/small.keras") as small:
        unpacked = member(small, "metadata.json")
        assert unpacked is not None and unpacked.read() == small.read("metadata.json")
        unpacked.close()
    with zipfile.ZipFile(f"{folder}/some.keras") as plain:
        inside = member(plain, "metadata.json")
        assert inside is not None and inside.read() == plain.read("metadata.json")
        plain.getinfo("metadata.json").header_offset += 1
        with pytest.raises(zipfile.BadZipFile, match="where its directory says"):
            member(plain, "metadata.json")


def deep(depth: int) -> list[str]:
    """Styles of two layers inside of so many Sequentials."""
    from tpkernels.integrations.keras.shadow import KerasShadow

    keras = models.keras_on_torch()
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(8)])
    for _ in range(depth):
        model = keras.Sequential([keras.Input((8,)), model])
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack(0)) + depth - 5)
        shadow = KerasShadow(model)  # one step per level would be too many
        sys.setrecursionlimit(100 * depth)  # for Keras's own calls of its layers
        assert len(shadow.keras_layers) > depth
        return [layer.style for layer in tpk.keras.make_plan(model, 2).layers]
    finally:
        sys.setrecursionlimit(limit)


def communicate() -> list[Any]:
    keras = models.keras_on_torch()
    talk = tpk.keras.Communicator(world_size=dist.get_world_size())
    mine = keras.ops.convert_to_tensor(np.arange(3.0) + talk.rank)
    found = [talk.all_reduce(mine), talk.all_reduce(mine, "mean"), talk.all_gather(mine[: talk.rank + 1])]
    found += [talk.broadcast(mine, root) for root in range(talk.world_size)]
    found.append(talk.scatter(mine, root=1))
    with pytest.raises(ValueError, match="op must be"):
        talk.all_reduce(mine, "max")
    with pytest.raises(ValueError, match="different tensors"):
        talk.broadcast(mine[: talk.rank + 1])
    return [np.asarray(one) for one in found]


def private_names_of_others(file: Path) -> list[str]:
    """Attributes with an underscore that a file takes from objects other than its own, and strings that name some."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        own = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "torch.utils")
        text = isinstance(node, ast.Attribute | ast.Constant) and isinstance(name, str)
        if text and not own and re.fullmatch(r"_[a-z]\w*", name):
            found.append(f"{file.name}:{node.lineno} {name}")
    return found


@pytest.mark.cpu
def test_private_names_of_keras_stand_in_one_file() -> None:
    files = sorted(Path(tpk.__file__).parent.joinpath("integrations", "keras").glob("*.py"))
    named = {file.name: private_names_of_others(file) for file in files}
    assert len(named.pop("backend.py")) > 20
    assert [name for names in named.values() for name in names] == []


def test_plans_actions_files_rules_and_private_names(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(1).run(pieces, str(tmp_path), timeout=TIMEOUT) == [True]


def test_a_deep_nest_of_models_is_planned_without_recursion(ranks: Pools, full: bool) -> None:
    """Keras's own calls reach Python's limit at 74 levels; whatever the limit, they end the process at 1,500."""
    assert ranks(1).run(deep, 700 if full else 120, timeout=TIMEOUT) == [["column", "row"]]


def test_the_communicator_reduces_gathers_broadcasts_and_scatters(ranks: Pools) -> None:
    one = np.arange(3.0)
    for rank, found in enumerate(ranks(2).run(communicate, timeout=TIMEOUT)):
        expected = [
            2 * one + 1,
            one + 0.5,
            [0.0, 1.0, 2.0],
            one,
            one + 1,
            (one + 1)[:2] if rank == 0 else (one + 1)[2:],
        ]
        for mine, theirs in zip(found, expected, strict=True):
            assert np.array_equal(mine, theirs)
