"""Seeded faults of parts that modules keep in dicts, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["KEPT_EDITS"]

DICTS = "tests/planning/test_kept_dicts.py"
IN_A_DICT, VALUES = f"{DICTS} -k 'in_a_dict or leave_the_layers'", f"{DICTS} -k 'this_ranks and 2'"

KEPT_EDITS = (
    Edit("planning/runs/module_state.py", "            one.clear()\n", "            del now\n", IN_A_DICT),
    Edit(
        "planning/replays/kept_parts.py",
        "self.state_after().get((name, attribute))) is None",
        "None) is None",
        IN_A_DICT,
    ),
    Edit("sharding/kept_caches.py", "{key: self.part(name, one) for", "{key: one for", VALUES),
    Edit("sharding/kept_caches.py", "return MappingProxyType({", "return dict({", VALUES),
)
