"""State of a parallelized model in the names and shapes that it had before: whole state dicts and checkpoints.

It owns which tensor of a checkpoint is which of the model's, and the order of the steps: everything is checked and
read, the ranks compare what they found, and then the model changes, on all ranks or on none.

Every rank needs the same checkpoint or state dict; differences between ranks are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.nn.digests import MODULUS, digest_of, json_digest
from tpkernels.state.collective_errors import Ranks, add_up, check_same
from tpkernels.state.originals import Box, Original, check_real, originals_of, unique
from tpkernels.state.safetensors_files import SafetensorsFiles
from tpkernels.state.staging import (
    Buffers,
    Target,
    check_unseen,
    commit,
    computed_buffers,
    device_of,
    targets_of,
)

__all__ = ["Loaded", "full_state_dict", "load_full_state_dict", "load_pretrained"]


def full_state_dict(model: nn.Module, *, rank: int | None = None) -> dict[str, Tensor]:
    """What ``model.state_dict()`` gave before :func:`parallelize`: original names, order and shapes, current values.

    All ranks of the model call it.  The tensors are copies; tied names have one.  With ``rank`` only that rank of the
    job gets them, the others an empty dictionary: they hold one whole tensor at a time.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> tpk.full_state_dict(mlp)["0.weight"].shape
        torch.Size([32, 8])

    Raises:
        ValueError: the model is not parallelized, or on the meta device; on every rank.
    """

    def prepare() -> tuple[dict[str, Original], dict[str, Any]]:
        originals = originals_of(model)
        check_real(originals)
        return originals, {"same": json_digest([(name, one.shape) for name, one in originals.items()])}

    originals, said = Ranks.of(model).together("full_state_dict", prepare)
    check_same("full_state_dict", said, "models")
    assert originals is not None
    wholes: dict[str, Tensor] = {}
    for original in unique(originals):
        whole = original.whole()
        if rank is None or dist.get_rank() == rank:
            wholes[original.name] = whole
    return {name: wholes[original.name] for name, original in originals.items() if original.name in wholes}


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load a state dict of the model as it was before :func:`parallelize`; all ranks give the same one.

    One of several tied names is enough.  Dtypes are converted as ``load_state_dict`` does.  A model on the meta device
    gets its shards, and the buffers that no state dict has.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> tpk.load_full_state_dict(mlp, {name: tensor * 2 for name, tensor in tpk.full_state_dict(mlp).items()})

    Raises:
        ValueError: names that are missing or unexpected, other shapes, tensors that differ between ranks, a model that
            is not parallelized; on every rank, with the model as it was.
    """
    _load(model, "load_full_state_dict", lambda: _Given(state_dict), ())


@dataclass(frozen=True)
class Loaded:
    """What :func:`load_pretrained` read on this rank, in bytes of tensors."""

    bytes_read: int
    checkpoint_bytes: int


def load_pretrained(model: nn.Module, path: str | Path, *, ignore: Sequence[str] = ()) -> Loaded:
    """Load a Hugging Face checkpoint (safetensors, in one file or several); each rank reads its slices alone.

    Args:
        model: parallelized, with weights or on the meta device, where a rank then never holds more than its shards::

                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config)
                tpk.parallelize(model, mesh)
                tpk.load_pretrained(model, folder)

        path: the folder, or one file.
        ignore: patterns (``cls.*``) of names in the checkpoint that the model has no use for.

    Names are those of the model; the prefix of a transformers base model may be there or not, and what transformers
    itself ignores is ignored.  One of several tied names is enough.  Dtypes are converted to the model's.  Checkpoints
    whose tensors are laid out otherwise than the model's (transformers calls that a weight conversion) are refused by
    their names or shapes.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> tpk.save_pretrained(mlp, folder)
        >>> loaded = tpk.load_pretrained(mlp, folder)
        >>> loaded.bytes_read < loaded.checkpoint_bytes
        True

    Raises:
        ValueError: files that are damaged or cut off, another model's checkpoint (names that are missing or unexpected,
            other shapes), ranks that see different files; on every rank, with the model as it was.
    """
    files: SafetensorsFiles = _load(model, "load_pretrained", lambda: SafetensorsFiles(Path(path)), ignore)
    return Loaded(files.bytes_read, files.total_bytes)


class Source(Protocol):
    """A place that tensors come from: names with shapes and dtypes, digests of some, and parts of any."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    digests: dict[str, int]
    fingerprint: str

    def read(self, name: str, box: Box) -> Tensor: ...


class _Given:
    """A state dict as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            kind = type(tensor)
            if not issubclass(kind, Tensor) or issubclass(kind, DTensor) or tensor.is_meta:  # type: ignore[redundant-expr]
                raise ValueError(f"state_dict[{name!r}] must be a whole tensor with values, it is a {kind.__name__}")
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.digests: dict[str, int] = {}
        parts = [(name, str(t.dtype), digest_of(t, [0] * t.dim())) for name, t in sorted(self.tensors.items())]
        self.fingerprint = json_digest(parts)

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][box.slices]


