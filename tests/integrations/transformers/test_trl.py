"""trl's SFTTrainer on a model of ``prepare()``.

trl and datasets, with pandas and pyarrow, are 150 MB: `.ci/run` installs them beside the environment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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

import tpkernels.integrations.transformers as tpk_transformers
from tests.integrations.test_page import losses_of, run_examples
from tests.integrations.transformers import scenarios, test_replicas
from tests.integrations.transformers.running import Sentences, options, train
from tests.integrations.transformers.scenarios import ROWS, Scenario
from tests.integrations.transformers.variations import COMPILED, PLACES, VARIATIONS, alone, varied

pytestmark = pytest.mark.gloo

LLAMA = Scenario("llama", "prepare")


TAKEN = (
    *("save_strategy", "save_steps", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("max_grad_norm", "adam_epsilon", "bf16", "gradient_checkpointing", "torch_compile", "torch_compile_backend"),
    *("eval_strategy", "eval_steps", "per_device_eval_batch_size"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
)
"""What SFTConfig is told as the arguments say."""


def sft(
    *, model: Any, args: Any, train_dataset: Sentences, eval_dataset: Sentences | None, callbacks: list[Any]
) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(67)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")
    own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
    config = SFTConfig(**options(args.output_dir, **{name: getattr(args, name) for name in TAKEN}), **own)
    # In evaluation trl gives the batches of replicas one weight, however many labels they have: here all have as many.
    evaluated = eval_dataset and [
        {**eval_dataset[at], "labels": eval_dataset[at]["input_ids"]} for at in range(len(eval_dataset))
    ]
    data = {"train_dataset": rows_of(train_dataset), "eval_dataset": evaluated and rows_of(evaluated)}
    return SFTTrainer(model=model, args=config, processing_class=tokenizer, callbacks=callbacks, **data)


def rows_of(sentences: Any) -> Any:
    import datasets
    import pyarrow

    rows = [{name: ids.tolist() for name, ids in sentences[at].items()} for at in range(len(sentences))]
    # By itself a data set is named by the digest of its pickled self, which pyarrow's types do not allow everywhere.
    return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="sentences")


def trained(scenario: Scenario, path: str, folder: str, expected: Reference) -> list[dict[str, float]]:
    whole = scenarios.run(scenario, path, folder, trained_by=sft)
    rest = scenarios.run(scenario, path, f"{folder}-rest", resume=f"{folder}/checkpoint-3", trained_by=sft)
    assert len(rest.losses) == STEPS - 3
    return [expected.wrong(whole), expected.wrong(rest, first=3)]


@pytest.mark.parametrize(
    ("world", "scenario"),
    [
        (2, LLAMA),
        pytest.param(3, replace(LLAMA, changes={"intermediate_size": 57}), marks=pytest.mark.full("three ranks")),
        pytest.param(2, replace(LLAMA, way="register"), marks=pytest.mark.full("as prepare() does")),
    ],
)
def test_sft_trainer_trains_saves_and_goes_on_as_on_one_process(
    ranks: Pools, tmp_path: Path, world: int, scenario: Scenario
) -> None:
    expected, folder = reference(scenario, tmp_path), str(tmp_path / "run")
    given = scenario, scenarios.saved(scenario, tmp_path), folder, expected
    assert ranks(world).run(trained, *given, timeout=2 * LIMIT_S) == [[{}, {}]] * world
    check_file(folder, expected)


def told(path: str, folder: str) -> tuple[str, list[str]]:
    """What is said of the head, whose weight trl reads, with ``strict`` and without."""
    model = scenarios.load("prepare", path)
    with pytest.raises(ValueError) as caught:
        train(model, folder, callbacks=[tpk_transformers.Snapshots(strict=True)], trained_by=sft)
    model = scenarios.load("prepare", path)
    with mock.patch("tpkernels.integrations.transformers.snapshots.warnings.warn") as warn:
        train(model, folder, callbacks=[tpk_transformers.Snapshots()], trained_by=sft, max_steps=2)
    said = [str(call.args[0]) for call in warn.call_args_list]
    return str(caught.value), [line for line in said if "op of" in line]


def test_the_head_whose_weight_is_read_instead_is_named_in_one_line_and_strict_raises(
    ranks: Pools, tmp_path: Path
) -> None:
    line = "lm_head does not run an op of tpkernels: the trainer reads its weight, which each step gathers"
    path = scenarios.saved(LLAMA, tmp_path)
    assert ranks(2).run(told, path, str(tmp_path / "run"), timeout=LIMIT_S) == [(line, [line]), (line, [])]


def reference(scenario: Scenario, folder: Path) -> Reference:
    models = scenario.build().double(), scenario.build()
    return Reference.of(*(train(model, folder, trained_by=sft, **scenario.trainer) for model in models))


def check_file(folder: str, expected: Reference) -> None:
    from transformers import AutoModelForCausalLM

    saved = dict(AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-{STEPS}").named_parameters())
    for name, bound in expected.weights.items():
        assert bound.ratio(saved[name].to(torch.float32)) <= FACTOR, name


def on_replicas(path: str, folder: str, shard: bool, expected: Reference) -> list[dict[str, float]]:
    whole = test_replicas.run(test_replicas.LLAMA, path, folder, shard, trained_by=sft)
    again = f"{folder}/checkpoint-3"
    rest = test_replicas.run(test_replicas.LLAMA, path, f"{folder}-rest", shard, resume=again, trained_by=sft)
    return [expected.wrong(whole), expected.wrong(rest, first=3)]


@pytest.mark.full("two replicas of two ranks")
@pytest.mark.parametrize("shard", [False, True])
def test_sft_trainer_gives_each_replica_its_own_rows(ranks: Pools, tmp_path: Path, shard: bool) -> None:
    scenario, folder = test_replicas.LLAMA, str(tmp_path / "run")
    expected, path = reference(scenario, tmp_path), scenarios.saved(scenario, tmp_path)
    assert ranks(4).run(on_replicas, path, folder, shard, expected, timeout=2 * LIMIT_S) == [[{}, {}]] * 4
    check_file(folder, expected)


def load(way: str, path: str, replicas: int, **options: Any) -> Any:
    if replicas == 1:
        return scenarios.load(way, path)
    return test_replicas.load(replace(LLAMA, trainer=COMPILED if options else {}), path, shard=False)


def reasons(breaks: Mapping[str, int]) -> set[str]:
    """Without the addresses of objects."""
    return {text.partition("\n")[0] for text in breaks}


@pytest.mark.full("variations on two, three and four ranks")
@pytest.mark.parametrize("variation", VARIATIONS)
def test_variations_of_sft_trainer_train_as_on_one_process(ranks: Pools, tmp_path: Path, variation: str) -> None:
    scenario = replace(LLAMA, changes={"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 24})
    told, path = VARIATIONS[variation], scenarios.saved(scenario, tmp_path)
    torch._dynamo.utils.counters.clear()
    expected = alone(scenario.build, tmp_path, told, list(ROWS), trained_by=sft)
    of_trl = reasons(torch._dynamo.utils.counters["graph_break"])  # its own loss breaks the graph
    for number, (way, world, replicas) in enumerate(PLACES):
        given = (partial(load, way, path), str(tmp_path / str(number)), replicas, told, expected)
        for wrong, compiled, breaks in ranks(world).run(partial(varied, trained_by=sft), *given, timeout=2 * LIMIT_S):
            assert (wrong, compiled) == ({}, variation == "compiled"), (way, world)
            assert reasons(breaks) <= of_trl, (way, world, breaks)


def example(folder: str) -> str:
    arguments = ["--cpu", "--steps", "3", "--folder", f"{folder}/run"]
    with mock.patch("datasets.arrow_dataset.generate_fingerprint", lambda data: "texts"):  # see sft
        (printed,) = run_examples([("trl_sft.py", arguments)], folder)
    return printed


def test_the_example_prepares_texts_and_learns(ranks: Pools, tmp_path: Path) -> None:
    first, _ = ranks(2).run(example, str(tmp_path), timeout=LIMIT_S)
    alone = tmp_path / "alone"
    alone.mkdir()
    (expected,) = ranks(1).run(example, str(alone), timeout=LIMIT_S)
    losses = losses_of(first)
    assert len(losses) == 3 and losses[2] < losses[0]
    assert losses == pytest.approx(losses_of(expected), abs=2e-4)  # it prints four digits
