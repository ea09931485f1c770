"""The compiler's view of the ops: whole graphs, symbolic sizes, export, opcheck, and fakes that tell the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

import tpkernels as tpk
import tpkernels.nn  # its ops are registered then
from tests.ops.grouped_arguments import grouped_blocks_compiled, grouped_op_arguments
from tests.ops.support import new_group, own_part
from tpkernels.comm.groups import group_name
from tpkernels.testing.cases import COPY, FUSED, GATHER, REDUCE, SCATTER, Case, call, operands
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import payload
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


def cases(world: int) -> list[Case]:
    """Every op at options that change its graph."""
    sizes = tuple(range(1, world + 1))
    whole = sum(sizes)
    return [
        Case(GATHER, (12, 8), bias=True, activation="gelu"),
        Case(GATHER, (12, 8), ns=(5, 3), bias=(True, False), return_gathered=True),
        Case(GATHER, (2, whole, 8), dim=1, sizes=sizes, save_gathered=True, activation="silu"),
        Case(GATHER, (3, 12), dim=-1, return_gathered=True, implementation="unfused"),
        Case(GATHER, (12, 8), ns=(5, 5), bias=(False, True), return_gathered=True, activation="swiglu"),
        Case(SCATTER, (13, 8), bias=True),
        Case(SCATTER, (2, whole, 8), dim=1, sizes=sizes, implementation="unfused"),
        Case(SCATTER, (3, 8), ns=(whole,), dim=-1, sizes=sizes, bias=True),
        Case(REDUCE, (2, 5, 8), bias=True),
        Case(COPY, (2, 5, 8), ns=(5, 3), bias=True, activation="relu"),
    ]


def leaves_of(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    x, ws, bs = own_part(operands(case, dist.get_world_size()), dist.get_rank())
    for leaf in (x, *ws, *bs):
        if leaf is not None:
            leaf.requires_grad_()
    return x, ws, bs


def values_and_gradients(f: Callable[..., Any], case: Case, group: Any) -> list[Tensor]:
    x, ws, bs = leaves_of(case)
    outs, gathered = f(case, (x, ws, bs), group)
    outs = outs if gathered is None else [*outs, gathered]
    torch.stack([out.square().sum() for out in outs]).sum().backward()
    return [*outs, *(leaf.grad for leaf in (x, *ws, *bs) if leaf is not None and leaf.grad is not None)]


def compiled_equals_eager(backend: str, dynamic: bool | None, only: str | None, every: int = 1) -> int:
    world, checked = dist.get_world_size(), 0
    with new_group(2) as group:
        for case in cases(world)[::every]:
            if only is not None and case.op != only:
                continue
            torch._dynamo.reset()
            eager = values_and_gradients(call, case, group)
            f = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
            for now, before in zip(values_and_gradients(f, case, group), eager, strict=True):
                assert now.stride() == before.stride(), case
                assert_bitwise_equal(now.detach(), before.detach(), f"{backend}, dynamic={dynamic}, {case}")
            checked += 1
    return checked


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_whole_graphs_give_the_bits_of_eager(ranks: Pools, world: int, dynamic: bool, full: bool) -> None:
    every = 1 if full else 2
    assert min(ranks(world).run(compiled_equals_eager, "aot_eager", dynamic, None, every, timeout=240)) == 10 // every


@pytest.mark.slow("3 s of compiling")
def test_whole_graphs_of_experts_give_the_bits_of_eager(ranks: Pools, full: bool) -> None:
    assert ranks(2).run(grouped_blocks_compiled, "aot_eager", full, timeout=240) == [36 if full else 18] * 2


@pytest.mark.full("seconds of compiling")
def test_inductor_gives_the_bits_of_eager(ranks: Pools) -> None:
    assert min(ranks(2).run(compiled_equals_eager, "inductor", None, SCATTER, timeout=300)) == 3


def one_graph_for_many_sizes() -> int:
    """A graph with a symbolic number of rows is compiled once per remainder at most, and right for every size."""
    rank, world = dist.get_rank(), dist.get_world_size()
    compilations = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    with new_group() as group:
        up, down = payload((5, 8), rank=rank, name="up"), payload((8, 5), rank=rank, name="down")

        def block(x: Tensor) -> Tensor:
            return tpk.matmul_reduce_scatter(tpk.all_gather_matmul(x, up, group), down, group)

        f = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
        for rows in (3, 4, 5, 8, 13):
            x = payload((rows, 8), rank=rank, name="x")
            assert_bitwise_equal(f(x), block(x), f"{rows} rows on each of {world} ranks")
    return compilations


def test_symbolic_sizes_need_one_graph(ranks: Pools) -> None:
    assert ranks(2).run(one_graph_for_many_sizes, timeout=120) == [1, 1]


def first_calls(full: bool) -> list[str]:
    """Of every op, as the first that anybody does with its group: what is wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = payload((2 * world, 6), rank=rank, name="x"), payload((5, 6), rank=rank, name="w")
    labels = torch.arange(2 * world) % (6 * world)

    def without_gradients(group: Any) -> Tensor:
        with torch.no_grad():
            return tpk.copy_matmul(x.unflatten(0, (2, -1)), w, group)

    calls: dict[str, Callable[[Any], Tensor]] = {
        GATHER: lambda group: tpk.all_gather_matmul(x, w, group),
        SCATTER: lambda group: tpk.matmul_reduce_scatter(x, w, group),
        REDUCE: lambda group: tpk.matmul_all_reduce(x, w, group),
        COPY: lambda group: tpk.copy_matmul(x, w, group),
        "copy_matmul without gradients": without_gradients,
        "all_gather": lambda group: tpk.all_gather(x, group),
        "reduce_scatter": lambda group: tpk.reduce_scatter(x, group),
        "all_reduce": lambda group: tpk.all_reduce(x, group),
        "shard": lambda group: tpk.shard(x, group),
        "cross_entropy": lambda group: tpk.nn.vocab_parallel_cross_entropy(x, labels, group),
    }
    wrong: list[str] = []
    for number, (name, function) in enumerate(calls.items()):
        for as_mesh in (False, True) if full else (number % 2 == 0,):
            torch._dynamo.reset()
            with new_group() as known, new_group() as unknown:
                expected = function(known)
                group = DeviceMesh.from_group(unknown, "cpu") if as_mesh else unknown
                compiled = torch.compile(lambda of, function=function: function(of), fullgraph=True, backend="eager")
                try:
                    assert_bitwise_equal(compiled(group), expected, name)
                except Exception as error:  # noqa: BLE001 - the whole list is what tells
                    wrong.append(f"{name}, {as_mesh=}: {str(error)[:200]}")
    return wrong


