"""The ops with experts, forward and backward, against the unfused equations in fp64, as :mod:`.ops` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpkernels.partition import array_split_sizes
from tpkernels.selftest.compare import Subject, Trial, implementations_of
from tpkernels.selftest.ops import Place
from tpkernels.testing import dealt
from tpkernels.testing.grouped import (
    COPY,
    GATHER,
    GROUPED,
    REDUCE,
    GroupedCase,
    call,
    expected_gradients,
    expected_value,
    operands,
    upstream,
)

__all__ = ["grouped_subjects"]


def grouped_subjects(place: Place) -> list[Subject]:
    """All of them."""

    def subject(op: str) -> Subject:
        named = REDUCE if op == COPY else op  # the op whose implementations it has
        return Subject(op, implementations_of(named), lambda: (_trial(place, *kind) for kind in _cases(place, op)))

    def dealt_subject(op: str) -> Subject:
        cases = lambda: (_dealt_trial(place, *kind) for kind in _dealt_cases(place, op))  # noqa: E731
        return Subject(op, implementations_of(op), cases)

    return [*(subject(op) for op in GROUPED), *(dealt_subject(op) for op in dealt.DEALT)]


def _cases(place: Place, op: str) -> Iterator[tuple[str, GroupedCase]]:
    """Even tokens, uneven ones, and all on one expert with a rank that has none; in a full run enough for chunks."""
    world = place.world_size
    activation = "gelu" if op in (GATHER, COPY) else None
    kinds = [
        ("even", GroupedCase(op, (12,) * world, (10, 16), bias=True)),
        ("uneven", GroupedCase(op, array_split_sizes(5 * world + 1, world), (7, 12), top_k=3, own=True, load="few")),
        ("empty", GroupedCase(op, (0, *(5,) * (world - 1)) if world > 1 else (1,), (9, 8), bias=True, load="one")),
    ]
    if not place.quick:
        kinds.append(("large", GroupedCase(op, (*(560,) * (world - 1), 521), (264, 520), num_experts=8)))
    for dtype in place.dtypes:
        for name, case in kinds:
            where = f"{str(dtype).removeprefix('torch.')}, {name} tokens"
            yield where, case.but(dtype=dtype, activation=activation)
            yield f"{where}, integers", case.but(dtype=dtype, integers=True)


def _trial(place: Place, where: str, case: GroupedCase) -> Trial:
    """Forward, and back from a gradient of the result: the result, and d of each input."""
    parts = operands(case)
    dys = [upstream(case, parts, rank) for rank in range(place.world_size)]
    bounds = expected_gradients(case, parts, dys, place.rank)
    if case.op == GATHER:
        bounds[1] = None  # the routing is only passed on
    names = ["dx", "drouting", *(f"d{i}" for i in range(len(bounds) - 2))]

    def run(implementation: str) -> dict[str, Tensor]:
        own = [one.requires_grad_() for one in parts.own(case, place.rank, place.device)]
        out = call(case.but(implementation=implementation), parts, own, place.group)[0]
        dy = dys[place.rank].to(place.device)
        grads: list[Tensor | None] = list(torch.autograd.grad(out, own, dy, allow_unused=True))
        named = zip(names, grads, strict=True)
        return {"y": out.detach(), **{name: grad for name, grad in named if grad is not None}}

    expected = {name: bound for name, bound in zip(names, bounds, strict=True) if bound is not None}
    return Trial(where, run, {"y": expected_value(case, parts, place.rank)} | expected, case.integers)


def _dealt_cases(place: Place, op: str) -> Iterator[tuple[str, dealt.DealtCase]]:
    """The same kinds of tokens; experts that do not divide, and fewer of them than ranks."""
    world = place.world_size
    activation = None if op == dealt.COMBINE else "gelu"
    base = dealt.DealtCase(op, (12,) * world, (10, 16), num_experts=2 * world, bias=True)
    uneven = base.but(sizes=array_split_sizes(5 * world + 1, world), num_experts=2 * world + 1, load="few")
    empty = base.but(sizes=(0, *(5,) * (world - 1)) if world > 1 else (1,), num_experts=max(2, world - 1), load="one")
    kinds = [("even", base), ("uneven", uneven), ("empty", empty)]
    if not place.quick:
        kinds.append(("large", base.but(sizes=(*(560,) * (world - 1), 521), shape=(264, 520), top_k=2)))
    for dtype in place.dtypes:
        for name, case in kinds:
            where = f"{str(dtype).removeprefix('torch.')}, {name} tokens"
            yield where, case.but(dtype=dtype, activation=activation)
            yield f"{where}, integers", case.but(dtype=dtype, integers=True)


def _dealt_trial(place: Place, where: str, case: dealt.DealtCase) -> Trial:
    parts = dealt.operands(case)
    names = ["dx", "drouting", *(f"d{i}" for i in range(len(dealt.names(case)) - 2))]
    bounds = dict(zip(names, dealt.expected_gradients(case, parts, place.rank), strict=True))
    if not case.combines:
        del bounds["drouting"]  # the routing is only passed on

    def run(implementation: str) -> dict[str, Tensor]:
        own = [one.requires_grad_() for one in parts.own(case, place.rank, place.device)]
        out = dealt.call(case.but(implementation=implementation), parts, own, place.group)[0]
        dy = dealt.upstream_of(case, parts, place.rank).to(place.device)
        grads = dict(zip(names, torch.autograd.grad(out, own, dy, allow_unused=True), strict=True))
        return {"y": out.detach(), **{name: grad for name, grad in grads.items() if name in bounds}}

    return Trial(where, run, {"y": dealt.expected_value(case, parts, place.rank)} | bounds, case.integers)
