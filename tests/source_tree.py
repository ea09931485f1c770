"""How tests read a source tree: its modules, what they import, where they use the environment."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "tpkernels"
PUBLIC_SURFACE = "the public surface"  # tpkernels/__init__.py, what `import tpkernels as tpk` gives
IMPORTERS = ("import_module", "__import__")
SOURCES = (".py", ".cpp", ".cc", ".cu", ".cuh", ".h")


def source_files(root: Path) -> Iterator[Path]:
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        candidates = sorted({root / name for name in listed.split("\0") if name})
    else:
        candidates = sorted(root.rglob("*"))
    yield from (path for path in candidates if path.suffix in SOURCES and path.is_file())


def modules(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path from root, dotted name inside the package, syntax tree) of each module of the package."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield path.relative_to(root), name, parsed(path.read_text(encoding="utf-8"))


parsed = functools.cache(ast.parse)  # once for all rules, which only read; the next two as well
nodes_of = functools.cache(lambda tree: tuple(ast.walk(tree)))


@functools.cache
def import_nodes(tree: ast.Module) -> tuple[Any, ...]:
    found = (node for node in nodes_of(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))
    return tuple(node for node in found if getattr(node, "names", None) or called_name(node) in IMPORTERS)


def imports(root: Path, path: Path, module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name inside the package) of every import of the package, wherever it stands."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in import_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{base_of(node, package)}.{alias.name}" for alias in node.names]
        else:
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        for name in names:
            if name == PACKAGE or name.startswith(PACKAGE + "."):
                yield node.lineno, existing_module(root, name)


def typing_only(tree: ast.Module) -> set[int]:
    """Lines that only a type checker reads."""
    guards: Iterator[Any] = (node for node in nodes_of(tree) if isinstance(node, ast.If))
    return {each.lineno for node in guards if getattr(node.test, "id", "") == "TYPE_CHECKING" for each in node.body}


def base_of(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE, *(package.split(".") if package else [])]
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def existing_module(root: Path, name: str) -> str:
    """The longest prefix of a dotted name that is a module; the rest is what is imported from it."""
    parts = name.split(".")[1:]
    while parts:
        file = (root / PACKAGE).joinpath(*parts)
        if file.with_suffix(".py").is_file() or file.is_dir():
            break
        parts.pop()
    return ".".join(parts)


def called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def top_name(module: str) -> str:
    return module.partition(".")[0] or PUBLIC_SURFACE


def uses_environment(node: ast.AST) -> bool:
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os"


def written_environments(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The `os.environ` nodes of a function that write, or copy the whole to restore it later."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("update", "setdefault", "clear", "pop"):
                yield node.func.value
        elif isinstance(node, ast.Call) and called_name(node) == "dict":
            yield from node.args
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.value
