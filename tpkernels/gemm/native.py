"""The compiled CPU core: loads `tpkernels._native` once, and knows why it is not there.

Owns the import and the wording of its failure; who needs the core asks :func:`native`, and shows :func:`why_not` when
the answer is None. Assumes that the build (`setup.py`) left its record beside the module. Refuses a core of another
revision than this Python code: in an editable checkout the two can drift apart.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

if TYPE_CHECKING:
    import torch

__all__ = ["ABI", "BuildRecord", "build_record", "how_to_rebuild", "native", "native_dtype", "outdated", "why_not"]

# Equal to kAbi in csrc/bindings.cpp; both change whenever Python and native code must change together.
ABI = 6
PACKAGE = Path(__file__).resolve().parents[1]
RECORD = PACKAGE / "_native_build.json"
SOURCES = (".cpp", ".h", ".inc")


@dataclass(frozen=True)
class BuildRecord:
    """What the build wrote down: the compiler and its flags, or the reason why there is no module and what to do.

    found, architectures, dropped: of the CUDA kernels, where nvcc was, what it compiled for, and what it did not know.
    """

    built: bool
    module: str = ""
    compiler: str = ""
    flags: tuple[str, ...] = ()
    reason: str = ""
    advice: str = ""
    errors: tuple[str, ...] = ()
    found: str = ""
    architectures: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def native() -> ModuleType | None:
    """The extension module, or None where there is none that loads."""
    return _load()[0]


def why_not() -> str:
    """Why :func:`native` is None, in one line; empty if it is not."""
    return _load()[1]


@functools.lru_cache(maxsize=16)
@functools.lru_cache(maxsize=16)
def native_dtype(dtype: torch.dtype) -> Any:
    """The compiled core's name of a dtype, which takes as long as a small call to look up."""
    module: Any = native()
    return module.Dtype.__members__[str(dtype).removeprefix("torch.")]


def build_record(file: Path | None = None) -> BuildRecord | None:
    """The record of the build, or None if there is none: a source tree that was never built."""
    file = file or RECORD
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = ("flags", "errors", "architectures", "dropped")
        lists: dict[str, Any] = {name: tuple(fields.pop(name, ())) for name in names}
        return BuildRecord(**lists, **fields)
    except FileNotFoundError:
        return None
    except (OSError, TypeError, AttributeError, ValueError) as error:
        return BuildRecord(built=False, reason=f"{file} is not a record of a build ({error})")


def how_to_rebuild() -> str:
    """The command that builds the core of this very installation anew."""
    pip = f"{shlex.quote(sys.executable)} -m pip install --no-deps"
    if PACKAGE.parent.joinpath("setup.py").is_file():
        return f"{pip} -e {shlex.quote(str(PACKAGE.parent))}"
    try:
        origin = importlib.metadata.distribution("tpkernels").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    source = json.loads(origin) if origin else {}
    url = urlparse(source.get("url", ""))
    if url.scheme == "file" and "dir_info" in source:
        return f"{pip} {shlex.quote(unquote(url.path))}"
    # From an index or an archive: pip would answer with the wheel that it built, and kept, without a core.
    return f"{pip} --force-reinstall --no-cache-dir --no-binary tpkernels tpkernels"


def outdated(module: ModuleType, csrc: Path = PACKAGE.parent / "csrc") -> bool:
    """Whether the sources beside an editable installation are newer than the module that was built from them."""
    if module.__file__ is None or not csrc.joinpath("bindings.cpp").is_file():
        return False
    built = Path(module.__file__).stat().st_mtime
    return any(path.stat().st_mtime > built for path in csrc.rglob("*") if path.suffix in SOURCES)


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    name = f"{__package__.partition('.')[0]}._native"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        return None, _why_missing() if missing else f"the compiled core does not load: {error}"
    found = getattr(module, "ABI", None)
    if found != ABI:
        return None, f"the compiled core is of another revision ({found}) than this Python code ({ABI}): rebuild it"
    return module, ""


def _why_missing() -> str:
    record = build_record()
    if record is None:
        return "the compiled core was never built"
    if record.built:
        return f"the compiled core is not there for this Python: {record.module} was built"
    return f"the compiled core was not built: {record.reason}"