@pytest.mark.slow("5 s of compiling")
def test_a_group_may_be_met_in_compiled_code_first(ranks: Pools, full: bool) -> None:
    assert ranks(2).run(first_calls, full, timeout=120) == [[], []]


def autocast_compiled(every: int) -> None:
    world = dist.get_world_size()
    with new_group() as group:
        for case in cases(world)[::every]:
            torch._dynamo.reset()
            for dtype in (torch.float32, torch.float64):

                def f(case: Case, own: Any, group: Any) -> Any:
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        return call(case, own, group)

                own = own_part(operands(case.but(dtype=dtype), world), dist.get_rank())
                eager, _ = f(case, own, group)
                compiled, _ = torch.compile(f, fullgraph=True, backend="aot_eager")(case, own, group)
                for now, before in zip(compiled, eager, strict=True):
                    assert now.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
                    assert_bitwise_equal(now, before, f"{dtype} under autocast, {case}")


@pytest.mark.slow("3 s of compiling")
def test_compiled_and_eager_agree_under_autocast(ranks: Pools, full: bool) -> None:
    ranks(2).run(autocast_compiled, 1 if full else 4, timeout=240)


class Block(torch.nn.Module):
    """A column and a row linear, as a user exports them."""

    def __init__(self, group: Any, rank: int) -> None:
        super().__init__()
        self.group = group
        self.up = torch.nn.Parameter(payload((5, 8), rank=rank, name="up"))
        self.down = torch.nn.Parameter(payload((8, 5), rank=rank, name="down"))

    def forward(self, x: Tensor) -> Tensor:
        hidden = tpk.all_gather_matmul(x, self.up, self.group, activation="gelu")
        return tpk.matmul_reduce_scatter(hidden, self.down, self.group)


