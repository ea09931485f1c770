"""The page about trainers and the examples run, with what accelerate demands of CUDA turned off."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools

for _name in ("transformers", "accelerate", "peft", "lightning"):
    pytest.importorskip(_name, reason=f"the package {_name} is missing: pip install {_name}")

from tests.integrations.lightning.test_lightning import as_a_rank  # noqa: E402
from tests.integrations.transformers.running import on_cpu  # noqa: E402
from tpkernels.integrations.transformers import registered  # noqa: E402

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "trainers.md"
LINES = 3
"""Of a snippet that are ours."""


ELSEWHERE = ("Megatron-Core", "torchtitan")
"""Sections that the tests of these libraries run: they need groups and settings of their own."""


def blocks() -> list[str]:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    text = "\n".join(section for section in sections if not section.startswith(ELSEWHERE))
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def run_page(texts: list[str], folder: str) -> int:
    os.chdir(folder)
    names: dict[str, object] = {}
    try:
        with on_cpu(), as_a_rank():
            for number, text in enumerate(texts):
                exec(compile(text, f"block {number} of the page", "exec"), names)
    finally:
        for registration in list(registered._active):
            registration.remove()
    return len(texts)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_the_page_runs_from_top_to_bottom(ranks: Pools, folder: str) -> None:
    texts = blocks()
    assert len(texts) >= 6
    assert ranks(2).run(run_page, texts, folder, timeout=LIMIT_S) == [len(texts)] * 2


def test_a_trainer_takes_three_lines_of_ours() -> None:
    for text in blocks()[1:]:
        ours = re.findall(r"^.*(?:tpk_?\w*\.|tpkernels|ColumnParallel|RowParallel|Replicated).*$", text, re.M)
        ours = [line for line in ours if not line.startswith(("import", "from"))]
        assert 1 <= len(ours) <= LINES, ours


def run_example(name: str, arguments: list[str], folder: str) -> str:
    os.chdir(folder)
    output = io.StringIO()
    told = {"WORLD_SIZE": str(dist.get_world_size())}
    with on_cpu(), as_a_rank(), mock.patch.dict(os.environ, told), contextlib.redirect_stdout(output):
        with mock.patch.object(sys, "argv", [name, *arguments]):
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return output.getvalue()


def test_examples_run_as_files_and_learn(ranks: Pools, folder: str) -> None:
    for name in ("parallelize_module.py", "lightning_fabric.py"):
        output, other = ranks(2).run(run_example, name, ["--steps", "3"], folder, timeout=LIMIT_S)
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.M)]
        assert len(losses) == 3 and losses[2] < losses[0] and other == "", output
    name, common = "transformers_trainer.py", ["--cpu", "--folder", "run"]
    first = ranks(2).run(run_example, name, [*common, "--steps", "2"], folder, timeout=LIMIT_S)[0]
    resumed = [*common, "--steps", "3", "--resume", "run/checkpoint-2"]
    second = ranks(1).run(run_example, name, resumed, folder, timeout=LIMIT_S)[0]
    assert len(_losses(first)) == 2 and len(_losses(second)) == 3, "the log of the first run, and one step more"
    assert _losses(second)[:2] == _losses(first)


def _losses(output: str) -> list[float]:
    found: list[float] = ast.literal_eval(output.strip().splitlines()[-1].removeprefix("losses "))
    return found
