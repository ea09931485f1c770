"""Random models on ranks: a sample here, ten thousand with ``python -m tests.fuzz``; and that the judge judges.

The seeds are fixed, so that a failure is the change's and not the day's; the full run draws fresh ones.
"""

from __future__ import annotations

import json

import pytest

from tests.fuzz.model import draw_spec
from tests.fuzz.runner import FAILURES, fuzz, judged, kinds_in, seeds_of, shrunk, smaller
from tests.fuzz.vocabulary import BLOCKS, FEATURES, HEADS, Spec
from tests.mutations.search import check_with
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

SEED = 13
SHARES = {2: (2, 1536), 3: (1, 384), 4: (1, 192)}
"""How many random models, by number of ranks, without and with --full: more ranks show little more, and cost more."""


@pytest.mark.slow("7 s of random models; what they have found is run by the next test")
def test_no_random_model_is_wrong(ranks: Pools, full: bool) -> None:
    models = proven = lost = 0
    for world, counts in SHARES.items():
        seeds = seeds_of(SEED + world, counts[full])
        print(f"seeds {seeds[0]} to {seeds[-1]} on {world} ranks")
        summary = fuzz(ranks, seeds, (world,), small=not full)
        told = [f"seed {failure['seed']}: {failure['verdict']['detail']}" for failure in summary.failures]
        assert not told, "\n".join([*told, summary.told()])
        models, proven, lost = models + summary.models, proven + summary.proven, lost + summary.lost
    # Models of one block or two hold little; of the larger ones of the full run more than half are proven in part.
    assert proven >= models * (0.5 if full else 0.3), (proven, models)
    assert lost <= models // 100, (lost, models)


FOUND: list[Spec] = [
    # An angle that is a parameter: complex numbers lost where they came from, and its gradient was not summed.
    {"blocks": [{"is": "packed_gate", "ops": [{"is": "magnitude"}]}]},
    {"blocks": [{"is": "mlp", "ops": [{"is": "phase"}]}]},
    # Parts were followed into a constant that something whole was written to: the output was refused.
    {"blocks": [{"is": "experts", "router": "mask", "rows": "all"}]},
    # A hook on a gradient that mixes features, which a run without gradients does not meet.
    {"blocks": [{"is": "mlp", "ops": [{"is": "hook_over_features"}]}]},
    # A norm inside of a module that works on a part of the sequence, and has a parameter of its own.
    {"blocks": [{"is": "norms"}, {"is": "mlp"}], "sequence_parallel": True},
    # 15 features, 8 and 7 of them on two ranks, and code that asks for more than 7: only the first rank was replayed.
    {"blocks": [{"is": "mlp", "hidden": 15, "ops": [{"is": "branch", "on": "features", "ops": [{"is": "tanh"}]}]}]},
    # A rank without any of the sequence, whose view of nothing was no view of the rules': it raised, the others waited.
    {"world": 3, "length": 4, "blocks": [{"is": "matmul_mlp", "how": "@"}, {"is": "mlp"}], "sequence_parallel": True},
    # A list of modules between a column and its row, taken for blocks whose residual could be cut along the sequence.
    {
        "blocks": [
            {"is": "mlp"},
            {"is": "mlp", "ops": [{"is": "in_heads", "ops": [{"is": "affine_of_a_head"}]}]},
        ],
        "again": 0,
        "sequence_parallel": True,
    },
    # A part in a list that is a field of the result.
    {"blocks": [{"is": "added_to_zeros", "gives": True}], "output": "object"},
    # A module in a norm's place that divides by the length that it sees, which was one rank's.
    {"blocks": [{"is": "mlp", "wiring": {"norm": "by length"}}], "sequence_parallel": True},
    # One that is given the residual twice: the second time it was the whole, for which the first was no match.
    {"blocks": [{"is": "mlp", "wiring": {"norm": "two"}}], "sequence_parallel": True},
    # Code that asks whether gradients are enabled: the model was run without, and the other way was never seen.
    {"blocks": [{"is": "mlp", "ops": [{"is": "branch", "on": "grad", "ops": [{"is": "positions"}]}]}]},
    # Code that asks a layer's weight for its shape, which in a packed layer was that of the first part.
    {"blocks": [{"is": "reads_the_weight", "how": "shape", "hidden": 30, "ops": [{"is": "repeated_features"}]}]},
    # A module in a norm's place that cannot do without rows, on the rank that has none of the sequence.
    {
        "world": 3,
        "length": 4,
        "blocks": [{"is": "mlp", "wiring": {"norm": "rows of a sequence"}}],
        "sequence_parallel": True,
    },
    {"blocks": [{"is": "asks_elsewhere", "hidden": 30, "ops": [{"is": "repeated_features"}]}]},
    # A part by features that leaves a module which works on the whole sequence: it was cut along the sequence as well.
    {
        "blocks": [{"is": "bottleneck", "ops": [{"is": "plus_whole"}], "wiring": {"residual": "none"}}],
        "head": "classes",
        "sequence_parallel": True,
    },
]
"""What random models have found, made smaller."""


