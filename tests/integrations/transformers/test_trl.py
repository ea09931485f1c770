"""trl's SFTTrainer on a model of ``prepare()``.

trl and datasets, with pandas and pyarrow, are 150 MB: `.ci/run` installs them beside the environment.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.curves import STEPS, Reference
from tests.nn.reference import LIMIT_S
from tpkernels.testing.spawn import Pools
from tpkernels.verification.bounds import FACTOR

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install accelerate")
if any(importlib.util.find_spec(name) is None for name in ("trl", "datasets", "pyarrow")):
    pytest.skip("--full: only where trl and datasets, 150 MB, were installed by hand", allow_module_level=True)

from tests.integrations.transformers import scenarios
from tests.integrations.transformers.running import Sentences, options, train
from tests.integrations.transformers.scenarios import Scenario

pytestmark = pytest.mark.gloo

LLAMA = Scenario("llama", "prepare")


def sft(*, model: Any, args: Any, train_dataset: Sentences, eval_dataset: None, callbacks: list[Any]) -> Any:
    import datasets
    import pyarrow
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    rows = [{name: ids.tolist() for name, ids in train_dataset[at].items()} for at in range(len(train_dataset))]
    # By itself a data set is named by the digest of its pickled self, which pyarrow's types do not allow everywhere.
    data = datasets.Dataset(datasets.table.InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="sentences")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(67)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")
    given = options(args.output_dir, save_strategy=args.save_strategy, save_steps=args.save_steps)
    own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "gradient_checkpointing": False}
    config = SFTConfig(**given, **own, bf16=False)
    return SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)


def trained(path: str, folder: str, expected: Reference) -> list[dict[str, float]]:
    whole = scenarios.run(LLAMA, path, folder, trained_by=sft)
    rest = scenarios.run(LLAMA, path, f"{folder}-rest", resume=f"{folder}/checkpoint-3", trained_by=sft)
    assert len(rest.losses) == STEPS - 3
    return [expected.wrong(whole), expected.wrong(rest, first=3)]


def test_sft_trainer_trains_saves_and_goes_on_as_on_one_process(ranks: Pools, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    exact, plain = (train(model, tmp_path, trained_by=sft) for model in (LLAMA.build().double(), LLAMA.build()))
    expected, folder = Reference.of(exact, plain), str(tmp_path / "run")
    results = ranks(2).run(trained, scenarios.saved(LLAMA, tmp_path), folder, expected, timeout=2 * LIMIT_S)
    assert results == [[{}, {}]] * 2
    saved = dict(AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-{STEPS}").named_parameters())
    for name, bound in expected.weights.items():
        assert bound.ratio(saved[name].to(torch.float32)) <= FACTOR, name
