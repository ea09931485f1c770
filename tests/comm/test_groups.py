"""Process groups as the ops see them: one state per group and life, names that find it, and `init`'s rules."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels as tpk
from tpkernels.comm import groups, startup
from tpkernels.comm.groups import group_name, process_group, resolve
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that no launcher started, without a process group before and after."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# init


@pytest.mark.cpu
def test_init_in_a_process_without_launcher_is_a_job_of_one_rank(alone: None) -> None:
    mesh = tpk.init()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert (mesh.mesh_dim_names, tuple(mesh.shape), mesh.device_type) == (("dp", "tp"), (1, 1), "cpu")
    x, w = payload((3, 8)), payload((5, 8), name="w")
    assert torch.equal(tpk.all_gather_matmul(x, w, mesh["tp"]), torch.nn.functional.linear(x, w))


@pytest.mark.cpu
def test_init_again_uses_the_process_group_that_exists(alone: None) -> None:
    first = tpk.init(timeout=17)
    world = dist.group.WORLD
    second = tpk.init(timeout=99)
    assert dist.group.WORLD is world
    assert resolve(world).timeout == 17.0, "the timeout of the group that exists stays"
    assert tuple(first.shape) == tuple(second.shape)


@pytest.mark.cpu
def test_a_group_that_goes_when_the_interpreter_has_ended_is_forgotten_without_a_word(alone: None) -> None:
    """Names of modules are gone then: "Exception ignored in: <function ...>"."""
    axis = tpk.init()["tp"]
    state = resolve(axis)
    for reference, known in ((groups._seen[id(axis)][0], groups._seen), (state.reference, groups._groups)):
        forget: Any = reference.__callback__
        nameless = FunctionType(forget.func.__code__, {}, argdefs=forget.func.__defaults__)
        count = len(known)
        nameless(*forget.args, reference)
        assert len(known) < count


class Taken(Exception):
    """Ends `init` where it has chosen its GPU."""


def take(what: object) -> None:
    raise Taken(what)


@pytest.mark.cpu
@pytest.mark.parametrize(("local_rank", "visible", "gpu"), [(3, 8, 3), (3, 4, 3), (3, 1, 0), (3, 2, 1), (0, 1, 0)])
def test_a_rank_takes_its_gpu_among_those_that_its_process_is_shown(
    alone: None, monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: int, gpu: int
) -> None:
    """All of the host's, or one for each (Slurm, Ray), or a few for each."""
    for name, value in {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    with pytest.raises(Taken) as taken:
        tpk.init(device="cuda")
    assert taken.value.args == (gpu,)


@pytest.mark.cpu
@pytest.mark.parametrize(("visible", "gpu"), [(1, 0), (4, 3)])
def test_so_does_a_rank_whose_group_somebody_else_has_made(
    alone: None, monkeypatch: pytest.MonkeyPatch, visible: int, gpu: int
) -> None:
    """By itself a mesh takes LOCAL_RANK, whatever the process is shown."""
    tpk.init()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    with pytest.raises(Taken) as taken:
        tpk.init(device="cuda")
    assert taken.value.args == (gpu,)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # somebody has chosen one: it stays
    with monkeypatch.context() as chosen:
        chosen.setattr(startup, "init_device_mesh", lambda *arguments, **options: "a mesh")
        assert tpk.init(device="cuda") == "a mesh"


@pytest.mark.cpu
@pytest.mark.parametrize(("mine", "torchs"), [(None, "2"), ("3", "3")])
def test_groups_on_gpus_are_made_so_that_their_failures_raise(
    alone: None, monkeypatch: pytest.MonkeyPatch, mine: str | None, torchs: str
) -> None:
    """torch reads this when it makes a group; here the making ends where the rank takes its GPU."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if mine is not None:
        monkeypatch.setenv(name, mine)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: take(os.environ[name]))
    with pytest.raises(Taken) as taken:
        tpk.init(device="cuda")
    assert taken.value.args == (torchs,) and os.environ.get(name) == mine


@pytest.mark.cpu
def test_a_process_that_is_shown_no_gpu_is_told_why_that_may_be(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"sees no GPU: .*CUDA_VISIBLE_DEVICES hides it.*tpkernels doctor"):
        tpk.init(device="cuda")
    assert not dist.is_initialized()


@pytest.mark.cpu
@pytest.mark.parametrize("timeout", [11, 11.0, timedelta(seconds=11)])
def test_the_timeout_of_init_is_that_of_its_groups(alone: None, timeout: Any) -> None:
    tpk.init(timeout=timeout)
    assert resolve(dist.group.WORLD).timeout == 11.0


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 2}, r"tp \(2\).* must be the number of ranks \(1\)"),
        ({"dp": 3}, r"dp \(3\).* must be the number of ranks \(1\)"),
        ({"tp": 0}, r"tp must be at least 1, got 0"),
        ({"dp": -1}, r"dp must be at least 1, got -1"),
        ({"device": "tpu"}, r"device must be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_init_refuses_what_cannot_be_and_leaves_no_group(alone: None, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tpk.init(**arguments)
    assert not dist.is_initialized()


def shapes(arguments: list[dict[str, int]]) -> list[Any]:
    """For each call of `init`: the mesh's shape and this rank's place, or the error."""
    results: list[Any] = []
    for settings in arguments:
        try:
            mesh = tpk.init(**settings)
        except ValueError as error:
            results.append(str(error))
        else:
            results.append((tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), mesh["tp"].size()))
    return results


@pytest.mark.gloo
def test_init_fills_in_the_axis_that_was_left_out(ranks: Pools) -> None:
    asked = [{}, {"tp": 2}, {"dp": 4}, {"tp": 1}, {"tp": 2, "dp": 2}, {"tp": 3}, {"tp": 4, "dp": 2}, {"dp": 3}]
    for rank, results in enumerate(ranks(4).run(shapes, asked)):
        *made, no_tp, too_many, no_dp = results
        assert made == [
            ((1, 4), (0, rank), 4),
            ((2, 2), (rank // 2, rank % 2), 2),
            ((4, 1), (rank, 0), 1),
            ((4, 1), (rank, 0), 1),
            ((2, 2), (rank // 2, rank % 2), 2),
        ]
        for refusal, given in ((no_tp, "tp (3)"), (too_many, "dp (2) x tp (4)"), (no_dp, "dp (3)")):
            assert given in refusal and "must be the number of ranks (4)" in refusal


def sums_along_each_axis() -> tuple[float, float]:
    mesh = tpk.init(tp=2)
    mine = torch.tensor([float(10 ** dist.get_rank())])
    return tpk.all_reduce(mine, mesh["tp"]).item(), tpk.all_reduce(mine, mesh["dp"]).item()


@pytest.mark.gloo
def test_the_axes_of_the_mesh_reduce_over_their_own_ranks(ranks: Pools) -> None:
    assert ranks(4).run(sums_along_each_axis) == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


# groups and meshes


@pytest.mark.cpu
def test_a_mesh_of_several_axes_is_refused_with_the_way_out(alone: None) -> None:
    mesh = tpk.init()
    x, w = payload((3, 8)), payload((5, 8), name="w")
    for refusing in (process_group, resolve, group_name, lambda g: tpk.matmul_all_reduce(x, w, g)):
        with pytest.raises(ValueError, match=r"axes \('dp', 'tp'\); pass one axis, for example mesh\[\"tp\"\]"):
            refusing(mesh)
    nameless = init_device_mesh("cpu", (1, 1))
    with pytest.raises(ValueError, match=r"axes 2; pass one axis"):
        process_group(nameless)
    assert process_group(mesh["tp"]) is mesh["tp"].get_group()


@pytest.mark.cpu
@pytest.mark.parametrize("thing", [None, 3, [0, 1], torch.device("cpu")])
def test_what_is_no_group_is_refused_by_its_type(thing: Any) -> None:
    with pytest.raises(ValueError, match=f"must be a ProcessGroup or a .*DeviceMesh, got {type(thing).__name__}"):
        process_group(thing)


@pytest.mark.cpu
def test_a_group_has_one_state_however_it_is_named(alone: None) -> None:
    mesh = tpk.init()
    pg = mesh["tp"].get_group()
    state = resolve(pg)
    assert resolve(pg) is state
    assert resolve(mesh["tp"]) is state
    assert resolve(group_name(pg)) is state
    assert resolve(pg.group_name) is state
    assert state.pg is pg
    assert (state.rank, state.size, str(state.backends)) == (0, 1, "cpu:gloo,cuda:gloo")
    other = dist.new_group([0], timeout=timedelta(seconds=7))
    assert resolve(other) is not state
    assert (resolve(other).timeout, resolve(dist.group.WORLD).timeout) == (7.0, 1800.0)
    assert resolve(pg) is state, "another group's state takes no place of ours"


def names_and_states() -> tuple[str, bool, tuple[int, int, float], bool]:
    group = dist.new_group(timeout=timedelta(seconds=9))
    name, state = group_name(group), resolve(group)
    facts = (state.rank, state.size, state.timeout)
    result = name, resolve(name) is state and process_group(name) is group, facts, group_name(group) == name
    dist.destroy_process_group(group)
    return result


@pytest.mark.gloo
def test_a_groups_name_ends_with_the_rank_and_finds_it(ranks: Pools) -> None:
    first, *others = ranks(3).run(names_and_states)
    stem = first[0].removesuffix("@0")
    for rank, (name, found, facts, stable) in enumerate((first, *others)):
        assert name == f"{stem}@{rank}"
        assert found and stable
        assert facts == (rank, 3, 9.0)


@pytest.mark.cpu
def test_an_unknown_name_is_an_error(alone: None) -> None:
    tpk.init()
    with pytest.raises((RuntimeError, ValueError), match="no_such_group"):
        resolve("no_such_group@0")


# life and death


@pytest.mark.cpu
def test_the_state_of_a_destroyed_group_is_gone_without_garbage_collection(alone: None) -> None:
    tpk.init()
    group = dist.new_group([0])
    state = resolve(group)
    name = state.name
    assert groups._groups[name] is state
    gc.disable()
    try:
        dist.destroy_process_group(group)
        del group
        assert name not in groups._groups
        with pytest.raises(RuntimeError, match=f"process group '{name}' was destroyed"):
            _ = state.pg
    finally:
        gc.enable()


@pytest.mark.cpu
def test_a_group_made_again_under_the_same_name_is_new(alone: None) -> None:
    tpk.init(timeout=5)
    old = resolve(dist.group.WORLD)
    old.calls, old.agreed["a call"] = 77, "a plan"
    dist.destroy_process_group()
    tpk.init(timeout=6)
    new = resolve(dist.group.WORLD)
    assert new.name == old.name, "otherwise this test shows nothing"
    assert new is not old
    assert (new.calls, dict(new.agreed), new.timeout, new.key, new.poison) == (1, {}, 6.0, None, None)
    assert groups._groups[new.name] is new


@pytest.mark.cpu
def test_a_late_farewell_of_an_old_group_leaves_its_namesake_alone(alone: None) -> None:
    """Whoever still holds the old group may let go of it after a new one has taken its name."""
    tpk.init()
    held = dist.group.WORLD
    old = resolve(held)
    dist.destroy_process_group()
    tpk.init()
    new = resolve(dist.group.WORLD)
    assert new is not old and new.name == old.name
    del held
    gc.collect()
    assert resolve(dist.group.WORLD) is new


def poisoned_then_new() -> tuple[str, str, bool]:
    """A failed group stays failed; one made afterwards of the same ranks works."""
    from tpkernels.comm import agreement
    from tpkernels.errors import GroupPoisoned, PeerLost

    failed = dist.new_group(timeout=timedelta(seconds=20))
    tpk.all_reduce(torch.ones(3), failed)
    dist.barrier()  # else the failure of the faster rank would end the slower one's call
    agreement.fail(resolve(failed), PeerLost("rank 1 was unplugged", ranks=(1,)))
    said = ""
    try:
        tpk.all_reduce(torch.ones(3), failed)
    except GroupPoisoned as error:
        said = str(error)
    new = dist.new_group(timeout=timedelta(seconds=20))
    works = tpk.all_reduce(torch.ones(3), new).tolist() == [dist.get_world_size()] * 3
    result = said, resolve(failed).name, works
    for group in (failed, new):
        dist.destroy_process_group(group)
    return result


@pytest.mark.gloo
def test_a_failed_group_says_what_failed_first_and_a_new_one_works(ranks: Pools) -> None:
    for rank, (said, name, works) in enumerate(ranks(2).run(poisoned_then_new)):
        assert said.startswith(f"rank {rank}: group {name!r} failed earlier and cannot be used any more")
        assert "make a new group" in said and "PeerLost: rank 1 was unplugged" in said
        assert works
