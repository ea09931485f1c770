"""Nothing that comes from a file or from another rank is unpickled; where pickles are made, it is between a process and
its own children."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import PACKAGE, called_name, modules
from tests.test_architecture import REPOSITORY, house

pytestmark = pytest.mark.cpu

# Over private pipes of a parent and the ranks that it has started.
OF_CHILDREN = {
    "launching/rank_process.py", "launching/local_ranks.py", "launching/conversation.py", "testing/spawn.py",
}  # fmt: skip
MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
COLLECTIVES = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip


def pickle_violations(root: Path) -> list[str]:
    return [f"{path}:{line}: {what}" for path, line, what in _pickles(root) if _is_foreign(path, what)]


def _is_foreign(path: Path, what: str) -> bool:
    return what in COLLECTIVES or _within(path) not in OF_CHILDREN


def _within(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _pickles(root: Path) -> Iterator[tuple[Path, int, str]]:
    for path, _, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in MODULES for alias in node.names):
                yield path, node.lineno, "import pickle"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
                yield path, node.lineno, "import pickle"
            elif isinstance(node, ast.ImportFrom) and _is_dcp(node.module or ""):
                yield path, node.lineno, "torch.distributed.checkpoint exchanges pickled plans"
            elif isinstance(node, ast.Call) and called_name(node) in COLLECTIVES:
                yield path, node.lineno, called_name(node)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load" and not _is_weights_only(node):
                yield path, node.lineno, "torch.load without weights_only=True"


def _is_dcp(module: str) -> bool:
    """The state of modules and optimizers alone is read there, by ``state_dict``; the rest saves and loads."""
    return module.startswith("torch.distributed.checkpoint") and not module.endswith("checkpoint.state_dict")


def _is_weights_only(call: ast.Call) -> bool:
    return any(
        one.arg == "weights_only" and isinstance(one.value, ast.Constant) and one.value.value is True
        for one in call.keywords
    )


def test_nothing_foreign_is_unpickled() -> None:
    assert pickle_violations(REPOSITORY) == []


def test_the_exceptions_exist() -> None:
    assert {_within(path) for path, _, _ in _pickles(REPOSITORY)} == OF_CHILDREN


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed.checkpoint.state_dict_loader import load",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
    ],
)
def test_a_module_that_unpickles_is_found(tmp_path: Path, line: str) -> None:
    assert len(pickle_violations(house(tmp_path, comm__groups=line + "\n"))) == 1


def test_what_loads_weights_alone_is_not(tmp_path: Path) -> None:
    root = house(tmp_path, comm__groups="import torch\ntorch.load('x', weights_only=True)\n")
    assert pickle_violations(root) == []
