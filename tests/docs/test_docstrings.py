"""Every function and module of the API pages shows an example in its docstring, and on two ranks it does what it says.

Names that all examples share: ``torch``, ``nn``, ``tpk``, ``mesh = tpk.init()``, ``rank`` and ``folder``, a new folder
that both ranks see. What an example prints is the same on both.
"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tpkernels.launching.local_ranks import launch
from tpkernels.testing.spawn import Pools

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("ops.md", "models.md", "nn.md", "optim.md", "keras.md")
KERAS = "tpkernels.integrations.keras."
TIMEOUT_S = 300.0
OF_ONE_PROCESS = ("tpkernels.launch",)
"""It starts ranks, which ranks have no need of."""
RESULTS = (
    "tpkernels.Explanation",
    "tpkernels.ShardingPlan",
    "tpkernels.Verification",
    *(KERAS + name for name in ("KerasPlan", "DefaultConfig", "Cut")),
)
"""Shown where a call gives them."""
STYLE = re.compile(r"tpkernels\.sharding\.[A-Z]\w+")
"""A word of a plan."""
ON_A_PAGE = (KERAS + "TensorParallel",)
"""Its example is long, and stands on a page that runs (docs/keras.md)."""


def documented() -> list[str]:
    """The functions and modules of the API pages that show an example by themselves."""
    text = "".join(ROOT.joinpath("docs/api", page).read_text(encoding="utf-8") for page in PAGES)
    names = re.findall(r"^::: (\S+)", text, re.M)
    return [name for name in names if name not in RESULTS + ON_A_PAGE and not STYLE.fullmatch(name)]


def examples_of(name: str) -> list[doctest.Example]:
    module, _, attribute = name.rpartition(".")
    return doctest.DocTestParser().get_examples(
        inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
    )


def run(names: list[str], folder: str, fault: str | None = None, also: dict[str, Any] | None = None) -> list[str]:
    """What the examples got wrong on this rank."""
    said: list[str] = []
    for number, name in enumerate(names):
        own = Path(folder, str(number))
        own.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(number)
        names_of_all: dict[str, Any] = {"torch": torch, "nn": nn, "tpk": tpk, "folder": own, **(also or {})}
        if dist.is_initialized():
            names_of_all |= {"mesh": tpk.init(), "rank": dist.get_rank()}
        examples = examples_of(name)
        if fault == name:
            examples[-1].want = "something else\n"
        test = doctest.DocTest(examples, names_of_all, name, None, None, None)
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return said


@pytest.mark.cpu
def test_each_function_and_module_has_an_example() -> None:
    names = documented()
    assert len(names) > 60 and not [name for name in names if not examples_of(name)]


@pytest.mark.gloo
@pytest.mark.slow("6 s")
def test_examples_of_docstrings_run_on_two_ranks(ranks: Pools, tmp_path: Path) -> None:
    names = [name for name in documented() if not name.startswith((*OF_ONE_PROCESS, KERAS))]
    for said in ranks(2).run(run, names, str(tmp_path), timeout=TIMEOUT_S):
        assert not said, "".join(said)


@pytest.mark.gloo
def test_an_example_that_is_wrong_is_found(ranks: Pools, tmp_path: Path) -> None:
    for said in ranks(2).run(run, ["tpkernels.shard"], str(tmp_path), "tpkernels.shard", timeout=TIMEOUT_S):
        assert "Expected:\n    something else\n" in "".join(said)


def run_with_keras(names: list[str], folder: str) -> list[str]:
    with mock.patch.dict(os.environ, KERAS_BACKEND="torch"):  # which Keras reads when it is imported
        import keras
    return run(names, folder, also={"keras": keras})


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
@pytest.mark.slow("2 s")
def test_examples_of_keras_run_in_one_process(tmp_path: Path) -> None:
    if importlib.util.find_spec("keras") is None:
        pytest.skip("the package keras is missing: pip install keras")
    names = [name for name in documented() if name.startswith(KERAS)]
    assert launch(run_with_keras, 1, names, str(tmp_path)) == [[]]


@pytest.mark.gloo
@pytest.mark.usefixtures("forked")
def test_examples_that_start_ranks_run_in_one_process(tmp_path: Path) -> None:
    assert run(list(OF_ONE_PROCESS), str(tmp_path)) == []


@pytest.mark.cpu
def test_every_function_and_module_of_the_api_has_an_example() -> None:
    without = [name for name in documented() if not examples_of(name)]
    styles = [name for name in without if name.startswith("tpkernels.sharding.")]  # of plans: values, not calls
    assert without == styles, set(without) - set(styles)
