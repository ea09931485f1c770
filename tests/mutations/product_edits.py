"""Seeded faults of products with parameters that are cut, and of results that are, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["OWN_PRODUCTS", "RETURNED"]

PRODUCTS = "tests/planning/test_own_products.py"

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
