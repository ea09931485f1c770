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

transformers = pytest.importorskip(
    "transformers", reason="the package transformers is missing: pip install transformers"
)
for _name in ("accelerate", "peft", "lightning"):
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


@pytest.mark.slow("9 s: every trainer once more, as the page shows it")
def test_the_page_runs_from_top_to_bottom(ranks: Pools, folder: str) -> None:
    texts = blocks()
    assert len(texts) >= 6
    assert ranks(2).run(run_page, texts, folder, timeout=LIMIT_S) == [len(texts)] * 2


def test_a_trainer_takes_three_lines_of_ours() -> None:
    for text in blocks()[1:]:
        ours = re.findall(r"^.*(?:tpk_?\w*\.|tpkernels|ColumnParallel|RowParallel|Replicated).*$", text, re.M)
        ours = [line for line in ours if not line.startswith(("import", "from"))]
        assert 1 <= len(ours) <= LINES, ours


EXAMPLES: list[tuple[str, list[str]]] = [
    ("parallelize_module.py", []),
    ("lightning_fabric.py", []),
    ("lightning_trainer.py", ["--folder", "lightning"]),
    ("accelerate_loop.py", ["--cpu", "--folder", "accelerate"]),
    ("peft_lora.py", ["--folder", "peft"]),
    ("transformers_trainer.py", ["--cpu", "--folder", "run"]),
]


def run_examples(examples: list[tuple[str, list[str]]], folder: str) -> list[str]:
    """What each prints, as a file."""
    os.chdir(folder)
    printed = []
    world = str(dist.get_world_size())
    for name, arguments in examples:
        output = io.StringIO()
        with on_cpu(), as_a_rank(), mock.patch.dict(os.environ, {"WORLD_SIZE": world}):
            with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", [name, *arguments]):
                runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        printed.append(output.getvalue())
    return printed


@pytest.mark.slow("12 s: every trainer once more, as a script")
def test_examples_run_as_files_and_learn(ranks: Pools, folder: str, full: bool) -> None:
    examples = [(name, [*arguments, "--steps", "3"]) for name, arguments in EXAMPLES]
    first, others = ranks(2).run(run_examples, examples, folder, timeout=2 * LIMIT_S)
    for (name, _), output, other in zip(examples, first, others, strict=True):
        losses = losses_of(output)
        assert len(losses) == 3 and losses[2] < losses[0], (name, output)
        assert other == "" or name == "transformers_trainer.py", (name, other)
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/peft/merged", output_loading_info=True)
    assert not any(info.values()) and not any("lora" in name for name, _ in merged.named_parameters())
    if full:
        more = ["--cpu", "--folder", "run", "--steps", "4", "--resume", "run/checkpoint-3"]
        ((trained,),) = ranks(1).run(run_examples, [("transformers_trainer.py", more)], folder, timeout=LIMIT_S)
        assert losses_of(trained)[:3] == losses_of(first[-1]) and len(losses_of(trained)) == 4
        more = ["--cpu", "--folder", "accelerate", "--steps", "1", "--resume", "accelerate/state"]
        (looped,), _ = ranks(2).run(run_examples, [("accelerate_loop.py", more)], folder, timeout=LIMIT_S)
        assert losses_of(looped)[0] < losses_of(first[3])[2]


def losses_of(output: str) -> list[float]:
    """Those of the lines, or of the list that the last one prints."""
    if "losses " in output:
        found: list[float] = ast.literal_eval(output.strip().splitlines()[-1].removeprefix("losses "))
        return found
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, re.M)]
