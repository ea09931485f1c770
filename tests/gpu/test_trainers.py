"""The examples of the trainers on GPUs, as torchrun or Ray starts them: nothing of another library is patched here."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tpkernels.integrations.transformers import private_names
from tpkernels.packages import TESTED

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
STEPS = 3
EXAMPLES = {
    "parallelize_module.py": "torch",
    "transformers_trainer.py": "accelerate",
    "accelerate_loop.py": "accelerate",
    "peft_lora.py": "peft",
    "lightning_fabric.py": "lightning",
    "lightning_trainer.py": "lightning",
    "megatron_gpt.py": "megatron.core",
    "torchtitan_llama3.py": "torchtitan",
    "trl_sft.py": "trl",
    "ray_train.py": "ray",
}
"""And the package that it is about."""
OF_TRANSFORMERS = ("transformers_trainer.py", "accelerate_loop.py", "peft_lora.py", "trl_sft.py")
"""Those that need our integration into transformers, which refuses versions with other private names."""


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def skip_what_cannot_run(example: str) -> None:
    """Where a package is missing, or transformers is so old that our integration refuses it, which is the reason."""
    package = EXAMPLES[example]
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"the package {package} is missing")
    if example in OF_TRANSFORMERS and numbers(version("transformers")) < numbers(TESTED["transformers"][-1]):
        try:
            private_names.check()
        except ValueError as refusal:
            pytest.skip(str(refusal))


def command(example: str, world: int) -> list[str]:
    """Ray starts its workers itself."""
    script, steps = str(ROOT / "examples" / example), ["--steps", str(STEPS)]
    if example == "ray_train.py":
        return [sys.executable, script, "--workers", str(world), "--gpu", *steps]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return [*start, script, *steps]


def losses(example: str, world: int, folder: Path) -> list[float]:
    folder.mkdir()
    done = subprocess.run(
        command(example, world),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = re.search(r"^losses (\[.*\])$", done.stdout, re.M)
    found: list[float] = (
        ast.literal_eval(listed[1])
        if listed
        else [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.M)]
    )
    return found


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multi_gpu)]
)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_a_trainer_learns_and_two_gpus_do_as_one(example: str, world: int, tmp_path: Path) -> None:
    skip_what_cannot_run(example)
    alone = example != "accelerate_loop.py"
    if world == 1 and not alone:
        pytest.skip("needs two CUDA devices: accelerate wraps the model of one rank in DistributedDataParallel")
    found = losses(example, world, tmp_path / "run")
    assert len(found) == STEPS and found[-1] < found[0]
    if world > 1 and alone:  # they print four digits
        assert found == pytest.approx(losses(example, 1, tmp_path / "alone"), abs=2e-3)
