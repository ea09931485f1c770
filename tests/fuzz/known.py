"""Failures that are known and not mended yet: what is taken out of random models because of them.

Each has a name, which every summary prints with the number of models that it changed.  The list is to be empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.vocabulary import Spec

__all__ = ["KNOWN"]


def _no_branch_on_gradients(spec: Any) -> Any:
    """The planner runs models without gradients: code that asks ``torch.is_grad_enabled()`` takes the other way there,
    and the gradient of a parameter on the way that training takes is not summed.  Minimal model:
    ``{"blocks": [{"is": "mlp", "ops": [{"is": "branch", "on": "grad", "ops": [{"is": "positions"}]}]}]}``."""
    if isinstance(spec, dict):
        changed = {key: _no_branch_on_gradients(value) for key, value in spec.items()}
        return changed | {"on": "flag"} if changed.get("on") == "grad" else changed
    return [_no_branch_on_gradients(item) for item in spec] if isinstance(spec, list) else spec


KNOWN: dict[str, Callable[[Spec], Spec]] = {"a branch on torch.is_grad_enabled()": _no_branch_on_gradients}
