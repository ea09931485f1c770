"""Seeded faults of products with parameters, and of states, results and arguments, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["ARGUMENTS", "OWN_PRODUCTS", "RETURNED"]

PRODUCTS = "tests/planning/test_own_products.py"
STATES = "tests/planning/test_written_states.py"

OWN_PRODUCTS = (
    Edit(
        "planning/replays/product_steps.py",
        "answer, self._open = role.split(dim)",
        "answer, self._open = role.split(0)",
        f"{PRODUCTS} -k with_what",
    ),
    Edit("planning/proofs/own_products.py", "if call.name not in alone:", "if False:", f"{PRODUCTS} -k two_modules"),
    Edit("nn/parameter_products.py", "copy_to_group(product.x, self.own.mesh)", "product.x", f"{PRODUCTS} -k compute"),
    Edit("nn/parameter_products.py", "if taken != held:", "if False:", f"{PRODUCTS} -k not_proven_for"),
    Edit(
        "sharding/own_products.py",
        "fork.enter(y.device, mesh.get_local_rank())",
        "pass",
        f"{PRODUCTS} -k other_numbers",
    ),
    Edit("nn/written_states.py", "replicated_grad=True", "replicated_grad=False", f"{STATES} -k values_states"),
    Edit("nn/written_states.py", "if self._version() != self._known:", "if False:", f"{STATES} -k values_states"),
    Edit("planning/replays/state_steps.py", "in own for tensor in", "in () for tensor in", f"{STATES} -k would_not"),
    Edit(
        "planning/replays/state_steps.py",
        "if storage_of(tensor) in self._left_behind:",
        "if False:",
        f"{STATES} -k would_not",
    ),
    Edit(
        "planning/replays/state_steps.py",
        "if changed := items_changed(",
        "if changed := [] and items_changed(",
        f"{STATES} -k would_not",
    ),
    Edit(
        "planning/runs/graph.py",
        "if not any(id(output) == blank",
        "if False and any(id(output) == blank",
        f"{STATES} -k is_cut",
    ),
)

WEIGHTS = "tests/planning/test_returned_weights.py"

RETURNED = (
    Edit("planning/proofs/search_leaving.py", "if given + together >=", "if together >=", f"{WEIGHTS} -k long"),
    Edit(
        "planning/proofs/whole_replays.py",
        "enumerate([*proofs, *pairs]) if one.results)",
        "enumerate(pairs) if one.results)",
        f"{WEIGHTS} -k heads_are",
    ),
)

SUMMED = "tests/planning/test_summed_arguments.py"

ARGUMENTS = (
    Edit(
        "planning/replays/summed_steps.py",
        "            self._summed.add(id(copy))\n",
        "            self._mark(copy, None, self.blame)\n",
        f"{SUMMED} -k cut_by_heads",
    ),
    Edit(
        "planning/replays/sampling_rules.py",
        "image is None or image.dim != 0 or grid != image",
        "image is None",
        f"{SUMMED} -k sampled_at",
    ),
    Edit("nn/summed_arguments.py", "copy_to_group(value, mesh) if trained", "value if trained", f"{SUMMED} -k values"),
    Edit(
        "sharding/local_rules.py",
        "single = set(split.segments) == {1} and",
        "single = False and",
        f"{SUMMED} -k values",
    ),
)
