"""Subclasses of torch's layers with a ``forward`` of their own, and how that code goes on around a parallel layer.

It owns two kinds of such classes.  Code that calls ``super().forward(x)`` (an embedding times a scale) keeps running:
:func:`rebased` makes the same classes again upon another base, so that ``super()`` is the parallel layer there.  To
the planner that code is a part of the model around the layer, and is proven like all else.  Code that writes out what
torch's ``forward`` computes (``input @ self.weight.T + self.bias``) is recognised by what it computes on samples,
forward and backward, and is dropped.

It refuses code that uses the parameters for anything but their dtype and device and is not torch's computation, classes
with several bases of their own, and code whose source cannot be found.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.planning.modules.source_reads import NAMES, methods_of, reached

__all__ = ["calls_super", "computes_as_torch", "rebased"]


@lru_cache(maxsize=256)
def calls_super(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether ``forward`` of ``kind`` is code around ``super().forward``, in a single line of classes down to ``base``,
    that does not use the parameters itself."""
    own = kind.__mro__[: kind.__mro__.index(base)]
    if any(len(some.__bases__) != 1 for some in own) or not any("forward" in vars(some) for some in own):
        return False
    methods: dict[str, list[ast.FunctionDef]] = {}
    for some in own:
        found = methods_of(some)
        if found is None:
            return False
        for method in found:
            methods.setdefault(method.name, []).append(method)
    forwards = methods.get("forward", [])
    if len(forwards) != sum("forward" in vars(some) for some in own) or not all(map(_passes_on, forwards)):
        return False
    return not any(node.attr in NAMES for node in reached(methods, "forward"))


def _passes_on(forward: ast.FunctionDef) -> bool:
    """Whether the code calls ``super().forward(x)``, with one argument and in no other way."""
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call)]
    supers = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "super"]
    passing = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.value in supers]
    plain = all(
        isinstance(node.func, ast.Attribute) and node.func.attr == "forward"
        and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred) and not node.keywords
        for node in passing
    )  # fmt: skip
    return bool(passing) and plain and len(passing) == len(supers) and not any(node.args for node in supers)


def rebased(kind: type[nn.Module], base: type[nn.Module], new: type[nn.Module]) -> type[nn.Module]:
    """The classes from ``kind`` down to ``base`` once more, upon ``new``; their ``__init__`` and the like left out."""
    made = new
    for old in reversed(kind.__mro__[: kind.__mro__.index(base)]):
        cell = types.CellType()
        members = {
            name: _moved(value, cell) for name, value in vars(old).items() if not name.startswith(("__", "_abc_"))
        }
        kept = {name: value for name, value in members.items() if name == "forward" or not hasattr(new, name)}
        kept |= {"__module__": new.__module__, "__doc__": new.__doc__, "__qualname__": new.__qualname__}
        made = cast("type[nn.Module]", type(new.__name__, (made,), kept))
        cell.cell_contents = made
    return made


def _moved(value: Any, cell: types.CellType) -> Any:
    """A function whose ``super()`` starts from the class in ``cell``; all else as it is."""
    if not isinstance(value, types.FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    old = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    closure = tuple(cell if name == "__class__" else held for name, held in old.items())
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    made.__kwdefaults__, made.__doc__, made.__dict__ = value.__kwdefaults__, value.__doc__, dict(value.__dict__)
    return made


SIZES = 3, 5
"""Input and output features of the samples."""
SCALES = 1e-3, 1.0, 1e3


@lru_cache(maxsize=256)
def computes_as_torch(kind: type[nn.Module], base: type[nn.Module], bias: bool) -> bool:
    """Whether an instance of ``kind``, with no attributes but those of ``base``, gives what ``F.linear`` gives.

    Values and gradients in fp64, in training and in evaluation, for inputs of one to three dimensions, small and large.
    """
    if base is not nn.Linear:
        return False
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        sample: Any = nn.Linear(*SIZES, bias=bias, device="cpu", dtype=torch.float64)
        sample.__class__ = kind
        weights = list(sample.parameters())
        for training in (True, False):
            sample.train(training)
            for shape in ((4,), (2, 4), ()):
                for scale in SCALES:
                    x = (scale * torch.randn(*shape, SIZES[0], dtype=torch.float64)).requires_grad_()
                    if not _alike(sample, lambda x: F.linear(x, *weights), x, weights):
                        return False
    return True


def _alike(sample: nn.Module, torchs: Callable[[Tensor], Tensor], x: Tensor, weights: list[Any]) -> bool:
    try:
        y = sample(x)
    except Exception:  # noqa: BLE001 - code of whatever the class does
        return False
    expected = torchs(x)
    if not isinstance(y, Tensor) or y.shape != expected.shape or y.dtype != expected.dtype or not y.requires_grad:
        return False
    dy = torch.randn_like(expected)
    try:
        mine = torch.autograd.grad(y, [x, *weights], dy, allow_unused=True)
    except RuntimeError:
        return False
    others = torch.autograd.grad(expected, [x, *weights], dy)
    if any(gradient is None for gradient in mine):
        return False
    pairs = [(y.detach(), expected.detach()), *zip(mine, others, strict=True)]
    return all(
        bool(torch.isfinite(a).all()) and float((a - b).abs().max()) <= 1e-12 * float(b.abs().max()) for a, b in pairs
    )
