"""What is read from files and from other processes, with anything in the place of any part of it: only ValueError.

Owns `PARSERS`: for each, texts that are right and how one is read; and `examples`, which are changed copies of them. A
change replaces, removes or renames a part of the JSON, and renews the digest that would tell, or it cuts or alters the
bytes themselves.
"""

from __future__ import annotations

import copy
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save

import tpkernels as tpk
from tpkernels.backends.shared_memory import rendezvous
from tpkernels.comm import call_order, presence
from tpkernels.comm.job_identity import Seal
from tpkernels.comm.records import Record
from tpkernels.nn.digests import json_digest
from tpkernels.state.safetensors_files import DIGESTS, INDEX, SafetensorsFiles
from tpkernels.state.snapshot_files import FORMAT, MANIFEST, VERSION, read_manifest
from tpkernels.state.snapshot_tensors import SnapshotTensors

__all__ = ["PARSERS", "Parser", "check", "fuzz"]

DEEP = "[" * 100_000
ODD_TEXTS = (b"", b"\xff\xfe", b"\x80\x04\x95", DEEP.encode(), b"NaN", b'{"a": 1e999}', b"null")
_FAILED = {"kind": "PeerLost", "message": "rank 1 died", "ranks": [1]}
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([10**400, -1, 2**63, 1e308, math.nan, math.inf, "", [], {}, [[]], ["a"], {"a": {}}, [0] * 50]),
)  # fmt: skip


@dataclass(frozen=True)
class Parser:
    """base: something that is right, as JSON; write: its bytes; read: reads them, in an empty folder."""

    base: Callable[[], Any]
    write: Callable[[Any], bytes]
    read: Callable[[bytes, Path], object]


def _plan() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return json.loads(tpk.make_plan(model, 2, strategy="rules").to_json())


def _manifest() -> Any:
    tensor = {"shape": [2, 3], "dtype": "float32", "digest": 7}
    body = {
        "tensors": {"model.w": tensor, "optimizer.w.m": {**tensor, "slot": "m", "of": "w"}},
        "optimizer": {"kind": "SGD", "groups": [{"params": ["w"], "lr": 0.1, "betas": [0.9, 0.99]}],
                      "values": {"w": {"step": {"tensor": 3.0, "dtype": "float32"}}}},
        "extra": {"step": 3},
    }  # fmt: skip
    return {"format": FORMAT, "version": VERSION, "digest": json_digest(body), "snapshot": body}


def _renewed(document: Any, part: str) -> bytes:
    """With the digest of what it now says."""
    if isinstance(document, dict) and isinstance(document.get(part), dict):
        document = {**document, "digest": json_digest(document[part])}
    return json.dumps(document).encode()


@cache
def _tensors() -> bytes:
    return save({"a": torch.ones(2, 3), "b": torch.ones(5)}, metadata={"format": "pt", DIGESTS: json.dumps({"a": 5})})


def _header() -> Any:
    raw = _tensors()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = header["__metadata__"]
    return {**header, "__metadata__": {name: _unpacked(value) for name, value in metadata.items()}}


def _unpacked(value: str) -> Any:
    return json.loads(value) if value[:1] in "{[" else value


def _file(header: Any) -> bytes:
    """Metadata are texts, which may themselves be JSON."""
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in header["__metadata__"].items()}
        header = {**header, "__metadata__": texts}
    text = json.dumps(header).encode()
    raw = _tensors()
    return len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]


def _in_folder(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def work(content: bytes, folder: Path) -> object:
        (folder / name).write_bytes(content)
        return read(folder)

    return work


def _read_index(folder: Path) -> object:
    (folder / "model-00001-of-00001.safetensors").write_bytes(_tensors())
    return SafetensorsFiles(folder)


def _stored(read: Callable[[Any], object]) -> Callable[[bytes, Path], object]:
    """How ranks read a record from the store: what is none is reported and left out."""

    def work(content: bytes, _: Path) -> object:
        store: Any = SimpleNamespace(report=lambda key, why: None)
        found = presence.understood(store, {0: "key"}, {0: Seal("").open("key", content)}, read)
        if not found:
            raise ValueError("no record")
        return found

    return work


def _dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


PARSERS: dict[str, Parser] = {
    "plan": Parser(
        _plan, lambda one: _renewed(one, "plan"), lambda text, _: str(tpk.ShardingPlan.from_json(text.decode()))
    ),
    "manifest": Parser(_manifest, lambda one: _renewed(one, "snapshot"), _in_folder(MANIFEST, read_manifest)),
    "index": Parser(
        lambda: {"metadata": {}, "weight_map": dict.fromkeys("ab", "model-00001-of-00001.safetensors")},
        _dumped,
        _in_folder(INDEX, _read_index),
    ),
    "safetensors": Parser(_header, _file, _in_folder("model.safetensors", SafetensorsFiles)),
    "snapshot file": Parser(_header, _file, _in_folder("shard-00001.safetensors", SnapshotTensors)),
    "message": Parser(
        lambda: {"rank": 1, "token": "t", "error": None},
        _dumped,
        lambda text, _: rendezvous._parse(text),
    ),
    "who has come": Parser(lambda: json.loads(presence._note(1, _FAILED)), _dumped, _stored(presence._note_of)),
    "record of a call": Parser(lambda: json.loads(Record("op", {"a": 1}).to_json()), _dumped, _stored(Record.of)),
    "order of calls": Parser(
        lambda: {"place": 3, "call": 7, "digest": 5, "steps": [[3, 5, 7, 0]], "words": ["op"]},
        _dumped,
        _stored(lambda said: (call_order._note_of(said), int(said["call"]))),
    ),
}


@st.composite
def changed(draw: st.DrawFn, name: str) -> bytes:
    parser = PARSERS[name]
    document = copy.deepcopy(_base(name))
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(ODD_TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        document = _change(draw, document)
    content = parser.write(document)
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(content)))
        return content[:at] + draw(
            st.sampled_from([b"", content[at + 1 :], b"\x00" + content[at + 1 :], DEEP.encode()])
        )
    return content


@cache
def _base(name: str) -> Any:
    return PARSERS[name].base()


def _change(draw: st.DrawFn, document: Any) -> Any:
    """The document with one part replaced, removed or renamed."""
    if not isinstance(document, dict | list) or not document or draw(st.integers(0, 5)) == 0:
        return copy.deepcopy(draw(ODD))  # later changes must not reach the strategy's own
    if isinstance(document, list):
        place: Any = draw(st.integers(0, len(document) - 1))
    else:
        place = draw(st.sampled_from(sorted(document)))
    if draw(st.integers(0, 7)) == 0:
        value = document.pop(place)
        if isinstance(document, dict) and draw(st.booleans()):
            document[draw(st.text(max_size=5))] = value
    else:
        document[place] = _change(draw, document[place])
    return document


def check(name: str, content: bytes) -> None:
    """Read it; whatever is raised besides ValueError comes out."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            PARSERS[name].read(content, Path(folder))
        except ValueError:
            return


def fuzz(name: str, seconds: float) -> int:
    """Try changes for so long; how many."""
    until, tried = time.monotonic() + seconds, 0
    while time.monotonic() < until:

        @seed(random.getrandbits(64))
        @settings(
            max_examples=500,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(changed(name))
        def run(content: bytes) -> None:
            nonlocal tried
            tried += 1
            check(name, content)

        run()
    return tried
