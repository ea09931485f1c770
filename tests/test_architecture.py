"""The house rules, read from the source: import order, file length, one reader of the environment.

Each rule is a function from a source tree to its violations; each is run on this tree, and on a tree with a violation.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.source_tree import (
    PACKAGE,
    PUBLIC_SURFACE,
    called_name,
    imports,
    modules,
    nodes_of,
    source_files,
    top_name,
    typing_only,
    uses_environment,
    written_environments,
)

pytestmark = pytest.mark.cpu

REPOSITORY = Path(__file__).parents[1]
MAX_LINES = 450

# Ground floor first; a module imports from its own floor and from those before it, at any level of nesting.
FLOORS = (
    ("errors", "packages", "flags", "launchers", "config"),
    ("partition",),
    ("launching", "gemm"),
    ("comm",),
    ("dispatch",),
    ("ops",),
    ("kernels",),
    ("backends",),
    ("nn", "optim"),
    ("state",),
    ("planning",),
    ("verification",),
    ("sharding",),
    (PUBLIC_SURFACE,),
    ("integrations",),
    ("testing",),
    ("measure",),
    ("cli", "demo", "doctor", "selftest", "__main__"),
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}

# The planner is a house of its own: each of its folders and modules imports only from those before it.
PLANNER = (
    "splits", "styles", "style_names", "plans", "modules", "runs", "replays", "entries", "hints", "alone", "proofs",
    "planner",
)  # fmt: skip

# What is right is pure arithmetic: these modules import nothing but partition and each other, so no op judges itself.
JUDGES = frozenset({"testing.numeric", "testing.expected", "testing.grouped_expected", "testing.payload"})

# Launchers tell torch.distributed in their children who they are; the functions that may, and they may not read.
ENVIRONMENT_WRITERS = {
    ("launching/rank_process.py", "write_rank_environment"),
    ("launching/rank_process.py", "children_inherit"),
}


# ---------------------------------------------------------------- rules


def import_violations(root: Path) -> list[str]:
    """What only a type checker imports counts, too, but for the names of the public surface."""
    found = []
    for path, module, tree in modules(root):
        floor = FLOOR_OF.get(top_name(module))
        if floor is None:
            found.append(f"{path}: {top_name(module)!r} is on no floor; add it to FLOORS where it belongs")
            continue
        named = typing_only(tree) if top_name(module) == PUBLIC_SURFACE else ()
        for line, target in imports(root, path, module, tree):
            name = top_name(target)
            if name not in FLOOR_OF:
                found.append(f"{path}:{line}: imports {name!r}, which is on no floor")
            elif FLOOR_OF[name] > floor and line not in named:
                found.append(f"{path}:{line}: {top_name(module)} must not import {name}, which is above it")
    return found


def planner_violations(root: Path) -> list[str]:
    """What only a type checker imports counts, too."""
    found = []
    for path, module, tree in modules(root):
        own = module.split(".")[1:2] if top_name(module) == "planning" else []
        if own and own[0] not in PLANNER:
            found.append(f"{path}: {own[0]!r} has no place in the planner; add it to PLANNER where it belongs")
            continue
        for line, target in imports(root, path, module, tree) if own else ():
            other = target.split(".")[1:2] if top_name(target) == "planning" else []
            if other and (other[0] not in PLANNER or PLANNER.index(other[0]) > PLANNER.index(own[0])):
                found.append(f"{path}:{line}: planning/{own[0]} must not import {other[0]}, which comes after it")
    return found


def circle_violations(root: Path) -> list[str]:
    """The first circle of modules that import each other; what only a type checker imports does not count."""
    graph: dict[str, set[str]] = {}
    for path, module, tree in modules(root):
        named = typing_only(tree)
        graph[module] = {name for line, name in imports(root, path, module, tree) if line not in named} - {module}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return [f"a circle of imports: {' <- '.join(error.args[1])}"]
    return []


def kernel_violations(root: Path) -> list[str]:
    """Kernels and judges import from this package only partition and their own kind."""
    found = []
    for path, module, tree in modules(root):
        kind = "kernels" if top_name(module) == "kernels" else "judges" if module in JUDGES else None
        for line, target in imports(root, path, module, tree) if kind else ():
            own_kind = top_name(target) == "kernels" if kind == "kernels" else target in JUDGES
            if top_name(target) != "partition" and not own_kind:
                found.append(f"{path}:{line}: {kind} import only partition and each other, not {target}")
    return found


def length_violations(root: Path) -> list[str]:
    found = []
    for path in source_files(root):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            found.append(f"{path.relative_to(root)}: {lines} lines, at most {MAX_LINES}; split it")
    return found


def folder_violations(root: Path) -> list[str]:
    """A backend has what it owns in its own folder, and knows none of the others."""
    found = []
    for path, module, tree in modules(root):
        own = module.split(".")[1:2] if top_name(module) == "backends" else []
        for line, target in imports(root, path, module, tree) if own else ():
            other = target.split(".")[1:2] if top_name(target) == "backends" else []
            if other and other != own and (root / PACKAGE / "backends" / other[0]).is_dir():
                found.append(f"{path}:{line}: backends/{own[0]} must not import {other[0]}, which is another backend")
    return found


def shortcut_violations(root: Path) -> list[str]:
    """Whether a call may leave something out is decided in ops: nothing above asks."""
    found = []
    for path, module, tree in modules(root):
        above = FLOOR_OF.get(top_name(module), 0) > FLOOR_OF["ops"]
        for line, target in imports(root, path, module, tree) if above else ():
            if target in ("ops.fast_path", "ops.plain_calls"):
                found.append(f"{path}:{line}: {top_name(module)} must not import {target}; call the public op")
    return found


def environment_violations(root: Path) -> list[str]:
    found = []
    for path, module, tree in modules(root):
        if module == "config":
            continue
        within = path.relative_to(Path(PACKAGE)).as_posix()
        exempt = {
            id(node)
            for function in nodes_of(tree)
            if isinstance(function, ast.FunctionDef) and (within, function.name) in ENVIRONMENT_WRITERS
            for node in written_environments(function)
        }
        for node in nodes_of(tree):
            if uses_environment(node) and id(node) not in exempt:
                found.append(f"{path}:{node.lineno}: only config.py reads the environment")  # type: ignore[attr-defined]
    native = (path for path in source_files(root) if path.suffix != ".py")
    for path in native:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(r"\b(secure_)?getenv\s*\(", text):
                found.append(f"{path.relative_to(root)}:{number}: only config.py reads the environment")
    return found


def backend_violations(root: Path) -> list[str]:
    """A group may have a backend per device: its name alone says nothing about a tensor."""
    found = []
    for path, module, tree in modules(root):
        for node in nodes_of(tree) if module != "comm.device_backends" else ():
            if isinstance(node, ast.Call) and called_name(node) in ("get_backend", "get_backend_config"):
                found.append(f"{path}:{node.lineno}: only comm/device_backends.py asks c10d for a group's backend")
    return found


# ---------------------------------------------------------------- this tree


RULES = (
    import_violations, planner_violations, circle_violations, kernel_violations, folder_violations,
    length_violations, environment_violations, shortcut_violations, backend_violations,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_house_rules_hold(rule: object) -> None:
    assert rule(REPOSITORY) == []  # type: ignore[operator]


def test_the_rules_see_this_tree() -> None:
    paths = {path.as_posix() for path, _, _ in modules(REPOSITORY)}
    assert {"tpkernels/__init__.py", "tpkernels/config.py", "tpkernels/launching/local_ranks.py"} <= paths
    assert Path(__file__) in set(source_files(REPOSITORY))
    tree = ast.parse((REPOSITORY / "tpkernels/testing/expected.py").read_text())
    path = Path("tpkernels/testing/expected.py")
    found = {target for _, target in imports(REPOSITORY, path, "testing.expected", tree)}
    assert found == {"partition", "testing.numeric"}


def test_the_floors_of_the_document_are_those_of_the_rule() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    diagram = text[text.index("## The floors") : text.index("## How a call travels")]
    shown = {
        name: int(number)
        for number, names in re.findall(r"^ ?(\d+)  (\w+(?:, \w+)*)  ", diagram, re.M)
        for name in names.split(", ")
    }
    ruled = {"__init__" if name == PUBLIC_SURFACE else name: floor for name, floor in FLOOR_OF.items()}
    del ruled["__main__"]  # it starts the command line, and owns nothing
    assert shown == ruled


def test_every_writer_of_the_environment_exists() -> None:
    for within, name in ENVIRONMENT_WRITERS:
        tree = ast.parse((REPOSITORY / PACKAGE / within).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree)), (within, name)


# ---------------------------------------------------------------- trees with a violation


HOUSE = {
    "__init__.py": "from tpkernels.ops import matmul\n",
    "config.py": "import os\nDEBUG = os.environ.get('DEBUG')\n",
    "partition.py": "",
    "comm/__init__.py": "from . import groups\n",
    "comm/groups.py": "from tpkernels import config\nfrom ..partition import x\n",
    "launching/rank_process.py": "import os\ndef write_rank_environment():\n    os.environ.update(RANK='0')\n",
    "ops/__init__.py": "def matmul():\n    from tpkernels.comm import groups\n",
    "kernels/gemm.py": "from tpkernels.partition import x\nfrom .tiles import y\n",
    "kernels/tiles.py": "",
    "backends/chunked.py": "import tpkernels.ops\n",
    "measure/bench.py": "import tpkernels as tpk\nfrom tpkernels.testing.numeric import check\n",
    "testing/__init__.py": "",
    "testing/numeric.py": "import math\n",
    "testing/spawn.py": "from tpkernels.comm import groups\n",
}


def house(tmp_path: Path, **changes: str) -> Path:
    """A small tree that obeys the rules, with files replaced or added (`__` stands for `/`, `.py` is added)."""
    files = {**HOUSE, **{name.replace("__", "/") + ".py": text for name, text in changes.items()}}
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_house_in_order_has_no_violations(tmp_path: Path) -> None:
    root = house(tmp_path)
    for rule in RULES:
        assert rule(root) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"comm__groups": "from tpkernels.ops import matmul\n"}, "comm must not import ops"),
        ({"comm__groups": "from tpkernels import ops\n"}, "comm must not import ops"),
        ({"comm__groups": "if TYPE_CHECKING:\n    from tpkernels.ops import matmul\n"}, "comm must not import ops"),
        ({"comm__groups": "import tpkernels.backends.chunked as c\n"}, "comm must not import backends"),
        ({"comm__groups": "from ..backends import chunked\n"}, "comm must not import backends"),
        ({"ops__matmul": "def run():\n    from tpkernels.backends import chunked\n"}, "ops must not import backends"),
        (
            {"ops__matmul": "import importlib\nimportlib.import_module('tpkernels.backends')\n"},
            "ops must not import back",
        ),
        ({"nn__linear": "import tpkernels as tpk\n"}, "nn must not import the public surface"),
        ({"nn__linear": "from tpkernels import matmul\n"}, "nn must not import the public surface"),
        ({"nn__linear": "from tpkernels.testing.numeric import check\n"}, "nn must not import testing"),
        ({"testing__spawn": "from tpkernels.measure.bench import run\n"}, "testing must not import measure"),
        ({"garage__car": ""}, "'garage' is on no floor"),
    ],
)
def test_an_import_of_a_higher_floor_is_found(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    violations = import_violations(house(tmp_path, **changes))
    assert len(violations) == 1 and said in violations[0], violations


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"planning__runs__trace": "from tpkernels.planning.proofs import a\n"},
            "planning/runs must not import proofs",
        ),
        ({"planning__splits": "from . import styles\n"}, "planning/splits must not import styles"),
        ({"planning__cellar": ""}, "'cellar' has no place in the planner"),
    ],
)
def test_an_import_of_a_later_room_of_the_planner_is_found(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    rooms = {"planning__proofs__a": "", "planning__styles": "from tpkernels.planning import splits\n"}
    violations = planner_violations(house(tmp_path, planning__splits="", **rooms))
    assert violations == []
    violations = planner_violations(house(tmp_path, **changes))
    assert len(violations) == 1 and said in violations[0], violations


@pytest.mark.parametrize(
    "line", ["from tpkernels.comm import b", "def f():\n    from . import b", "import tpkernels.comm.b"]
)
def test_a_circle_is_found(tmp_path: Path, line: str) -> None:
    root = house(tmp_path, comm__a=f"{line}\n", comm__b="from tpkernels.comm.c import x\n", comm__c="from . import a\n")
    (found,) = circle_violations(root)
    assert all(name in found for name in ("comm.a", "comm.b", "comm.c")), found
    house(tmp_path, comm__c="if TYPE_CHECKING:\n    from . import a\n")
    assert circle_violations(root) == []


@pytest.mark.parametrize("line", ["from tpkernels.errors import E", "from .. import comm", "import tpkernels.ops"])
def test_a_kernel_that_imports_anything_else_is_found(tmp_path: Path, line: str) -> None:
    root = house(tmp_path, errors="class E(Exception): ...\n", kernels__gemm=line + "\n")
    assert [v for v in kernel_violations(root) if v.startswith("tpkernels/kernels/gemm.py:1: kernels import only")]


def test_a_judge_that_imports_anything_else_is_found(tmp_path: Path) -> None:
    root = house(tmp_path, testing__numeric="from tpkernels.comm import groups\n")
    assert "judges import only partition" in kernel_violations(root)[0]


@pytest.mark.parametrize("line", ["from tpkernels.backends.two import x", "from ..two import x", "from .. import two"])
@pytest.mark.parametrize("who", ["backends__one__ops", "backends__blocks"])
def test_a_backend_that_imports_another_one_is_found(tmp_path: Path, who: str, line: str) -> None:
    line = line if who.count("__") == 2 else line.replace("..", ".")
    own = {"backends__one__gemm": "from tpkernels.backends import pools\nfrom .other import x\n"}
    root = house(tmp_path, **own, backends__one__other="", backends__two__gemm="", backends__pools="")
    assert folder_violations(root) == []
    root = house(tmp_path, **{who: line + "\n"})
    (violation,) = folder_violations(root)
    assert "must not import two" in violation


def test_a_module_that_asks_for_a_shortcut_is_found(tmp_path: Path) -> None:
    own = {"ops__fast_path": "", "ops__sum": "from tpkernels.ops import fast_path\n"}
    assert shortcut_violations(house(tmp_path, **own)) == []
    (violation,) = shortcut_violations(house(tmp_path, nn__row="from tpkernels.ops.fast_path import repeat\n"))
    assert "nn must not import ops.fast_path" in violation


@pytest.mark.parametrize("name", ["tpkernels/ops/long.py", "csrc/long.cu", "tests/test_long.py", "csrc/cpu/long.h"])
def test_a_file_that_is_too_long_is_found(tmp_path: Path, name: str) -> None:
    root = house(tmp_path)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n" * MAX_LINES)
    assert length_violations(root) == []
    path.write_text("\n" * (MAX_LINES + 1))
    assert length_violations(root) == [f"{name}: {MAX_LINES + 1} lines, at most {MAX_LINES}; split it"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"ops__matmul": "import os\nDEBUG = os.environ['DEBUG']\n"}, "ops/matmul.py:2"),
        ({"ops__matmul": "import os\ndef f():\n    return os.getenv('DEBUG')\n"}, "ops/matmul.py:3"),
        ({"ops__matmul": "from os import environ\n"}, "ops/matmul.py:1"),
        ({"ops__matmul": "import os\nos.environ['DEBUG'] = '1'\n"}, "ops/matmul.py:2"),
        ({"launching__rank_process": "import os\nos.environ.update(RANK='0')\n"}, "launching/rank_process.py:2"),
        (
            {"launching__rank_process": "import os\ndef write_rank_environment():\n    os.environ.get('RANK')\n"},
            "launching/rank_process.py:3",
        ),
    ],
)
def test_a_second_reader_of_the_environment_is_found(tmp_path: Path, changes: dict[str, str], line: str) -> None:
    violations = environment_violations(house(tmp_path, **changes))
    assert violations == [f"tpkernels/{line}: only config.py reads the environment"]


@pytest.mark.parametrize("question", ["dist.get_backend(group)", "get_backend_config(group)"])
def test_a_second_place_that_asks_for_a_backend_is_found(tmp_path: Path, question: str) -> None:
    root = house(tmp_path, comm__device_backends=f"{question}\n", nn__random=f"if True:\n    x = {question}\n")
    assert backend_violations(root) == [
        "tpkernels/nn/random.py:2: only comm/device_backends.py asks c10d for a group's backend"
    ]


def test_native_code_that_reads_the_environment_is_found(tmp_path: Path) -> None:
    root = house(tmp_path)
    (root / "csrc").mkdir()
    (root / "csrc" / "channel.cpp").write_text('#include <cstdlib>\nauto debug = std::getenv("DEBUG");\n')
    assert environment_violations(root) == ["csrc/channel.cpp:2: only config.py reads the environment"]