TIE: Spec = {
    "seed": 20261124003648, "world": 2, "batch": 3, "length": 7, "width": 24, "stem": "ids", "norm": "layer",
    "blocks": [
        {"is": "mlp", "hidden": 18, "bias": True, "wiring": {"norm": "in place", "residual": "gated"}},
        {
            "is": "attention", "heads": 4, "head_dim": 4, "bias": False, "kv_heads": 1, "scores": "shared_table",
            "q_ops": [{"is": "largest_of_a_head"}, {"is": "norm_on_both", "rms": True}],
            "out_ops": [{"is": "only_the_largest"}], "wiring": {"norm": "after", "residual": "scaled"},
        },
    ],
}  # fmt: skip
"""Heads that share keys and values give the same but for rounding, and the largest of their features is kept."""


def test_a_model_that_decides_by_a_rounding_is_not_called_wrong(ranks: Pools) -> None:
    """Its weights off by one rounding change its output by its own size; nothing that is sharded is needed for that."""
    (verdict,) = judged(ranks, [TIE])
    assert verdict["kind"] == "a tie" and "output 0 differs" in verdict["detail"], verdict


@pytest.mark.slow("6 s")
def test_what_random_models_have_found_is_right_now(ranks: Pools) -> None:
    specs = [{"seed": 0, "world": 2, **spec} for spec in FOUND]
    for spec, verdict in zip(specs, judged(ranks, specs), strict=True):
        assert verdict["kind"] in ("right", "refused"), (spec, verdict["detail"])


def test_a_fault_is_found_by_random_models_and_made_small(ranks: Pools, full: bool) -> None:
    """Gradients of replicated parameters that nobody sums: seeded, found, and shrunk to a block with an op or two."""
    if not full:
        pytest.skip("--full: the search for the smallest model takes a quarter of a minute")
    fault = "gradients of replicated parameters are not summed"
    drawn = (draw_spec(seed, (2,), small=True) for seed in seeds_of(2, 2000))
    likely = [spec for spec in drawn if "temperature" in json.dumps(spec)][:6]
    verdicts = judged(ranks, likely, check_with, fault)
    found = [(spec, verdict) for spec, verdict in zip(likely, verdicts, strict=True) if verdict["kind"] in FAILURES]
    assert found, [verdict["kind"] for verdict in verdicts]
    assert all("gradient" in verdict["detail"] for _, verdict in found), found
    spec, verdict = min(found, key=lambda pair: len(json.dumps(pair[0])))
    small = shrunk(ranks, spec, verdict, 24, check_with, fault)
    assert len(json.dumps(small)) < len(json.dumps(spec)), (small, spec)


@pytest.mark.cpu
def test_a_seed_draws_the_same_model_always_and_as_data() -> None:
    for seed in range(50):
        spec = draw_spec(seed)
        assert spec == draw_spec(seed) == json.loads(json.dumps(spec))


@pytest.mark.cpu
def test_there_are_many_kinds_and_all_are_drawn() -> None:
    drawn = set[str]()
    for seed in range(4000):
        drawn |= set(kinds_in(draw_spec(seed)))
    kinds = {*BLOCKS, *FEATURES, *HEADS}
    assert len(kinds) > 200
    assert not kinds - drawn


@pytest.mark.cpu
def test_smaller_specs_are_smaller() -> None:
    spec = draw_spec(3)
    sizes = [len(json.dumps(made)) for made in smaller(spec)]
    assert sizes
    assert all(size <= len(json.dumps(spec)) for size in sizes)
