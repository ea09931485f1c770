"""Seeded faults of rows that are picked by numbers that code counts, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["PICKING_EDITS"]

PICKED = "tests/planning/test_picked_rows.py -k"

PICKING_EDITS = (
    Edit("planning/replays/op_call.py", "if packet not in (aten.view, aten.unsqueeze) or", "if", f"{PICKED} moved"),
    Edit("planning/replays/replay.py", "aten.arange and len(event.whole) == 1", "aten.arange", f"{PICKED} 'one or to'"),
    Edit(
        "planning/replays/picking_rules.py",
        "if math.prod(shapes[1][split.dim]) != shapes[0][split.dim]:",
        "if False:",
        f"{PICKED} some",
    ),
    Edit("planning/replays/picking_rules.py", "if numbers != [split.dim] or", "if", f"{PICKED} place"),
)
