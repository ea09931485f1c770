"""Seeded faults of cuts of packed heads, arguments and adapters, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["PLANNER"]

PACKED, ADAPTERS = "tests/planning/test_packed_heads.py", "tests/planning/test_adapters.py"
MERGED = "tests/integrations/transformers/test_peft.py -k merge"

PLANNER = (
    Edit("planning/replay.py", "self._summed.add(id(tensor))", "pass", f"{PACKED} -k queries"),
    Edit(
        "planning/replay.py",
        "both = self._drawn[True] & self._drawn[False]",
        "both = set[int]()",
        f"{ADAPTERS} -k masks",
    ),
    Edit("planning/rules.py", "or local != list(range(low, high))", "", f"{PACKED} -k looks_so"),
    Edit("planning/splits.py", "if outer > 1 and split.copied:", "if False:", f"{PACKED} -k viewed"),
    Edit(
        "planning/proofs.py",
        "return first.out_features < min(first.in_features, last.out_features)",
        "return False",
        ADAPTERS,
    ),
    Edit("sharding/apply.py", "modules[name].__class__ = WholeLinear", "pass", MERGED),
    Edit("nn/packed_parameter.py", "packed._each(Tensor.copy_, args, {})", "pass", MERGED),
    Edit("nn/packed_parameter.py", "leaf.parts[index]", "leaf.parts[0]", MERGED),
    Edit(
        "nn/sliced_arguments.py",
        "runs = value.unflatten(",
        "runs = value.flip(dim).unflatten(",
        "tests/nn/test_sliced_arguments.py",
    ),
    Edit("nn/packed.py", "if index < len(segments) - copied:", "if index < len(segments):", f"{PACKED} -k train"),
    Edit("sharding/followed_calls.py", "(copied or self.parts.of", "(self.parts.of", f"{PACKED} -k train"),
)