def exported() -> str:
    rank = dist.get_rank()
    with new_group() as group:
        block = Block(group, rank)
        x = payload((4, 8), rank=rank, name="x")
        program = torch.export.export(block, (x,), strict=True)
        assert_bitwise_equal(program.module()(x), block(x), "the exported program")
        loose = torch.export.export(block, (x,), strict=False)
        assert_bitwise_equal(loose.module()(x), block(x), "the exported program, not strict")
        return str(program.graph)


def test_a_block_can_be_exported(ranks: Pools) -> None:
    for graph in ranks(2).run(exported, timeout=120):
        assert "torch.ops.tpkernels.all_gather_matmul.default" in graph
        assert "torch.ops.tpkernels.matmul_reduce_scatter.default" in graph


def op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """(op, arguments) for every op in torch.ops.tpkernels, ranks in lockstep."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def t(*shape: int, label: str = "x", grad: bool = True, r: int = rank) -> Tensor:
        return payload(shape, rank=r, name=label).requires_grad_(grad)

    uneven = list(range(1, world + 1))
    own, whole = uneven[rank], sum(uneven)
    w, w2, b, none = t(5, 8, label="w"), t(3, 8, label="w2"), t(5, label="b"), torch.empty(0, 0)
    plain = {"grad": False}
    return [
        ("all_gather_matmul", (t(4, 8), [w], [b], name, None, 0, None, False, False, "chunked")),
        ("all_gather_matmul", (t(2, own, 8), [w, w2], [b, none], name, "gelu", 1, uneven, True, True, "unfused")),
        ("all_gather_matmul", (t(2, own, 8), [w, w], [b, none], name, "swiglu", 1, uneven, True, True, "chunked")),
        ("all_gather_matmul", (t(3, own), [t(5, whole)], [], name, None, -1, uneven, False, False, "chunked")),
        ("all_gather_matmul_backward", (
            [t(4 * world, 5, **plain)], t(4, 8, **plain), [t(5, 8, **plain)], None, name, 0, None, False,
            [True, True, True], "chunked",
        )),
        ("all_gather_matmul_backward", (
            [t(whole, 5, **plain)], t(whole, 8, **plain), [t(5, 8, **plain)], t(whole, 8, **plain), name, 0, uneven,
            True, [True, True, False], "chunked",
        )),
        ("matmul_reduce_scatter", (t(13, 8), w, t(5, label="b", r=0), name, 0, None, "chunked")),
        ("matmul_reduce_scatter", (t(2, whole, 8), w, None, name, 1, uneven, "unfused")),
        ("matmul_reduce_scatter_backward", (
            t(own, 5, **plain), t(whole, 8, **plain), t(5, 8, **plain), name, 0, uneven, "chunked", [True, True, True],
        )),
        ("matmul_all_reduce", (t(2, 7, 8), w, t(5, label="b", r=0), name, "chunked")),
        ("linear_backward", (t(7, 5, **plain), t(7, 8, **plain), t(5, 8, **plain), [True, True, True])),
        ("linear_backward_by_blocks", (
            t(7, 5, **plain), t(7, 8, **plain), t(5, 8, **plain), name, [True, True, True],
        )),
        ("copy_matmul", (t(2, 7, 8, r=0), [w, w2], [b, none], name, "chunked")),
        ("copy_matmul_backward", (
            [t(7, 5, **plain)], t(7, 8, r=0, **plain), [t(5, 8, **plain)], name, "chunked", [True, True, True],
        )),
        ("all_gather", (t(2, own, 8), name, 1, uneven, False)),
        ("all_gather", (t(2, own, 8), name, 1, uneven, True)),
        ("reduce_scatter", (t(2, whole, 8), name, 1, uneven)),
        ("reduce_scatter", (t(7, 8), name, 0, None)),
        ("all_reduce", (t(7, 8), name)),
        ("copy_to_group", (t(7, 8, r=0), name)),
        ("shard", (t(7, 8, r=0), name, 0, None)),
        ("own_ids", (torch.arange(whole).view(1, -1), whole, sum(uneven[:rank]), own, name)),
        ("checked_labels", (torch.ones(2, 3), torch.ones(3).long(), torch.zeros(3, dtype=torch.bool), 4, rank)),
        ("cross_entropy", (t(2, 1, own), torch.tensor([[0], [-7]]), name, uneven, -7, 0.1, 0.5, 1)),
        ("cross_entropy_backward", (
            t(2, r=0, **plain), t(2, own, **plain), torch.tensor([0, -7]), t(2, r=0, **plain), t(2, r=0, **plain), name,
            uneven, -7, 0.1, 0.5, 1,
        )),
        ("linear_cross_entropy", (
            t(own, 2, 8), t(own, 8, label="w"), None, torch.zeros(whole, 2).long(), name, uneven, 0, uneven, -7, 0.1,
            0.5, 3, "chunked",
        )),
        ("linear_cross_entropy_backward", (
            t(2, r=0, **plain), t(2, 8, r=0, **plain), t(own, 8, **plain), t(own, **plain), torch.tensor([0, -7]),
            t(2, r=0, **plain), t(2, r=0, **plain), name, uneven, 0, None, -7, 0.1, 0.5, 1, "chunked",
            [True, True, True],
        )),
        *norm_op_arguments(name),
        *grouped_op_arguments(name),
        *mesh_op_arguments(name),
        *scaled_op_arguments(name),
    ]  # fmt: skip


def norm_op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """A residual and a norm behind a sum."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own, uneven = rank + 1, list(range(1, world + 1))

    def t(*shape: int, label: str = "x", grad: bool = True, r: int = 0) -> Tensor:
        return payload(shape, rank=r, name=label).requires_grad_(grad)

    x, w, bias, residual, weight = (
        t(2, sum(uneven), 8, r=rank), t(5, 8, label="w", r=rank), t(5, label="b"),
        t(2, sum(uneven), 5, label="residual"), t(5, label="norm"),
    )  # fmt: skip
    saved = (t(2, own, 5, label="sums", grad=False), torch.full((2 * own,), 0.5), weight.detach())
    dn, dr = t(2, own, 5, label="dn", grad=False), t(2, own, 5, label="dr", grad=False)
    rows = t(2, own, 5, label="rows")
    return [
        ("add_norm", (rows, t(2, own, 5, label="residual"), weight, 1e-5)),
        ("add_norm_backward", (dn, dr, *saved, None)),
        ("add_norm_backward", (dn, None, *saved, name)),
        ("matmul_all_reduce_norm", (x, w, bias, residual, weight, 1e-5, name, "chunked")),
        ("matmul_reduce_scatter_norm", (x, w, bias, rows, weight, 1e-5, name, 1, uneven, "chunked")),
        ("matmul_reduce_scatter_norm", (x, w, None, rows, weight, 0.0, name, 1, uneven, "unfused")),
    ]


