"""What ``print(plan)`` shows: at most 100 columns, everything once, and every row with a note that explains it."""

from __future__ import annotations

import re

import pytest

import tpkernels as tpk
from tests.models import zoo
from tpkernels.planning.entries.plan_table import WIDTH

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.cpu


def parts_of(plan: tpk.ShardingPlan) -> tuple[list[str], list[str], str]:
    """The lines of the table, its notes in one line each, and the totals in one."""
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= WIDTH
    end = max(number for number, line in enumerate(lines) if line.startswith("---"))
    gap = lines.index("", end)
    notes = re.split(r" (?=\d+\. )", " ".join(line.strip() for line in ["", *lines[end + 1 : gap]]))[1:]
    return lines[:end], notes, " ".join(line.strip() for line in lines[gap + 1 :])


def test_rows_have_their_notes_and_totals_follow() -> None:
    table, notes, totals = parts_of(tpk.make_plan(zoo.build("llama"), 2))
    assert re.split("  +", table[0]) == ["module", "style", "full -> local", "bytes/step", "note"]
    (row,) = (line for line in table if line.startswith("model.layers.[0-1].mlp.down_proj (x2)"))
    _, style, shapes, sent, note = re.split("  +", row)
    assert (style, shapes) == ("row", "24x38 -> 24x19") and sent.endswith("KiB")
    said = (
        f"{note}. forward: all-reduce of y. tp_plan: LlamaConfig.base_model_tp_plan says rowwise; sums what gate_proj"
    )
    assert notes[int(note) - 1].startswith(said)
    for words in ("LlamaForCausalLM over 2 ranks", "parameters per rank: ", "replicated (5 modules)", "sent per rank",
                  "implementation: auto"):  # fmt: skip
        assert words in totals


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_long_names_and_reasons_are_wrapped_and_none_is_lost_or_said_twice(name: str) -> None:
    plan = tpk.make_plan(zoo.build(name), 3, sequence_parallel=True)
    table, notes, totals = parts_of(plan)
    assert len({note.partition(" ")[2] for note in notes}) == len(notes)
    assert [note.partition(".")[0] for note in notes] == [str(number + 1) for number in range(len(notes))]
    told = {line.split()[-1] for line in table[2:] if line.split()[-1].isdigit()}
    assert told == {str(number + 1) for number in range(len(notes))}
    for entry in plan.entries:
        assert any(f"{entry.source}: {entry.reason}" in note for note in notes), entry
        assert all(what == "-" or any(what in note for note in notes) for what in (entry.forward, entry.backward))
    for key, (number, _) in plan.attributes.items():
        assert f".{key.rpartition('.')[2]}" in totals and f": {number} -> " in totals
