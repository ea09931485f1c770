"""Modules whose ``forward`` runs within a function mode, which changes some of the calls that their code makes."""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Any, cast

from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["run_within"]


def run_within(module: nn.Module, mode: type[TorchFunctionMode], given: object) -> None:
    """Run ``forward`` of ``module`` within ``mode(given)``, from now on.

    Copies of the module have a copy of what is given, and of layers in it their own.
    """
    module.__dict__[_held_as(mode)] = given  # no submodule
    module.__class__ = _within(type(module), mode)  # type: ignore[arg-type]


def _held_as(mode: type[TorchFunctionMode]) -> str:
    return f"_tpkernels_{mode.__name__}"


@lru_cache(maxsize=256)
def _within(cls: type[nn.Module], mode: type[TorchFunctionMode]) -> Any:
    held = _held_as(mode)

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode(self.__dict__[held]):  # type: ignore[call-arg]
            return cls.forward(self, *args, **kwargs)

    members = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members | {"__qualname__": cls.__qualname__}))