def scaled_op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = rank + 1
    x, w, u = (payload(shape, rank=rank).to(torch.float8_e4m3fn) for shape in ((2, own, 16), (5, 16), (3, 2, 16)))
    bias, one, rows = payload((5,), torch.float16), torch.ones(()), torch.full((2, own, 1), 0.5)
    uneven, of_weight = list(range(1, world + 1)), torch.full((5, 1), 2.0)
    common = (name, torch.float16)
    return [
        ("all_gather_scaled_matmul", (
            x, [w, w], [bias, torch.empty(0, 0)], rows, [of_weight, one], *common, "gelu", 1, uneven, False, "chunked",
        )),
        ("all_gather_scaled_matmul", (
            x, [w, w], [], rows, [of_weight, one], *common, "swiglu", 1, uneven, True, "unfused",
        )),
        ("scaled_matmul_reduce_scatter", (u, w, bias, one, of_weight, *common, -1, None, "chunked")),
        ("scaled_matmul_all_reduce", (u, w, None, torch.full((3, 2, 1), 0.5), one, *common, "chunked")),
    ]  # fmt: skip


def mesh_op_arguments(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """All ranks along Y of a mesh, then all along X; the other axis is a group of this rank alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [cast(dist.ProcessGroup, dist.new_group([one])) for one in range(world)][rank]

    def t(*shape: int) -> Tensor:
        return payload(shape, rank=rank, name="x")

    cuts = [
        ((group_name(alone), name), [2 * world], [2] * world, t(3, 2 * world), (5, 2), t(3, 5)),
        ((name, group_name(alone)), [2] * world, [2 * world], t(3, 2), (5, 2 * world), t(3, 5)),
    ]
    found: list[tuple[str, tuple[Any, ...]]] = []
    for names, x_sizes, y_sizes, x, shape, u in cuts:
        for w_dim, (rows, columns) in ((1, shape), (0, shape[::-1])):
            w, cut = t(rows, columns), (*names, w_dim, x_sizes, y_sizes, 2, "chunked")
            grads = [True, True, True]
            found.append(("gather_both_matmul", (x.clone().requires_grad_(), w.clone().requires_grad_(), t(5), *cut)))
            found.append(("gather_matmul_scatter", (u.clone().requires_grad_(), w.clone(), None, *cut)))
            found.append(("gather_both_matmul_backward", (u, x, w, *cut, grads)))
            found.append(("gather_matmul_scatter_backward", (x, u, w, *cut, grads)))
    return found


def opcheck(op: str, arguments: tuple[Any, ...], full: bool) -> None:
    """torch's check of a custom op; it compares inputs with an allclose that knows no fp8, as the tests of fp8 do."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"] if full or op in FUSED else []
    tests = tests[1:] if isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.float8_e4m3fn else tests
    torch.library.opcheck(getattr(torch.ops.tpkernels, op).default, arguments, test_utils=tests)


def opcheck_all(every: int) -> list[str]:
    """The ops that there are arguments for; of the calls, ``every`` so many-th is checked."""
    with new_group() as group:
        calls = list(op_arguments(group_name(group)))
        for op, arguments in calls[::every]:
            opcheck(op, arguments, True)
    return [op for op, _ in calls]


@pytest.mark.full("test_world_one.py checks every op on one rank")
def test_ops_pass_opcheck(ranks: Pools, full: bool) -> None:
    """On three ranks: their shards are uneven. On one rank all of them are checked (test_world_one.py)."""
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "tpkernels::" in name
    }
    for checked in ranks(3).run(opcheck_all, 1 if full else 6, timeout=240):
        assert set(checked) == registered


