"""How a run is begun: what of the model is called, with which arguments."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

__all__ = ["Example"]


@dataclass(frozen=True)
class Example:
    """How a run is begun: the model with these arguments, one of its methods, or a module of it, by name."""

    method: str
    args: Any
    kwargs: Any

    def of(self, model: nn.Module) -> Any:
        """What is called."""
        begun = self._begun(model)
        return begun.forward if isinstance(begun, nn.Module) else begun

    def run(self, model: nn.Module) -> Any:
        return self._begun(model)(*self.args, **self.kwargs)

    def _begun(self, model: nn.Module) -> Any:
        return attrgetter(self.method)(model) if self.method else model
