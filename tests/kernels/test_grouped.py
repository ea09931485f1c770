"""Values of the grouped kernel, interpreted: late tokens, sums taken early, every option, against the fp64 bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.grouped_scenarios import Experts
from tests.kernels.interpreter import Failed, Interpreter, mutant
from tpkernels.gemm.dealt import DealtRows
from tpkernels.gemm.grouped import TokenRows
from tpkernels.kernels.schedule import arrivals, grouped_table

pytestmark = pytest.mark.cpu

FP8: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "out_dtype": torch.bfloat16, "scale": "row"}
GATHER: dict[str, dict[str, Any]] = {
    "swiglu, biases, products kept": {"activation": "swiglu", "bias": True, "preactivation": True, "rank": 2},
    "clamped, halves": {"activation": "clamped_swiglu", "bias": True, "block": (16, 128, 16), "n": 150},
    "all tokens on one expert": {"load": "one", "experts": 3, "activation": "silu", "dtype": torch.float16},
    "experts without tokens, fp32, transposed": {"load": "few", "dtype": torch.float32, "transposed": True, "top_k": 3},
    "one CTA, one token": {"programs": 1, "shards": (0, 1, 0, 0), "rank": 3, "top_k": 1},
    "nothing to contract": {"k": 0, "bias": True},
    "fp8": {**FP8, "activation": "swiglu", "bias": True},
    "odd K, epochs that wrap": {"k": 41, "calls": 3, "first_epoch": 2**31 - 2, "shards": (9, 20), "num_chunks": 3},
}
COMBINE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "addend and two products": {"addend": True, "dtype": torch.float16, "rank": 1, "top_k": 3},
    "all tokens on one expert": {"load": "one", "dtype": torch.float32, "transposed": True, "rank": 2},
    "tokens with fewer rows here than experts": {"dealt": True, "top_k": 3, "experts": 5, "calls": 2},
    "more tokens than are summed at once": {"shards": (70, 5), "num_chunks": 1, "experts": 2, "programs": 1},
    "epochs that wrap": {"calls": 3, "first_epoch": 2**31 - 2, "shards": (0, 20), "num_chunks": 3},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", GATHER)
def test_rows_of_experts_are_right_when_tokens_come_late_and_shuffled(interpreter: Interpreter, name: str) -> None:
    interpreter.run("grouped_scenarios.gather", Experts(**GATHER[name]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", COMBINE)
def test_sums_of_tokens_are_complete_when_their_chunk_is_announced(interpreter: Interpreter, name: str) -> None:
    interpreter.run("grouped_scenarios.combine", Experts(**COMBINE[name]))


def test_tokens_that_never_come_are_reported_and_the_kernel_ends(interpreter: Interpreter) -> None:
    case = Experts(shards=(20, 30, 20), rank=1, num_chunks=2, patience=200, first_epoch=5, programs=1)
    told, done, undone = interpreter.run("grouped_scenarios.missing_tokens", case)
    assert (told["state"], told["kind"], told["op"], told["peer"], told["got"]) == (1, 1, 7, 2, 4)
    assert done > 0 and undone > 0


def test_a_table_has_every_row_once_within_one_expert_and_one_chunk() -> None:
    experts = torch.tensor([[0, 2], [2, 1], [2, 0], [3, 2], [2, 3], [0, 1], [2, 0]])
    rows, bounds = TokenRows(experts, 5), [0, 2, 3, 7]
    ranges = [[(0, 1), (1, 1)], [(1, 2), (2, 3)]]
    table = grouped_table(rows.first_rows(bounds), ranges, arrivals(2, 2, 1), 2)
    assert int(table[0, 0]) == len(table) - 1
    seen = []
    for row, count, rank, chunk, slot, _, chunk_tiles, expert in table[1:].tolist():
        low, high = ranges[rank][chunk]
        of_tile = rows.tokens[row : row + count]
        assert ((of_tile >= bounds[low]) & (of_tile < bounds[high])).all() and slot == 2 * rank + chunk
        assert all(expert in experts[token] for token in of_tile) and 0 < count <= 2
        assert chunk_tiles == sum(other[4] == slot for other in table[1:].tolist())
        seen += range(row, row + count)
    assert sorted(seen) == list(range(14)) and table[1, 2] == 1


def test_rows_of_dealt_out_experts_are_listed_by_token_and_cut_by_chunk() -> None:
    generator = torch.Generator().manual_seed(3)
    experts = torch.rand(23, 6, generator=generator).topk(3, 1).indices
    for rank, (first, count) in enumerate([(0, 2), (2, 1), (3, 3)]):
        rows = DealtRows(experts, (2, 1, 3), (10, 0, 13), rank)
        for place, of_token in enumerate(rows.of_tokens().tolist()):
            found = [row for row in of_token if row >= 0]
            assert found == [row for row, token in enumerate(rows.tokens.tolist()) if token == place]
            assert of_token == found + [-1] * (3 - len(found)) and found == sorted(found)
        bounds = [0, 1, rows.num_tokens // 2, rows.num_tokens]
        first_rows, slots = rows.first_rows(bounds), experts.flatten()[rows.slots] - first
        assert first_rows.shape == (4, count)
        for cut, bound in enumerate(bounds):
            for expert in range(count):
                earlier = (slots < expert) | ((slots == expert) & (rows.tokens < bound))
                assert first_rows[cut, expert] == earlier.sum()


# ---------------------------------------------------------------- the tests can fail

FAULTS: dict[str, tuple[str, str, tuple[str, str], dict[str, Any]]] = {
    "expert_of_another_tile": (
        "gather", "grouped_matmul.py", ("= tl.load(order + row_tile", "= tl.load(order + row_tile // 2"), {},
    ),
    "no_wait": (
        "gather", "grouped_matmul.py", ("(slot != ready)", "(slot == -5)"), {"shards": (3, 20), "delay": 0.1},
    ),
    "rows_are_their_own_tokens": (
        "gather", "grouped_matmul.py", ("tl.load(tokens + row + tl.where", "(row + tl.where"), {},
    ),
    "scales_of_rows_as_if_they_were_tokens": (
        "gather", "grouped_matmul.py", ("sources = tl.load(tokens + sources)", "sources = sources // 2"), FP8,
    ),
    "scale_of_another_expert": (
        "gather", "grouped_matmul.py", ("else scale_weight + expert * n,", "else scale_weight,"), FP8,
    ),
    "bias_of_another_expert": ("gather", "grouped_matmul.py", ("bias + expert * n,", "bias,"), {"bias": True}),
    "weights_are_forgotten": ("combine", "grouped_matmul.py", ("product = product *", "product = product + 0 *"), {}),
    "one_row_of_a_token_is_forgotten": (
        "combine", "grouped_matmul.py", ("tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1)"), {},
    ),
    "sums_before_the_last_product": (
        "combine", "grouped_matmul.py", ("+ column, chunk_tiles) != 0", "+ column, 1) != 0"), {"programs": 1},
    ),
    "flag_of_the_first_columns": (
        "combine", "grouped_matmul.py", ("counters + slot, num_column_tiles)", "counters + slot, 1)"), {"n": 150},
    ),
    "rows_that_are_not_there": (
        "combine", "grouped_matmul.py", ("inside = (row[:, None] >= 0)", "inside = (row[:, None] >= -1)"),
        {"dealt": True},
    ),
    "tokens_of_another_chunk": (
        "combine", "grouped_matmul.py", ("token = first_token + start + offsets", "token = start + offsets"), {},
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow("3 s: that the tests of this file can fail")
def test_a_seeded_fault_is_caught(interpreter: Interpreter, tmp_path: Path, name: str) -> None:
    scenario, file, change, options = FAULTS[name]
    package = mutant(tmp_path, f"mutant_{name}", {file: change})
    case = Experts(**{"patience": 3000, "delay": 0.03, **options, "package": package, "folder": str(tmp_path)})
    with pytest.raises(Failed, match=r"BoundExceeded|AssertionError"):
        interpreter.run(f"grouped_scenarios.{scenario}", case)