def fakes_tell_the_truth() -> int:
    compared = 0
    with new_group() as group:
        for op, arguments in op_arguments(group_name(group)):
            function = getattr(torch.ops.tpkernels, op)
            with torch.no_grad():
                real = function(*arguments)
            with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
                pretend = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
                fake = function(*pretend)
            reals, fakes = ([one] if isinstance(one, Tensor) else one for one in (real, fake))
            assert len(reals) == len(fakes), op
            for a, b in zip(reals, fakes, strict=True):
                shape = [x if free_unbacked_symbols(y) else y for x, y in zip(a.shape, b.shape, strict=True)]
                assert (list(a.shape), a.stride(), a.dtype, a.device) == (shape, b.stride(), b.dtype, b.device), (
                    op,
                    arguments,
                )
                compared += 1
    return compared


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_fakes_have_the_shapes_strides_and_dtypes_of_the_real_outputs(ranks: Pools, world: int) -> None:
    assert min(ranks(world).run(fakes_tell_the_truth)) > 20


def fake_refusals() -> list[str]:
    """Bad shapes are refused while tracing, with the same words."""
    messages = []
    with new_group() as group:
        name = group_name(group)
        with FakeTensorMode() as mode:
            x, w = mode.from_tensor(torch.ones(4, 8)), mode.from_tensor(torch.ones(5, 7))
            for op, arguments in (
                ("all_gather_matmul", (x, [w], [], name, None, 0, None, False, False, "auto")),
                ("matmul_reduce_scatter", (x, w, None, name, 0, None, "auto")),
                ("matmul_all_reduce", (x, w, None, name, "auto")),
                ("copy_matmul", (x, [w], [], name, "auto")),
            ):
                try:
                    getattr(torch.ops.tpkernels, op)(*arguments)
                except ValueError as error:
                    messages.append(str(error))
        assert bool((tpk.all_reduce(torch.ones(2), group) == 2).all())
    return messages


def test_fakes_refuse_what_the_real_ops_refuse(ranks: Pools) -> None:
    for messages in ranks(2).run(fake_refusals):
        assert len(messages) == len(FUSED)
        assert all("must be [N, 8] to match x, got shape (5, 7)" in message for message in messages)
