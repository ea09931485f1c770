"""transformers' Trainer on models that it has cut with our ops, or that ``prepare`` has: as on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.curves import STEPS, Curve, Reference
from tests.nn.reference import LIMIT_S, tp_mesh, whole
from tpkernels.errors import CollectiveTimeout, GroupMismatch
from tpkernels.state.originals import as_held
from tpkernels.testing.spawn import Pools, RanksFailed
from tpkernels.verification.bounds import FACTOR, bounds_of

transformers = pytest.importorskip(
    "transformers", reason="the package transformers is missing: pip install transformers"
)
pytest.importorskip("accelerate", reason="the package accelerate is missing: pip install --no-deps accelerate psutil")

import tpkernels.integrations.transformers as tpk_transformers  # noqa: E402
from tests.integrations.transformers import scenarios  # noqa: E402
from tests.integrations.transformers.running import Sentences  # noqa: E402
from tests.integrations.transformers.scenarios import Scenario  # noqa: E402
from tests.integrations.transformers.variations import BEST, BF16, CHECKPOINTS, COMPILED, MICRO  # noqa: E402

pytestmark = pytest.mark.gloo

UNEVEN = {"intermediate_size": 57, "num_hidden_layers": 1}
THREE = {"intermediate_size": 57, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24}
GPT2 = Scenario("gpt2", "prepare")
QUICK = [Scenario("mixtral", "register", UNEVEN, MICRO)]
FULL = [
    Scenario("llama", "prepare", {**UNEVEN, "tie_word_embeddings": True}),
    Scenario("llama", "register", trainer=MICRO),
    Scenario("mixtral", "prepare", UNEVEN | THREE),
    Scenario("llama", "register", {**UNEVEN, "tie_word_embeddings": True}, CHECKPOINTS),
    Scenario("llama", "register", trainer=BF16),
    Scenario("llama", "prepare", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}, MICRO),
    Scenario("gpt2", "prepare", trainer=CHECKPOINTS),
    Scenario("llama", "register", UNEVEN, COMPILED),
    Scenario("llama", "prepare", UNEVEN, COMPILED),
]


def trained(scenario: Scenario, path: str, folder: str, reference: Reference) -> dict[str, Any]:
    """A run, and a second one from its third step: what is wrong, and whether the second is the first, bit by bit."""
    said: dict[str, torch.Tensor] = {}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    first = scenarios.run(scenario, path, folder, ask=lambda model: said.update(scenarios.answers(model, scenario.way)))
    again = scenarios.run(scenario, path, f"{folder}-resumed", resume=f"{folder}/checkpoint-3")
    same = [name for name, weight in first.weights.items() if not torch.equal(weight, again.weights[name])]
    return {
        "wrong": reference.wrong(first),
        "resumed": (same, again.losses == first.losses[3:], again.norms == first.norms[3:]),
        "weights": first.weights if dist.get_rank() == 0 else None,
        "said": said,
        "graphs": {name: dict(torch._dynamo.utils.counters[name]) for name in ("stats", "graph_break")},
    }


def check_file(
    folder: str, scenario: Scenario, weights: dict[str, torch.Tensor], said: Sequence[dict[str, torch.Tensor]] = ()
) -> None:
    """A checkpoint is the unsharded model: transformers alone loads it, and it has these weights.

    ``said``: by each rank's model, which must be what this one says.
    """
    kind = type(scenario.build())
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if scenario.model == "mixtral":
        options["experts_implementation"] = "eager"  # torch's grouped GEMM takes no sizes that are not even
    plain, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, weights[name].view_as(parameter)), name
    assert "distributed_config" not in Path(folder, "config.json").read_text(encoding="utf-8")
    if not said:
        return
    with torch.autocast("cpu", torch.bfloat16, enabled=scenario.trainer.get("bf16", False)):
        own = scenarios.answers(plain, scenario.way)
    with torch.no_grad():
        exact = plain.double()(input_ids=scenarios.ids()).logits
    bound = bounds_of({"logits": (exact, own.pop("logits"))}, {})["logits"]
    for one in said:
        assert bound.ratio(one["logits"]) <= FACTOR
        assert all(torch.equal(one[way], tokens) for way, tokens in own.items()), "generate says something else"


@dataclass(frozen=True)
class Trained:
    """What several tests begin with: a GPT-2 that two ranks have trained."""

    reference: Reference
    path: str
    folder: str
    """Of its checkpoints."""
    results: list[dict[str, Any]]


@pytest.fixture(scope="module")
def gpt2(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("gpt2")
    reference, path, run = GPT2.reference(folder), scenarios.saved(GPT2, folder), str(folder / "run")
    return Trained(reference, path, run, ranks(2).run(trained, GPT2, path, run, reference, timeout=2 * LIMIT_S))


def check(scenario: Scenario, folder: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["wrong"] == {} and result["resumed"] == ([], True, True), (scenario, result)
        graphs = result["graphs"]["stats"].get("unique_graphs", 0)
        assert result["graphs"]["graph_break"] == {} and (graphs > 0) == ("torch_compile" in scenario.trainer), scenario
    said = [result["said"] for result in results]
    check_file(f"{folder}/checkpoint-{STEPS}", scenario, results[0]["weights"], said)


def test_a_gpt2_of_prepare_trains_saves_and_goes_on_as_on_one_process(gpt2: Trained) -> None:
    check(GPT2, gpt2.folder, gpt2.results)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full("three ranks"))])
@pytest.mark.slow("6 s; its neighbour trains a GPT-2")
def test_trainer_trains_saves_and_goes_on_as_on_one_process(
    ranks: Pools, tmp_path: Path, world: int, full: bool
) -> None:
    chosen = [*QUICK, *FULL, *([GPT2] if world == 3 else [])] if full else QUICK
    for number, scenario in enumerate(chosen):
        if world == 3 and scenario.way == "register":
            # transformers' own plan does not cut two groups of keys over three ranks.
            scenario = replace(scenario, changes=scenario.changes | THREE)
        folder = tmp_path / str(number)
        reference = scenario.reference(folder, world)
        assert len(reference.numbers) == 2 * STEPS
        path, run = scenarios.saved(scenario, folder), str(folder / "run")
        check(scenario, run, ranks(world).run(trained, scenario, path, run, reference, timeout=2 * LIMIT_S))


def goes_on(scenario: Scenario, path: str, folder: str, reference: Reference) -> dict[str, float]:
    curve = scenarios.run(scenario, path, f"{folder}-{dist.get_world_size()}", resume=f"{folder}/checkpoint-3")
    assert len(curve.losses) == STEPS - 3
    return reference.wrong(curve, first=3)


@pytest.mark.slow("2 s")
def test_a_run_goes_on_at_another_number_of_ranks(ranks: Pools, gpt2: Trained, full: bool) -> None:
    for world in (1, 3) if full else (1,):
        given = (GPT2, gpt2.path, gpt2.folder, gpt2.reference)
        assert ranks(world).run(goes_on, *given, timeout=LIMIT_S) == [{}] * world


def evaluated(path: str, folder: str) -> Curve:
    return with_evaluation(scenarios.load(GPT2.way, path), folder, callbacks=[tpk_transformers.Snapshots()])


def with_evaluation(model: Any, folder: str | Path, **options: Any) -> Curve:
    return scenarios.train(model, folder, evaluation=Sentences(), **{**BEST, "max_grad_norm": 0.05, **options})


def evaluated_alone(folder: Path) -> Reference:
    plain, exact = (with_evaluation(model, folder / "alone") for model in (GPT2.build(), GPT2.build().double()))
    first, second = exact.evaluations
    assert first > second
    return Reference.of(exact, plain)


@pytest.mark.full("two more runs on one process, and as many on ranks")
def test_a_run_is_evaluated_and_ends_with_its_best_model(ranks: Pools, tmp_path: Path, gpt2: Trained) -> None:
    reference = evaluated_alone(tmp_path)
    for world in (2, 3):
        for found in ranks(world).run(evaluated, gpt2.path, str(tmp_path / f"best-{world}"), timeout=LIMIT_S):
            assert reference.wrong(found) == {} and len(found.evaluations) == 2


# ---------------------------------------------------------------- seeded faults


def bias_twice(model: Any) -> None:
    mlp = model.transformer.h[1].mlp
    mlp.register_forward_hook(lambda m, args, y: y + whole(dict(m.c_proj.named_parameters())["bias"]).detach())


class OwnSentences(Sentences):
    """Other numbers on each rank."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        return {key: value.roll(tp_mesh().get_local_rank()) for key, value in item.items()}


