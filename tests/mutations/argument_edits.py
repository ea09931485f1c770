"""Seeded faults of arguments that are whole outside of a module, which takes a part of them, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["ARGUMENT_EDITS"]

SHARED, SLICED = "tests/planning/test_shared_states.py", "tests/nn/test_sliced_arguments.py"
TAKEN = f"{SHARED} -k 'take_their_part and list'"

ARGUMENT_EDITS = (
    Edit(
        "planning/replays/argument_steps.py", "self._taken_parts.get(storage_of(tensor))", '""', f"{SHARED} -k writes"
    ),
    Edit(
        "planning/replays/argument_steps.py", "if changed := holders.changed:", "if changed := []:", f"{SHARED} -k stor"
    ),
    Edit("planning/runs/argument_groups.py", "if (dim, size) in enumerate(shapes[door])", "if shapes[door]", TAKEN),
    Edit("planning/proofs/search_gathered.py", "(*group.summed_arguments, *group.taken_arguments)", "()", TAKEN),
    Edit("nn/sliced_arguments.py", "isinstance(value, UserDict) else value", "value is Any else value", SLICED),
    Edit("nn/sliced_arguments.py", "calls.pop().changed", "calls.clear()", f"{SHARED} -k 'values and 2'"),
)
