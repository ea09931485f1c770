"""Seeded faults of windows by places in memory, rows written by numbers, and widths of rows that move."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["WINDOWS"]

TESTS = "tests/planning/test_windowed.py -m cpu"
MEMORY, PICKING = "planning/replays/memory_rules.py", "planning/replays/picking_rules.py"
WIDTHS = "planning/replays/width_steps.py"

WINDOWS = (
    Edit(MEMORY, "torch.equal(whole.rest.index_select(dim, mine), local.rest)", "True", f"{TESTS} -k refused"),
    Edit(MEMORY, "bool((read < 0).any())", "False", f"{TESTS} -k refused"),
    Edit(PICKING, "picked[0] if _adjoin(picked) else 0", "picked[0]", f"{TESTS} -k rows"),
    Edit(PICKING, "(split.at(place), call.splits[2])", "(split.at(place), None)", f"{TESTS} -k rows"),
    Edit(WIDTHS, "self.function in MOVES and func", "func", f"{TESTS} -k other_windows"),
    Edit(
        "planning/replays/constant_parts.py", "            self._one_number.discard(storage_of(tensor))",
        "            pass", f"{TESTS} -k other_windows",
    ),
    Edit("planning/replays/constant_parts.py", "if len(others) == 1:", "if False:",
         "tests/planning/test_constant_parts.py"),
    Edit("planning/runs/shared_conditions.py", " or one.contradicts}", "}", f"{TESTS} -k 'settled or other_windows'"),
    Edit("planning/proofs/joined_groups.py", " and found[known] == values", "", f"{TESTS} -k joined"),
    Edit(
        "nn/shown_width.py", "added = func(shown.whole, other,", "added = func(shown.whole, shown.whole,",
        "tests/planning/test_added_widths.py -k shown",
    ),
    Edit("nn/shown_width.py", "return _shown(out, moved) if alike else out", "return _shown(out, moved)",
         f"{TESTS} -k move"),
)  # fmt: skip
