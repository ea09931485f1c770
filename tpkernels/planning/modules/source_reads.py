"""Which modules' parameters a model's code reads past the module, told from the source where no run can show it.

It owns the search for ``something.weight`` and ``something.bias``, or other names, in the forward methods of a model's
classes, and in the methods that these name.  A layer whose weight is read (``F.linear(x, self.proj.weight)``) must stay
whole, because the code would otherwise read a part.

When in doubt, layers stay whole: all layers below a class whose source cannot be found, or that reads the weight of
something without a name there.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

__all__ = ["NAMES", "maybe_read", "methods_of", "reached"]

NAMES = frozenset({"weight", "bias", "in_proj_weight", "in_proj_bias"})


@dataclass(frozen=True)
class Reads:
    """What the methods of one class read: the weights of attributes of these names, and whether others as well."""

    names: frozenset[str]
    other: bool


def maybe_read(model: nn.Module, parameters: frozenset[str] = NAMES) -> dict[str, str]:
    """Modules with ``parameters`` that some module around them may read, and the name of the class that does."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        reads = _reads_of(type(module), parameters)  # type: ignore[arg-type]
        if not reads.names and not reads.other:
            continue
        for inner, owner in module.named_modules():
            if not inner or not any(True for _ in owner.parameters(recurse=False)):
                continue
            if reads.other or inner.rpartition(".")[2] in reads.names:
                found.setdefault(f"{path}.{inner}" if path else inner, type(module).__name__)
    return found


@lru_cache(maxsize=512)
def _reads_of(cls: type[nn.Module], parameters: frozenset[str]) -> Reads:
    methods: dict[str, list[ast.FunctionDef]] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in ("torch", "builtins", "abc", "typing"):
            own = methods_of(base)
            if own is None:
                return Reads(frozenset(), other=True)
            for method in own:
                methods.setdefault(method.name, []).append(method)
    names: set[str] = set()
    other = False
    for node in reached(methods, "forward"):
        if node.attr in parameters and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            if isinstance(node.value, ast.Attribute):
                names.add(node.value.attr)
            else:
                other = True
    return Reads(frozenset(names), other)


@lru_cache(maxsize=512)
def methods_of(cls: type) -> tuple[ast.FunctionDef, ...] | None:
    """The methods that the class itself defines; None if its source cannot be found."""
    try:
        definitions = _classes_in(inspect.getsourcefile(cls) or "").get(cls.__qualname__, [])
        if len(definitions) == 1:
            (tree,) = definitions
        else:  # in no file, or defined more than once in it
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):
        return None
    return tuple(node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef))


@lru_cache(maxsize=16)
def _classes_in(file: str) -> dict[str, list[ast.stmt]]:
    """The classes that a file defines, by qualified name; ``inspect.getsource`` parses the file for each of them."""
    found: dict[str, list[ast.stmt]] = {}
    todo: list[tuple[str, ast.AST]] = [("", ast.parse("".join(linecache.getlines(file))))]
    while todo:
        outer, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            inner = outer
            if isinstance(child, ast.ClassDef):
                found.setdefault(outer + child.name, []).append(child)
                inner = f"{outer}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{outer}{child.name}.<locals>."
            todo.append((inner, child))
    return found


def reached(methods: Mapping[str, list[ast.FunctionDef]], first: str) -> Iterator[ast.Attribute]:
    """All ``something.name`` in a method, and in those of the same class that it names."""
    todo, seen, asked = [first], {first}, set[int]()
    while todo:
        for method in methods.get(todo.pop(), []):
            for node in ast.walk(method):
                asked.update(map(id, _asked(node)))
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    if id(node) not in asked:
                        yield node
                    if node.attr not in seen:
                        seen.add(node.attr)
                        todo.append(node.attr)


def _asked(node: ast.AST) -> list[ast.expr]:
    """What ``node`` reads no numbers of: as ``weight.dtype``, ``isinstance(weight, Tensor)`` and ``bias is None``."""
    if isinstance(node, ast.Attribute) and node.attr in ("dtype", "device"):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return node.args[:1]
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return [node.left]
    return []
