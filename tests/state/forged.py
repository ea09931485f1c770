"""Snapshots whose digests are right and whose manifest says what no save has written; and a pipe in place of a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tpkernels.nn.digests import json_digest
from tpkernels.state.snapshot_files import MANIFEST

__all__ = ["FORGED"]

Change = Callable[[dict[str, Any]], None]


def _forge(change: Change, folder: Path) -> None:
    path = folder / MANIFEST
    document = json.loads(path.read_text())
    change(document["snapshot"])
    document["digest"] = json_digest(document["snapshot"])
    path.write_text(json.dumps(document))


def _group(**options: Any) -> Change:
    return lambda body: body["optimizer"]["groups"][0].update(options)


def _tensor(**facts: Any) -> Change:
    return lambda body: next(iter(body["tensors"].values())).update(facts)


def _slot(**facts: Any) -> Change:
    return lambda body: next(one for one in body["tensors"].values() if "slot" in one).update(facts)


def _values(**values: Any) -> Change:
    return lambda body: next(iter(body["optimizer"]["values"].values())).update(values)


def _step_of(name: str) -> Change:
    return lambda body: body["optimizer"]["values"].update({name: {"step": 1.0}})


def _nest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[" * 100_000)


def _put_a_pipe(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.unlink()
    os.mkfifo(file)


_CHANGES: dict[str, tuple[Change, str]] = {
    "lr in words": (_group(lr="rm -rf"), "option 'lr' must be a number"),
    "lr as a list": (_group(lr=[1.0]), "option 'lr' must be a number"),
    "three betas": (_group(betas=[0.9, 0.9, 0.9]), "option 'betas' must be a list of 2"),
    "betas in words": (_group(betas=["a", "b"]), "option 'betas' must be a number"),
    "maximize in words": (_group(maximize="no"), "option 'maximize' must be bool"),
    "a stranger in a group": (_group(params=["nobody"]), "parameters of group 0 must be names"),
    "groups are a number": (lambda body: body["optimizer"].update(groups=3), "groups must be a list"),
    "no values": (lambda body: body["optimizer"].pop("values"), "optimizer must be kind, groups and values"),
    "values of a stranger": (_step_of("nobody"), "values must be values by name"),
    "a step of another kind": (_values(step={"tensor": "x", "dtype": "float32"}), "must be a tensor of one element"),
    "a step that is huge": (_values(step={"tensor": 10**400, "dtype": "float32"}), "must be a tensor of one element"),
    "a shape in words": (_tensor(shape="wide"), "shape of .* must be a list of sizes"),
    "a shape that is huge": (_tensor(shape=[10**30]), "shape of .* must be a list of sizes"),
    "no such dtype": (_tensor(dtype="nn"), "dtype of .* must be the name of a dtype"),
    "a digest in words": (_tensor(digest="0"), "digest of .* must be a digest"),
    "a slot of a stranger": (_slot(of="nobody"), "'of' of .* must be the name of a tensor"),
    "tensors are a list": (lambda body: body.update(tensors=[]), "tensors must be an object"),
}

FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    kind: (partial(_forge, change), text) for kind, (change, text) in _CHANGES.items()
} | {"nested": (_nest, "is not JSON, or was cut off"), "pipe": (_put_a_pipe, "is not a regular file")}
