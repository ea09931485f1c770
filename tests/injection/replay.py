"""What a crash leaves of files: the recorded steps of a save, up to any of them, done again in another folder.

Two kinds of crashes. When the processes are killed, the kernel goes on: every step up to then is there. When the power
fails, bytes and names that no fsync has covered may be gone: here all of them are, or the bytes alone (a file system
may write names before bytes). Not covered: bytes or names that come in another order, and sectors half written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Step", "after_power_loss", "read", "replay"]


@dataclass(frozen=True)
class Step:
    """One step: "create", "truncate", "write", "size", "fsync", "rename", "mkdir", "unlink" or "rmdir"."""

    at_ns: int
    what: str
    path: str
    to: str
    offset: int
    data: bytes = b""


def read(records: Iterable[Path]) -> list[Step]:
    """The steps of all processes, in order of time."""
    steps: list[Step] = []
    for record in records:
        own = []
        with record.open("rb") as file:
            while line := file.readline():
                at, what, path, to, offset, count = line.decode().rstrip("\n").split("\t")
                own.append(Step(int(at), what, path, to, int(offset), file.read(int(count))))
        steps += _with_unseen_names(own)
    return sorted(steps, key=lambda step: step.at_ns)


def _with_unseen_names(steps: Sequence[Step]) -> list[Step]:
    """safetensors writes to `.tmpXXXXXX` and renames that by a system call of its own, which no record has.

    It is put before the first step on the new name, the files in the order in which they were made.
    """
    found: list[Step] = []
    made: set[str] = set()
    unnamed: list[str] = []
    for step in steps:
        if step.what in ("create", "truncate") and Path(step.path).name.startswith(".tmp"):
            unnamed.append(step.path)
        elif step.what == "fsync" and step.path.endswith(".safetensors") and step.path not in made and unnamed:
            found.append(Step(step.at_ns, "rename", unnamed.pop(0), step.path, 0))
            _follow(found[-1], made)
        found.append(step)
        _follow(step, made)
    return found


def replay(steps: Sequence[Step], source: Path, target: Path) -> None:
    """Do to `target`, an empty folder, what the steps did to `source`."""
    for step in steps:
        path, to = (Path(str(target) + name.removeprefix(str(source))) for name in (step.path, step.to))
        if step.what in ("create", "truncate"):
            with path.open("ab") as file:
                if step.what == "truncate":
                    file.truncate(0)
        elif step.what == "write":
            with path.open("r+b") as file:
                file.seek(step.offset)
                file.write(step.data)
        elif step.what == "size":
            os.truncate(path, step.offset)
        elif step.what == "rename":
            path.rename(to)
        elif step.what == "mkdir":
            path.mkdir()
        elif step.what == "unlink":
            path.unlink()
        elif step.what == "rmdir":
            shutil.rmtree(path)
        else:
            assert step.what == "fsync", step


def after_power_loss(steps: Sequence[Step], *, keeps_names: bool) -> list[Step]:
    """The steps whose effects are on the disk for certain, in their order.

    An fsync of a file covers its bytes, one of a folder the names in it (and files that came there by a rename).
    keeps_names: all names are there, and only bytes that no fsync has covered are gone.
    """
    covered: set[int] = set()
    aliases: dict[str, str] = {}  # the path that a file has now, and the one it had when it was made
    bytes_of: dict[str, list[int]] = {}
    names_in: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        name = aliases.get(step.path, step.path)
        if step.what in ("write", "size", "truncate"):
            bytes_of.setdefault(name, []).append(number)
        if step.what in ("create", "truncate", "mkdir", "unlink", "rmdir", "rename"):
            for path in {step.path, step.to} - {""}:
                names_in.setdefault(str(Path(path).parent), []).append(number)
        if step.what == "rename":
            for path in [
                path for path in (*bytes_of, *aliases) if path == step.path or path.startswith(f"{step.path}/")
            ]:
                aliases[step.to + path.removeprefix(step.path)] = aliases.get(path, path)
        if step.what == "fsync":
            covered.update(bytes_of.get(name, []))
            covered.update(names_in.get(step.path, []))
            covered.update(names_in.get(name, []))
    kept: list[Step] = []
    made: set[str] = set()
    for number, step in enumerate(steps):
        is_name = step.what in ("create", "mkdir", "unlink", "rmdir", "rename")
        if step.what == "truncate" and number not in covered and keeps_names:
            step = Step(step.at_ns, "create", step.path, "", 0)
        elif number not in covered and not (is_name and keeps_names):
            continue
        if _is_possible(step, made, steps):
            kept.append(step)
            _follow(step, made)
    return kept


def _is_possible(step: Step, made: set[str], steps: Sequence[Step]) -> bool:
    """Whether what the step works on has its name: with it, all that is below is lost."""
    if step.what in ("create", "truncate", "mkdir"):
        parent = str(Path(step.path).parent)
        return parent in made or not any(one.what == "mkdir" and one.path == parent for one in steps)
    return step.what == "fsync" or step.path in made


def _follow(step: Step, made: set[str]) -> None:
    if step.what in ("create", "truncate", "mkdir"):
        made.add(step.path)
    elif step.what == "rename":
        for path in [path for path in made if path == step.path or path.startswith(f"{step.path}/")]:
            made.discard(path)
            made.add(step.to + path.removeprefix(step.path))
    elif step.what in ("unlink", "rmdir"):
        made.discard(step.path)
