"""One architecture from the outside: processes of its own for the unsharded model and for the ranks; its row.

A crash, a hang or an exception is a row like any other.
"""

from __future__ import annotations

import math
from multiprocessing import forkserver
from typing import Any

from tests.models.architectures.catalogue import architectures
from tests.models.architectures.compare import Failed, examine
from tests.models.architectures.reference import CannotBuild, Reference, reference_of
from tpkernels.testing.spawn import RanksFailed, WorkerPool, fork_server

__all__ = ["examine_architecture", "preload", "row_of", "verdict_of"]

SHOWN = 6
"""Of the tensors that are wrong, the worst."""
REFUSALS = {
    "nothing to shard": "nothing to cut",
    "does not run with the example_inputs": "refused",
    "sequence_parallel needs": "refused",
}
"""What a plan may raise, and says so."""


def preload() -> None:
    """Let ranks start with everything imported that each of them needs."""
    context = fork_server()
    wanted = ["torch._dynamo", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", __name__]
    context.set_forkserver_preload(["torch", "torch.distributed", "tpkernels", "tpkernels.sharding", *wanted])
    forkserver.ensure_running()


def examine_architecture(name: str, world: int, sequence_parallel: bool, timeout: float) -> dict[str, Any]:
    """The row of one architecture."""
    known = architectures()[name]
    row: dict[str, Any] = {"kind": known.kind, "head": known.head}
    try:
        with WorkerPool(1, forked=True, group_timeout=timeout / 2) as pool:
            reference = pool.run(reference_of, name, timeout=timeout)[0]
    except RanksFailed as failure:
        cause = failure.failures[0].exception
        if isinstance(cause, CannotBuild):
            status = "no model" if cause.stage == "class" else "cannot be built"
            return row | {"status": status, "stage": cause.stage, "reason": cause.reason}
        return row | {"status": "cannot be built", "stage": "unsharded", "reason": _summary(failure)}
    row |= row_of(reference) | _examined(reference, world, sequence_parallel, False, timeout)
    if row.get("traced") is False:
        row["with inputs"] = again = _examined(reference, world, sequence_parallel, True, timeout)
        order = ("raises", "wrong", "fp32", "right")
        if again["status"] in order and row["status"] in order:
            row["status"] = min(row["status"], again["status"], key=order.index)
    return row


def row_of(reference: Reference) -> dict[str, Any]:
    shapes = {
        k: list(v.shape) if hasattr(v, "shape") else v for k, v in reference.arguments.items() if k != "use_cache"
    }
    return {
        "kind": reference.kind,
        "inputs": reference.inputs,
        "shapes": {key: value for key, value in shapes.items() if isinstance(value, list)},
        "mode": "training" if reference.training else "evaluation",
        "reference": "fp64" if reference.has_fp64 else f"fp32: {reference.why_not}",
        "single": reference.single,
        "parameters": reference.parameters,
    }


def _examined(
    reference: Reference, world: int, sequence_parallel: bool, with_inputs: bool, timeout: float
) -> dict[str, Any]:
    try:
        with WorkerPool(world, forked=True, group_timeout=timeout / 2) as pool:
            found = pool.run(examine, reference, sequence_parallel, with_inputs, timeout=timeout)
    except RanksFailed as failure:
        cause = failure.failures[0].exception
        if not isinstance(cause, Failed):
            return {"status": "raises", "stage": "crash or hang", "reason": _summary(failure)}
        named = (status for words, status in REFUSALS.items() if cause.stage == "plan" and words in cause.reason)
        return cause.found | {"status": next(named, "raises"), "stage": cause.stage, "reason": cause.reason}
    return verdict_of(found)


def verdict_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks found, as a part of the row."""
    merged = dict(found[0])
    for what in ("wrong", "fp32"):
        every: dict[str, float] = {}
        for one in found:
            for name, size in one[what].items():
                every[name] = max(every.get(name, 0.0), size)
        ordered = sorted(every.items(), key=lambda item: -item[1])
        merged[what] = {name: size if math.isfinite(size) else 1e9 for name, size in ordered[:SHOWN]}
        merged[f"{what}_count"] = len(ordered)
    merged["worst"] = round(max(one["worst"] for one in found), 2)
    merged["status"] = "wrong" if merged["wrong"] else "fp32" if merged["fp32"] else "right"
    return merged


def _summary(failure: RanksFailed) -> str:
    return failure.failures[0].summary.strip().splitlines()[0][:300]