def faulty(scenario: Scenario, path: str, folder: str, reference: Reference) -> list[dict[str, float]]:
    bias = scenarios.run(scenario, path, f"{folder}/bias", spoil=bias_twice)
    batches = scenarios.run(scenario, path, f"{folder}/batches", data=OwnSentences())
    return [reference.wrong(bias), reference.wrong(batches)]


def packed_file(scenario: Scenario, path: str, folder: str) -> None:
    model = scenarios.load(scenario.way, path)
    with as_held():
        held = {name: whole(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        scenario.build().save_pretrained(folder, state_dict=held)


def one_rank_does_not_save(scenario: Scenario, path: str, folder: str) -> None:
    if dist.get_rank() == 1:
        tpk_transformers.Snapshots.on_save = lambda self, *args, **given: None
    try:
        scenarios.run(scenario, path, folder)
    finally:
        if dist.get_rank() == 1:
            del tpk_transformers.Snapshots.on_save


@pytest.mark.full("tests/mutations seeds such faults in the product, and tests of the quick run kill them")
def test_faults_are_caught(ranks: Pools, tmp_path: Path, gpt2: Trained) -> None:
    given = (GPT2, gpt2.path, str(tmp_path), gpt2.reference)
    for found in zip(*ranks(2).run(faulty, *given, timeout=LIMIT_S), strict=True):
        assert any(found), "no rank noticed"
    ranks(2).run(packed_file, GPT2, gpt2.path, str(tmp_path / "packed"), timeout=LIMIT_S)
    with pytest.raises(AssertionError, match="missing_keys"):
        check_file(str(tmp_path / "packed"), GPT2, {})


@pytest.mark.full("waits for the time-out of a group")
def test_a_rank_that_does_not_save_is_named(ranks: Pools, tmp_path: Path) -> None:
    path = scenarios.saved(GPT2, tmp_path)
    with pytest.raises(RanksFailed) as caught:
        ranks(2).run(one_rank_does_not_save, GPT2, path, str(tmp_path / "one"), timeout=LIMIT_S)
    errors = [
        error for error in caught.value.exceptions.values() if isinstance(error, GroupMismatch | CollectiveTimeout)
    ]
    assert errors and "[1]" in str(errors[0]), caught.value
