"""Refuse the step of an optimizer that holds replaced parameters: it was made before, and would train nothing.

It owns the mark on a parameter that a model no longer has, and the check of it before each step of any optimizer of
``torch.optim`` (one global hook, registered with the first mark).  The mark is an attribute of the parameter, so it
keeps nothing alive.  Without the check, such an optimizer would run without an error.

Layers that are made by ``from_linear`` mark nothing, because the linear stays a layer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["check_current", "retires_parameters"]

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
_MARK = "_tpkernels_replaced"
_hooks: list[Any] = []


def retires_parameters(
    function: Callable[Concatenate[M, P], M],
) -> Callable[Concatenate[M, P], M]:
    """Decorate a function that replaces parameters of its first argument: those that it replaced are marked."""

    @wraps(function)
    def replacing(model: M, /, *args: P.args, **options: P.kwargs) -> M:
        before = {name: parameter for name, parameter in model.named_parameters()}
        result = function(model, *args, **options)
        current = {id(parameter) for parameter in model.parameters()}
        for name, parameter in before.items():
            if id(parameter) not in current:
                setattr(parameter, _MARK, (name, function.__name__))
                if not _hooks:
                    _hooks.append(register_optimizer_step_pre_hook(_check_optimizer))
        return result

    return replacing


def check_current(parameters: Iterable[Tensor], what: str) -> None:
    """Refuse parameters that were replaced.

    Raises:
        ValueError: there is one; the message names it, and the order of calls.
    """
    replaced = [mark for parameter in parameters if (mark := getattr(parameter, _MARK, None)) is not None]
    if replaced:
        name, function = replaced[0]
        raise ValueError(
            f"{what} {len(replaced)} parameter(s) that {function} has replaced, the first is {name!r}: nothing "
            "computes with them any more, so that they do not train. Call tpk.parallelize (and tpk.data_parallel) "
            "first and make the optimizer then, of the model's parameters as they are now: "
            "torch.optim.AdamW(model.parameters(), ...)"
        )


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    check_current(
        (parameter for group in optimizer.param_groups for parameter in group["params"]),
        f"{type(optimizer).__name__} holds",
    )
