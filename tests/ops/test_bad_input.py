"""Arguments that cannot be right: a ValueError with name, value and expectation, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.errors import GroupMismatch
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def sizes(group: Any, *few: int) -> list[int]:
    """As many sizes as ranks: the given ones, then zeros."""
    return [*few, *[0] * (dist.get_world_size(group) - len(few))]


def dtensor(group: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(t(4, 8), mesh, [Replicate()], run_check=False)


Call = Callable[[Any], Any]

# What is called, what the message must say, and whether one rank alone has something to refuse.
BAD: dict[str, tuple[Call, str, bool]] = {
    "x of one dimension": (
        lambda g: tpk.all_gather_matmul(t(8), t(5, 8), g),
        r"x must have at least 2 dimensions \[rows, K\], got shape \(8,\)",
        True,
    ),
    "x of integers": (
        lambda g: tpk.matmul_all_reduce(t(4, 8).int(), t(5, 8).int(), g),
        r"x must be one of float32, bfloat16, float16, float64, got torch.int32",
        True,
    ),
    "weight of three dimensions": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8, 1), g),
        r"weight must have 2 dimensions \[N, K\], got shape \(5, 8, 1\)",
        True,
    ),
    "weight of another K": (
        lambda g: tpk.matmul_reduce_scatter(t(4, 8), t(5, 7), g),
        r"weight must be \[N, 8\] to match x, got shape \(5, 7\)",
        True,
    ),
    "second weight of another K": (
        lambda g: tpk.all_gather_matmul(t(4, 8), [t(5, 8), t(5, 9)], g),
        r"weight(\[1\])? must be \[N, 8\] to match x, got shape \(5, 9\)",
        True,
    ),
    "weight of another dtype": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8, dtype=torch.float64), g),
        r"weight must have the dtype of x \(torch.float32\), got torch.float64",
        True,
    ),
    "no weights": (
        lambda g: tpk.all_gather_matmul(t(4, 8), [], g),
        r"weight must be a tensor or a non-empty sequence of tensors",
        True,
    ),
    "bias of another length": (
        lambda g: tpk.matmul_all_reduce(t(4, 8), t(5, 8), g, bias=t(4)),
        r"bias must have shape \(5,\), got \(4,\)",
        True,
    ),
    "bias that would broadcast": (
        lambda g: tpk.matmul_reduce_scatter(t(4, 8), t(5, 8), g, bias=t(1)),
        r"bias must have shape \(5,\), got \(1,\)",
        True,
    ),
    "bias of length 0": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, bias=t(0)),
        r"bias must have shape \(5,\), got \(0,\)",
        True,
    ),
    "bias of another dtype": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, bias=t(5, dtype=torch.bfloat16)),
        r"bias must have the dtype of x \(torch.float32\), got torch.bfloat16",
        True,
    ),
    "one bias for two weights": (
        lambda g: tpk.all_gather_matmul(t(4, 8), [t(5, 8), t(6, 8)], g, bias=[t(5)]),
        r"bias must have one entry per weight \(2\), got 1",
        True,
    ),
    "gather_dim too large": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, gather_dim=2),
        r"gather_dim \(2\) is out of range for a tensor of 2 dimensions",
        True,
    ),
    "scatter_dim too small": (
        lambda g: tpk.matmul_reduce_scatter(t(4, 8), t(5, 8), g, scatter_dim=-3),
        r"scatter_dim \(-3\) is out of range for a tensor of 2 dimensions",
        True,
    ),
    "unknown activation": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, activation="tanh"),
        r"activation must be None or one of .*'gelu'.*'silu'.*, got 'tanh'",
        True,
    ),
    "a gate without an up": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, activation="swiglu"),
        r"activation 'swiglu' takes two weights of one shape, \(gate, up\), got shapes \[\(5, 8\)\]",
        True,
    ),
    "gate and up of two sizes": (
        lambda g: tpk.all_gather_matmul(t(4, 8), [t(5, 8), t(6, 8)], g, activation="geglu"),
        r"activation 'geglu' takes two weights of one shape, \(gate, up\), got shapes \[\(5, 8\), \(6, 8\)\]",
        True,
    ),
    "gate and up of two sizes, nothing sent": (
        lambda g: tpk.copy_matmul(t(4, 8), [t(5, 8), t(6, 8)], g, activation="swiglu"),
        r"activation 'swiglu' takes two weights of one shape",
        False,
    ),
    "unknown implementation": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, implementation="fused"),
        r"implementation.*'fused'|'fused'.*implementation",
        True,
    ),
    "too many shard sizes": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, shard_sizes=[4] * 9),
        r"shard_sizes must have one entry per rank \(\d\), got \[4, 4, 4, 4, 4, 4, 4, 4, 4\]",
        True,
    ),
    "negative shard size": (
        lambda g: tpk.matmul_reduce_scatter(t(4, 8), t(5, 8), g, shard_sizes=sizes(g, -1, 5)),
        r"shard_sizes must not be negative, got \[-1, 5",
        True,
    ),
    "shard sizes of another rank's shard": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), g, shard_sizes=[7] * dist.get_world_size(g)),
        r"shard_sizes\[\d\] must be the size of this rank's shard \(4\), got shard_sizes=\[7, 7\]",
        True,
    ),
    "shard sizes that do not sum up": (
        lambda g: tpk.matmul_reduce_scatter(t(4, 8), t(5, 8), g, shard_sizes=sizes(g, 1, 2)),
        r"shard_sizes \[1, 2.*\] sum to 3, but the dimension to scatter has size 4",
        True,
    ),
    "x as a DTensor": (
        lambda g: tpk.all_gather_matmul(dtensor(g), t(5, 8), g),
        r"x(_shard)? is a DTensor; the ops take local tensors: pass x(_shard)?\.to_local\(\)",
        True,
    ),
    "weight as a DTensor": (
        lambda g: tpk.copy_matmul(t(4, 8), dtensor(g), g),
        r"weight0? is a DTensor; the ops take local tensors",
        False,
    ),
    "collective: x of no dimension": (lambda g: tpk.all_reduce(torch.tensor(1.0), g), r"at least 1 dimension", True),
    "collective: integers": (lambda g: tpk.all_gather(t(4, 8).int(), g), r"x must be one of .*, got torch.int32", True),
    "collective: dim": (lambda g: tpk.reduce_scatter(t(4, 8), g, dim=2), r"dim \(2\) is out of range", True),
    "collective: shard sizes": (
        lambda g: tpk.reduce_scatter(t(4, 8), g, shard_sizes=sizes(g, 1, 2)),
        r"shard_sizes \[1, 2.*\] sum to 3, but the dimension to scatter has size 4",
        True,
    ),
    "copy: weight of another K": (
        lambda g: tpk.copy_matmul(t(4, 8).requires_grad_(), t(5, 7), g),
        r"weight must be \[N, 8\] to match x, got shape \(5, 7\)",
        False,
    ),
    "shard: dim": (lambda g: tpk.shard(t(4, 8), g, dim=5), r"dim \(5\) is out of range", False),
    "group of another kind": (
        lambda g: tpk.all_gather_matmul(t(4, 8), t(5, 8), 3),
        r"group must be a ProcessGroup or a one-dimensional DeviceMesh, got int",
        False,
    ),
    "mesh of two axes": (
        lambda g: tpk.all_reduce(t(4), init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))),
        r"group is a DeviceMesh with axes \('a', 'b'\); pass one axis",
        False,
    ),
    "explain: negative size": (
        lambda g: tpk.explain("all_reduce", m=-1, n=1, k=1, dtype=torch.float32, group=g),
        r"m must not be negative, got -1",
        False,
    ),
    "explain: dtype": (
        lambda g: tpk.explain("all_reduce", m=1, n=1, k=1, dtype=torch.int8, group=g),
        r"dtype must be one of .*, got torch.int8",
        False,
    ),
    "explain: unknown op": (
        lambda g: tpk.explain("conv", m=1, n=1, k=1, dtype=torch.float32, group=g),
        r"unknown op 'conv'",
        False,
    ),
}


def refused(name: str, meet_first: bool) -> tuple[BaseException | None, bool]:
    """The error of a bad call that every rank makes, and whether the group works after it."""
    with new_group() as group:
        if meet_first:
            tpk.all_reduce(t(2), group)
        error = error_of(BAD[name][0], group)
        total = tpk.all_reduce(t(2), group)
        works = bool((total == dist.get_world_size(group)).all())
        y = tpk.all_gather_matmul(t(4, 8), t(5, 8), group, implementation="chunked")
        return error, works and bool((y == 8).all())


def error_of(call: Call, group: Any) -> BaseException | None:
    try:
        call(group)
    except (ValueError, RuntimeError, TypeError) as error:
        return error
    return None


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_on_every_rank_and_the_group_works_on(ranks: Pools, name: str) -> None:
    for meet_first in (True, False):
        for rank, (error, works) in enumerate(ranks(2).run(refused, name, meet_first)):
            assert type(error) is ValueError, f"rank {rank}: {error!r}"
            assert_matches(BAD[name][1], str(error))
            assert works


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), f"{pattern!r} is not in {text!r}"


def one_refuses(name: str, refusing: int, meet_first: bool) -> tuple[BaseException | None, float]:
    import time

    with new_group(timeout=12.0) as group:
        if meet_first:
            tpk.all_reduce(t(2), group)
        dist.barrier()
        start = time.monotonic()
        good = BAD[name][0] if dist.get_rank() == refusing else lambda g: tpk.matmul_all_reduce(t(4, 8), t(5, 8), g)
        error = error_of(good, group)
        seconds = time.monotonic() - start
        dist.barrier()
    return error, seconds


@pytest.mark.parametrize("meet_first", [True, False], ids=["met", "first call"])
@pytest.mark.parametrize("name", ["weight of another K", "x as a DTensor", "bias of another length", "collective: dim"])
def test_one_ranks_bad_arguments_stop_the_others_soon(ranks: Pools, name: str, meet_first: bool) -> None:
    for refusing in (0, 1):
        results = ranks(2).run(one_refuses, name, refusing, meet_first)
        for rank, (error, seconds) in enumerate(results):
            assert seconds < 5.0, (rank, seconds, error)
            if rank == refusing:
                assert type(error) is ValueError
                assert_matches(BAD[name][1], str(error))
            else:
                assert type(error) is GroupMismatch, f"{error!r}"
                assert f"rank {refusing} refused its arguments" in str(error)
                assert_matches(BAD[name][1], str(error))


BIASED: dict[str, Callable[[Any, torch.Tensor | None], Any]] = {
    "matmul_all_reduce": lambda g, b: tpk.matmul_all_reduce(t(4, 8), t(3, 8), g, bias=b),
    "matmul_reduce_scatter": lambda g, b: tpk.matmul_reduce_scatter(t(4, 8), t(3, 8), g, bias=b),
    "with a norm": lambda g, b: tpk.matmul_all_reduce(
        t(4, 8), t(3, 8), g, bias=b, residual=t(4, 3), norm_weight=t(3), eps=1e-6
    ),
    "grouped": lambda g, b: tpk.grouped_matmul_all_reduce(
        t(4, 8), t(1, 3, 8), tpk.Routing(torch.zeros(4, 1, dtype=torch.long), t(4, 1)), g,
        bias=None if b is None else b[None],
    ),
}  # fmt: skip


def biased_on_one_rank(known: bool) -> dict[str, BaseException | None]:
    """The sum has a bias on rank 0 alone: new to the ranks, and as a call that both of them know."""
    found = {}
    for name, call in BIASED.items():
        with new_group(timeout=12.0) as group:
            for bias in (None, t(3)) if known else ():
                call(group, bias)
            own = t(3) if dist.get_rank() == 0 else None
            found[name] = error_of(lambda g, call=call, own=own: call(g, own), group)
    return found


@pytest.mark.parametrize("known", [False, True])
def test_a_bias_that_only_one_rank_adds_is_another_call(ranks: Pools, known: bool) -> None:
    """It gave 33 on one rank and 32 on the other."""
    for found in ranks(2).run(biased_on_one_rank, known):
        for name, error in found.items():
            assert type(error) is GroupMismatch, f"{name}: {error!r}"
            assert "the ranks made different calls" in str(error) and "with a bias" in str(error)


def not_a_member() -> str | None:
    """A rank outside a group holds no ProcessGroup for it."""
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        tpk.all_reduce(t(2), group)
        return None
    return str(error_of(lambda g: tpk.all_reduce(t(2), g), group))


def test_a_rank_outside_the_group_is_told_so(ranks: Pools) -> None:
    message = ranks(3).run(not_a_member)[2]
    assert message is not None and "group must be a ProcessGroup" in message