@dataclass(frozen=True)
class _Plan:
    source: Any
    names: Mapping[str, Sequence[str]]
    """The source's names of each original."""
    targets: Sequence[Target]
    buffers: Buffers


def _load(model: nn.Module, what: str, open_source: Callable[[], Any], ignore: Sequence[str]) -> Any:
    ranks = Ranks.of(model)

    def prepare() -> tuple[_Plan, dict[str, Any]]:
        originals, source = originals_of(model), open_source()
        names = _match(model, originals, source, ignore)
        targets, device = targets_of(unique(originals), device_of(model)), device_of(model)
        check_unseen(model, targets)
        return _Plan(source, names, targets, computed_buffers(model, device)), {"same": source.fingerprint}

    plan, said = ranks.together(what, prepare)
    check_same(what, said, "checkpoints")
    assert plan is not None
    _, found = ranks.together(what, lambda: (None, _read(plan, ranks)))
    ranks.step(what, lambda: _check_read(plan, found))
    commit(model, plan.targets, plan.buffers)
    return plan.source


def _read(plan: _Plan, ranks: Ranks) -> dict[str, Any]:
    """Fill what is staged; digests of replicas, and this rank's share of those that the source has."""
    shares: dict[str, int] = {}
    replicas: dict[str, int] = {}
    for target in plan.targets:
        first, *others = plan.names[target.original.name]
        part = plan.source.read(first, target.box)
        for other in others:
            if not torch.equal(plan.source.read(other, target.box), part):
                raise ValueError(f"{first} and {other} are tied in the model, and differ in the checkpoint")
        target.staged.copy_(part)
        whole = target.box.sizes == target.original.shape
        if whole or first in plan.source.digests:
            digest = digest_of(part, target.box.offsets)
            if whole:
                replicas[first] = digest
            if ranks.counts(target.tensor):
                shares[first] = (shares.get(first, 0) + digest) % MODULUS
    return {"shares": shares, "replicas": replicas}


def _check_read(plan: _Plan, found: Sequence[Mapping[str, Any]]) -> None:
    known: Mapping[str, int] = plan.source.digests
    sums = add_up(found)
    damaged = {name for name, digest in sums.items() if name in known and known[name] != digest}
    for name in found[0]["replicas"]:
        digests = {facts["replicas"].get(name) for facts in found}
        if len(digests) > 1 or (name in known and digests != {known[name]}):
            damaged.add(name)
    if damaged:
        raise ValueError(
            f"{len(damaged)} tensors are not what was saved, or not the same on all ranks, {min(damaged)} for one: the "
            "files were changed or damaged"
        )


def _match(
    model: nn.Module, originals: Mapping[str, Original], source: Source, ignore: Sequence[str]
) -> dict[str, list[str]]:
    """The source's names of each original.

    Raises:
        ValueError: names that are missing, unexpected or ambiguous, other shapes or kinds of numbers.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    computed = {
        f"{path}.{name}" if path else name for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }  # fmt: skip
    names: dict[str, list[str]] = {}
    unexpected = []
    taken: dict[str, str] = {}
    for name in source.shapes:
        candidates = [name, prefix + name, name.removeprefix(prefix)]
        found = next((one for one in candidates if one in originals), None)
        if found is None:
            known = any(one in computed for one in candidates) or any(re.search(one, name) for one in patterns)
            if not known and not any(fnmatchcase(name, pattern) for pattern in ignore):
                unexpected.append(name)
        elif found in taken:
            raise ValueError(f"both {taken[found]} and {name} of the checkpoint are {found} of the model")
        else:
            taken[found] = name
            names.setdefault(originals[found].name, []).append(name)
    missing = [original.name for original in unique(originals) if original.name not in names]
    if missing or unexpected:
        raise ValueError(
            f"this is not a checkpoint of the {type(model).__name__}: {_few('missing', missing)}; "
            f"{_few('unexpected', unexpected)}"
        )
    for original in unique(originals):
        for name in names[original.name]:
            shape, dtype = source.shapes[name], source.dtypes[name]
            if shape != original.shape or dtype.is_floating_point != original.dtype.is_floating_point:
                raise ValueError(
                    f"this is not a checkpoint of the {type(model).__name__}: {name} is {dtype} {shape}, in the model "
                    f"{original.dtype} {original.shape}"
                )
    return names


def _few(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}" if names else f"nothing {what}"
