"""Snapshots of a training run: model and optimizer in original names and shapes, to resume on any number of ranks.

Each rank writes what it holds, and replicas are written once (:mod:`tpkernels.state.snapshot_tensors`).  Packed
parameters are written under the one name and shape that they had, because another number of ranks may pack them
otherwise.  For that, every rank gathers them, one after the other.

A load refuses, on all ranks and before model or optimizer change: a snapshot that is damaged, unfinished or of another
model, and an optimizer with other groups or of another kind.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tpkernels.nn.digests import MODULUS, digest_of, json_digest
from tpkernels.state.collective_errors import Ranks, add_up, check_same
from tpkernels.state.manifest import check_option
from tpkernels.state.optimizer_state import Slot, described, groups_of, new_slots, options_for, revived, slots_of
from tpkernels.state.originals import Original, check_real, originals_of, unique
from tpkernels.state.snapshot_files import as_written, read_manifest, write_manifest
from tpkernels.state.snapshot_tensors import SnapshotTensors, dtype_name, share_out, write_tensors
from tpkernels.state.staging import (
    Buffers,
    Target,
    as_real,
    check_unseen,
    commit,
    computed_buffers,
    device_of,
    targets_of,
)

__all__ = ["load_snapshot", "save_snapshot"]


def save_snapshot(model: nn.Module, optimizer: Optimizer | None, folder: str | Path, *, extra: Any = None) -> None:
    """Write model and optimizer to ``folder``, for :func:`load_snapshot` on any number of ranks; all ranks call it.

    Args:
        model: parallelized; parameters and buffers of its ``state_dict()`` are written, bit by bit.
        optimizer: over the model's parameters, or None.
        folder: new or empty, and the same for all ranks.
        extra: what else the run needs to go on (step, scheduler, seed): anything that JSON can say, from rank 0.

    The snapshot is complete when this returns.  An interrupted one is no snapshot, and :func:`load_snapshot` says so.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> optimizer = torch.optim.AdamW(mlp.parameters())
        >>> mlp(torch.ones(4, 8)).sum().backward(); optimizer.step()
        >>> tpk.save_snapshot(mlp, optimizer, folder / "step-1", extra={"step": 1})

    Raises:
        ValueError: a folder in use, a model that is not parallelized or on the meta device, state of the optimizer that
            is neither tensor nor plain value, a failure to write; on every rank.
    """
    everyone, ranks, path = Ranks.all(), Ranks.of(model), Path(folder)
    what = "save_snapshot"
    plan, said = everyone.together(what, lambda: _prepare_save(model, optimizer, path, extra))
    check_same(what, said, "models or optimizers")
    assert plan is not None
    written = {key: as_written(original) for key, (original, _) in plan.tensors.items()}
    held = {original.name: key for key, (original, _) in plan.tensors.items()}
    originals = [original for original, _ in plan.tensors.values()]
    digests = {held[name]: digest for name, digest in ranks.digests(what, originals).items()}
    mine = share_out(everyone, ranks, written)
    everyone.step(what, lambda: write_tensors(path, everyone.rank, mine))
    tensors = {
        key: {**entry, "shape": original.shape, "dtype": dtype_name(original.dtype), "digest": digests[key]}
        for key, (original, entry) in plan.tensors.items()
    }
    body = {"tensors": tensors, "optimizer": plan.optimizer, "extra": extra}
    everyone.step(what, lambda: _finish(path, body) if everyone.is_first else None)


def _finish(folder: Path, body: Mapping[str, Any]) -> None:
    """Make files a snapshot, if they hold all of it."""
    SnapshotTensors(folder).check(body["tensors"])
    write_manifest(folder, body)


@dataclass(frozen=True)
class _Save:
    tensors: Mapping[str, tuple[Original, Mapping[str, Any]]]
    optimizer: Mapping[str, Any] | None


def _prepare_save(
    model: nn.Module, optimizer: Optimizer | None, folder: Path, extra: Any
) -> tuple[_Save, dict[str, Any]]:
    originals = originals_of(model)
    check_real(originals)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is in use: give each snapshot a folder of its own, such as run/step-100")
    try:
        json.dumps(extra)
    except TypeError as error:
        raise ValueError(f"extra must be what JSON can say: {error}") from None
    tensors: dict[str, tuple[Original, Mapping[str, Any]]] = {
        f"model.{original.name}": (original, {}) for original in unique(originals)
    }
    about = None
    if optimizer is not None:
        slots, values = slots_of(optimizer, originals)
        tensors |= {slot.tensor.name: (slot.tensor, described(slot)) for slot in slots}
        about = {"kind": type(optimizer).__name__, "groups": groups_of(optimizer, originals), "values": values}
    names = [(key, original.shape, dtype_name(original.dtype)) for key, (original, _) in tensors.items()]
    return _Save(tensors, about), {"same": json_digest([names, about])}


def load_snapshot(model: nn.Module, optimizer: Optimizer | None, folder: str | Path) -> Any:
    """Load what :func:`save_snapshot` wrote, on any number of ranks, and return its ``extra``; all ranks call it.

    Args:
        model: parallelized, with its weights or on the meta device; each rank reads its part alone.
        optimizer: of the same kind and with the same groups as the one saved, fresh or used; its options (learning
            rate, betas, ...) become the saved ones, except those that say how it computes (``foreach``, ``fused``).
            None: the model alone.

    Parameters, buffers and slots get the bits that were saved; digests of all of them are checked before anything
    changes.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> optimizer = torch.optim.AdamW(mlp.parameters())
        >>> mlp(torch.ones(4, 8)).sum().backward(); optimizer.step()
        >>> tpk.save_snapshot(mlp, optimizer, folder / "step-1", extra={"step": 1})
        >>> tpk.load_snapshot(mlp, optimizer, folder / "step-1")
        {'step': 1}

    Raises:
        ValueError: no complete snapshot, one that was damaged, one of another model or optimizer, ranks that see
            different snapshots; on every rank, with model and optimizer as they were.
    """
    everyone, ranks, path = Ranks.all(), Ranks.of(model), Path(folder)
    what = "load_snapshot"
    plan, said = everyone.together(what, lambda: _prepare_load(model, optimizer, path))
    check_same(what, said, "snapshots")
    assert plan is not None
    everyone.step(what, lambda: plan.files.read(plan.targets))
    digests = [digest_of(target.staged, target.box.offsets) for _, target in plan.targets]
    shares: dict[str, int] = {}
    for (key, target), digest in zip(plan.targets, digests, strict=True):
        if ranks.counts(target.tensor):
            shares[key] = (shares.get(key, 0) + digest) % MODULUS
    found = add_up(ranks.exchange(f"{what}: digests", {"shares": shares}))
    everyone.step(what, lambda: _check_digests(path, plan, digests, found))
    everyone.step(what, lambda: _check_state(plan, optimizer))
    commit(model, [target for key, target in plan.targets if key.startswith("model.")], plan.buffers)
    if optimizer is not None:
        optimizer.load_state_dict(_optimizer_state(plan, optimizer))
    return plan.manifest["extra"]


@dataclass(frozen=True)
class _Load:
    manifest: Mapping[str, Any]
    files: SnapshotTensors
    originals: Mapping[str, Original]
    targets: Sequence[tuple[str, Target]]
    """With the keys that they were written under."""
    slots: Sequence[Slot]
    buffers: Buffers


def _prepare_load(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> tuple[_Load, dict[str, Any]]:
    originals, manifest = originals_of(model), read_manifest(folder)
    saved: dict[str, dict[str, Any]] = manifest["tensors"]
    _check_model(originals, saved)
    slots: list[Slot] = []
    if optimizer is None:
        saved = {key: entry for key, entry in saved.items() if "slot" not in entry}
    else:
        _check_optimizer(optimizer, originals, manifest["optimizer"])
        slots = new_slots(saved, originals)
    files = SnapshotTensors(folder)
    files.check(saved)
    device = device_of(model)
    targets = [(f"model.{target.original.name}", target) for target in targets_of(unique(originals), device)]
    check_unseen(model, [target for _, target in targets])
    buffers = computed_buffers(model, device)
    for slot in slots:
        where = device if slot.parameters[0].is_meta else slot.parameters[0].device
        targets += [(slot.tensor.name, target) for target in targets_of([slot.tensor], where)]
    return _Load(manifest, files, originals, targets, slots, buffers), {"same": json_digest(manifest)}


def _check_model(originals: Mapping[str, Original], saved: Mapping[str, Mapping[str, Any]]) -> None:
    held = {f"model.{original.name}": original for original in unique(originals)}
    stored = {key: entry for key, entry in saved.items() if "slot" not in entry}
    missing, unexpected = [key for key in held if key not in stored], [key for key in stored if key not in held]
    if missing or unexpected:
        raise ValueError(f"this snapshot is of another model: it lacks {missing[:3]}, and has {unexpected[:3]} besides")
    for key, original in held.items():
        shape, dtype = tuple(stored[key]["shape"]), stored[key]["dtype"]
        if shape != original.shape or dtype != dtype_name(original.dtype):
            raise ValueError(
                f"this snapshot is of another model: {original.name} is {dtype} {shape} there, "
                f"{dtype_name(original.dtype)} {original.shape} here"
            )


def _check_optimizer(optimizer: Optimizer, originals: Mapping[str, Original], saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        raise ValueError("the snapshot was saved without an optimizer: pass None for it")
    if saved["kind"] != type(optimizer).__name__:
        raise ValueError(f"the snapshot has the state of {saved['kind']}, the optimizer is {type(optimizer).__name__}")
    groups = [set(group["params"]) for group in groups_of(optimizer, originals)]
    theirs = [set(group["params"]) for group in saved["groups"]]
    if groups != theirs:
        sizes = [[len(group) for group in one] for one in (theirs, groups)]
        raise ValueError(
            f"the optimizer's groups have other parameters than the snapshot's: {sizes[0]} there, {sizes[1]} here; "
            "make the optimizer as it was made before"
        )


def _check_digests(folder: Path, plan: _Load, digests: Sequence[int], found: Mapping[str, int]) -> None:
    expected = {key: entry["digest"] for key, entry in plan.manifest["tensors"].items()}
    damaged = {key for key, digest in found.items() if digest != expected[key]}
    for (key, target), digest in zip(plan.targets, digests, strict=True):
        if target.box.sizes == target.original.shape and digest != expected[key]:
            damaged.add(key)  # a replica, read by each rank for itself
    if damaged:
        raise ValueError(
            f"{len(damaged)} tensors are not what was saved, {min(damaged)} for one: files in "
            f"{folder} were changed or damaged"
        )


def _check_state(plan: _Load, optimizer: Optimizer | None) -> None:
    """Have a copy of the optimizer load the state: what it refuses, it refuses before the model changes."""
    if optimizer is None:
        return
    state = _optimizer_state(plan, optimizer)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:  # others may hold what a copy would share
        try:
            copy.copy(optimizer).load_state_dict(state)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the optimizer does not take the state of the snapshot: {error!r}") from error


def _optimizer_state(plan: _Load, optimizer: Optimizer) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, over the parameters of this model."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): position for position, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Any]] = {}
    for name, values in plan.manifest["optimizer"]["values"].items():
        for part in plan.originals[name].parts:
            state[index[id(part.tensor)]] = {key: revived(value) for key, value in values.items()}
    staged = {id(target.tensor): target.staged for _, target in plan.targets}
    for slot in plan.slots:
        for parameter, part in zip(slot.parameters, slot.tensor.parts, strict=True):
            state.setdefault(index[id(parameter)], {})[slot.name] = as_real(part, staged[id(part.tensor)])
    groups, start = [], 0
    for group, saved in zip(optimizer.param_groups, plan.manifest["optimizer"]["groups"], strict=True):
        count = len(group["params"])
        for key in group.keys() & saved.keys() - {"params"}:
            check_option(f"option {key!r}", group[key], saved[key])
        groups.append({**options_for(group, saved), "params": list(range(start, start + count))})
        start += count
    return {"state": state, "param_groups": groups}
