"""One rank: every op, public or from `torch.ops.tpkernels`, is the plain torch call bit for bit, gradients too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import tpkernels as tpk
from tests.ops.test_compile import op_arguments, opcheck
from tpkernels.comm.groups import group_name
from tpkernels.errors import UnsupportedProblem
from tpkernels.nn.parameters import local, shard_parameter, tp_mesh
from tpkernels.testing import grouped
from tpkernels.testing.cases import DTYPES, strided
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.payload import integer_payload, payload

pytestmark = pytest.mark.cpu

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
SHAPES = ((7, 16), (1, 16), (0, 16), (2, 3, 16), (2, 0, 3, 16))
KINDS = [(dtype, shape) for dtype in DTYPES for shape in (SHAPES if dtype in DTYPES[:2] else SHAPES[::3])]
ops = torch.ops.tpkernels


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A job of one rank in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        patch.setenv("TPKERNELS_CALIBRATE", "0")
        assert not dist.is_initialized()
        mesh = tpk.init()
        yield mesh["tp"].get_group()
    dist.destroy_process_group()


def test_auto_measures_no_link_where_there_is_no_peer(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a group of its own, because a rank that tries to send to itself poisons it."""
    monkeypatch.setenv("TPKERNELS_CALIBRATE", "1")
    alone = dist.new_group([0])
    x, w = payload((3, 8)), payload((5, 8), name="w")
    try:
        for _ in range(2):
            assert_bitwise_equal(ops.matmul_all_reduce(x, w, None, group_name(alone), "auto"), F.linear(x, w))
    finally:
        dist.destroy_process_group(alone)


# (x, weights, biases, group, activation) -> outputs, one per weight
Op = Callable[[Tensor, list[Tensor], list[Tensor | None], Any, "str | None"], list[Tensor]]


def packed(biases: list[Tensor | None]) -> list[Tensor]:
    return [] if all(b is None for b in biases) else [torch.empty(0, 0) if b is None else b for b in biases]


def raw_gather(implementation: str, dim: int) -> Op:
    def op(x: Tensor, ws: list[Tensor], bs: list[Tensor | None], g: Any, activation: str | None) -> list[Tensor]:
        settings = (group_name(g), activation, dim, None, False, activation is not None, implementation)
        return list(ops.all_gather_matmul(x, ws, packed(bs), *settings))[: len(ws)]

    return op


MANY: dict[str, Op] = {
    "all_gather_matmul": lambda x, w, b, g, a: tpk.all_gather_matmul(x, w, g, bias=b, activation=a),
    "all_gather_matmul, last dim": lambda x, w, b, g, a: tpk.all_gather_matmul(
        x, w, g, bias=b, activation=a, gather_dim=-1, shard_sizes=[16]
    ),
    "all_gather_matmul, gathered": lambda x, w, b, g, a: tpk.all_gather_matmul(
        x, w, g, bias=b, activation=a, return_gathered=True, save_gathered=True
    )[0],
    "copy_matmul": lambda x, w, b, g, a: tpk.copy_matmul(x, w, g, bias=b, activation=a),
    "torch.ops all_gather_matmul": raw_gather("auto", 0),
    "torch.ops all_gather_matmul, unfused, last dim": raw_gather("unfused", -1),
    "torch.ops copy_matmul": lambda x, w, b, g, a: [
        ACTIVATIONS[a](y) for y in ops.copy_matmul(x, w, packed(b), group_name(g), "auto")
    ],
}
PLAIN = [name for name in MANY if name.startswith("all_gather_matmul")]
ONE: dict[str, Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]] = {
    "matmul_reduce_scatter": lambda x, w, b, g: tpk.matmul_reduce_scatter(x, w, g, bias=b),
    "matmul_reduce_scatter, last dim": lambda x, w, b, g: tpk.matmul_reduce_scatter(
        x, w, g, bias=b, scatter_dim=-1, shard_sizes=[5]
    ),
    "matmul_all_reduce": lambda x, w, b, g: tpk.matmul_all_reduce(x, w, g, bias=b),
    "torch.ops matmul_reduce_scatter": lambda x, w, b, g: ops.matmul_reduce_scatter(
        x, w, b, group_name(g), 0, None, "auto"
    ),
    "torch.ops matmul_reduce_scatter, unfused, last dim": lambda x, w, b, g: ops.matmul_reduce_scatter(
        x, w, b, group_name(g), -1, [5], "unfused"
    ),
    "torch.ops matmul_all_reduce": lambda x, w, b, g: ops.matmul_all_reduce(x, w, b, group_name(g), "auto"),
}
COLLECTIVES: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "all_gather": lambda x, g, dim: tpk.all_gather(x, g, dim=dim),
    "reduce_scatter": lambda x, g, dim: tpk.reduce_scatter(x, g, dim=dim),
    "all_reduce": lambda x, g, dim: tpk.all_reduce(x, g),
    "copy_to_group": lambda x, g, dim: tpk.copy_to_group(x, g),
    "shard": lambda x, g, dim: tpk.shard(x, g, dim=dim),
    "torch.ops all_gather": lambda x, g, dim: ops.all_gather(x, group_name(g), dim, None, False),
    "torch.ops all_gather, replicated": lambda x, g, dim: ops.all_gather(x, group_name(g), dim, [x.shape[dim]], True),
    "torch.ops reduce_scatter": lambda x, g, dim: ops.reduce_scatter(x, group_name(g), dim, None),
    "torch.ops all_reduce": lambda x, g, dim: ops.all_reduce(x, group_name(g)),
    "torch.ops copy_to_group": lambda x, g, dim: ops.copy_to_group(x, group_name(g)),
    "torch.ops shard": lambda x, g, dim: ops.shard(x, group_name(g), dim, None),
}


Maker = Callable[..., Tensor]


def strided_integers(shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    """Exact: torch hands strided operands to the library's GEMM as they are, and its last bits depend on that."""
    return strided(integer_payload(shape, dtype, name=name, nonzeros=shape[-1]))


def leaves(shape: tuple[int, ...], dtype: torch.dtype, has_bias: list[bool], make: Maker) -> list[Tensor | None]:
    """x, then weights, then biases; each a leaf of its own."""
    ns = [5, 3][: len(has_bias)]
    ws = [make((n, shape[-1]), dtype, name=f"w{n}") for n in ns]
    bs = [make((n,), dtype, name=f"b{n}") if has else None for n, has in zip(ns, has_bias, strict=True)]
    return [None if t is None else t.requires_grad_() for t in (make(shape, dtype, name="x"), *ws, *bs)]


def outputs_and_gradients(f: Callable[..., list[Tensor]], tensors: list[Tensor | None], make: Maker) -> list[Tensor]:
    outs = f(*tensors)
    given = [t for t in tensors if t is not None]
    grads = torch.autograd.grad(outs, given, [make(out.shape, out.dtype, name="dy") for out in outs])
    return [*outs, *grads]


def compare(
    f: Callable[..., list[Tensor]], plain: Callable[..., list[Tensor]], made: Any, what: str, make: Maker = payload
) -> None:
    """Twice the same leaves, through the op and through torch."""
    ours, theirs = outputs_and_gradients(f, made(), make), outputs_and_gradients(plain, made(), make)
    assert len(ours) == len(theirs)
    for number, (now, expected) in enumerate(zip(ours, theirs, strict=True)):
        what_differs = f"{what}, {make.__name__}: output or gradient {number}"
        assert_bitwise_equal(now.detach(), expected.detach(), what_differs, either_zero=make is not payload)


@pytest.mark.parametrize("name", MANY)
def test_a_gathering_op_is_a_linear_and_so_are_its_gradients(group: Any, name: str) -> None:
    for dtype, shape in KINDS:
        for has_bias in ([True], [False], [True, False]):
            for activation, act in ACTIVATIONS.items():
                if activation not in (None, "gelu") and (shape != (7, 16) or dtype == torch.float16):
                    continue
                count = len(has_bias)

                def ours(x: Tensor, *rest: Any, count: int = count, activation: Any = activation) -> list[Tensor]:
                    return MANY[name](x, list(rest[:count]), list(rest[count:]), group, activation)

                def plain(x: Tensor, *rest: Any, count: int = count, act: Any = act) -> list[Tensor]:
                    return [act(F.linear(x, w, b)) for w, b in zip(rest[:count], rest[count:], strict=True)]

                what = f"{name}, {dtype}, {shape}, biases {has_bias}, {activation}"
                exact = activation in (None, "relu")
                # The gradient of an x with several uses is summed in one GEMM after the other, torch adds products.
                for make in (payload,) * (count == 1 or name in PLAIN) + (strided_integers,) * exact:
                    made = partial(leaves, shape, dtype, has_bias, make)
                    compare(ours, plain, made, what, make)


@pytest.mark.parametrize("name", ONE)
def test_a_reducing_op_is_a_linear_and_so_are_its_gradients(group: Any, name: str) -> None:
    for dtype, shape in KINDS:
        for has_bias in (True, False):
            for make in (payload, strided_integers):
                compare(
                    lambda x, w, b: [ONE[name](x, w, b, group)],
                    lambda x, w, b: [F.linear(x, w, b)],
                    partial(leaves, shape, dtype, [has_bias], make),
                    f"{name}, {dtype}, {shape}, bias {has_bias}",
                    make,
                )


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_the_identity_and_so_is_its_gradient(group: Any, name: str) -> None:
    for dtype in DTYPES:
        for shape in (*SHAPES, (4,), (0,)):
            for dim in (0, -1):
                compare(
                    lambda x, d=dim: [COLLECTIVES[name](x, group, d)],
                    lambda x: [x.clone()],
                    lambda s=shape, d=dtype: [payload(s, d, name="x").requires_grad_()],
                    f"{name}, {dtype}, {shape}, dim {dim}",
                )


def test_every_op_passes_opcheck_on_one_rank(group: Any, full: bool) -> None:
    checked = set()
    for op, arguments in op_arguments(group_name(group)):
        if op in checked and not full:
            continue
        on_one = tuple("auto" if isinstance(one, str) and one == "chunked" else one for one in arguments)
        opcheck(op, on_one, full)
        checked.add(op)
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "tpkernels::" in name
    }
    assert checked == registered


@pytest.mark.parametrize("implementation", ["chunked", "shared_memory"])
def test_an_op_forced_to_send_to_nobody_is_refused_and_the_group_works_on(group: Any, implementation: str) -> None:
    x, w = payload((3, 8)), payload((5, 8), name="w")
    for call in (
        lambda: ops.all_gather_matmul(x, [w], [], group_name(group), None, 0, None, False, False, implementation),
        lambda: ops.matmul_reduce_scatter(x, w, None, group_name(group), 0, None, implementation),
        lambda: ops.matmul_all_reduce(x, w, None, group_name(group), implementation),
    ):
        with pytest.raises(UnsupportedProblem, match=f"{implementation}: one rank has nothing to") as caught:
            call()
        assert "unfused: can run this" in str(caught.value)
    assert_bitwise_equal(ops.matmul_all_reduce(x, w, None, group_name(group), "auto"), F.linear(x, w))


@pytest.mark.parametrize("meta", ["x", "weight", "bias"])
def test_a_tensor_without_values_beside_others_is_refused(group: Any, meta: str) -> None:
    """F.linear of torch 2.13 returns memory that nobody has written."""
    given = {"x": payload((2, 16)), "weight": payload((3, 16), name="w"), "bias": payload((3,), name="b")}
    given[meta] = given[meta].to("meta")
    x, w, b = given.values()
    for name, op in (ONE | {"all_gather_matmul": tpk.all_gather_matmul}).items():
        with pytest.raises(ValueError, match="must be on the device of x"):
            pytest.fail(f"{name}: {op(x, w, group, bias=b) if name == 'all_gather_matmul' else op(x, w, b, group)}")


def test_modes_without_gradients_give_the_same_bits(group: Any) -> None:
    x, w, b = payload((7, 16)), payload((5, 16), name="w"), payload((5,), name="b")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected = F.linear(x, w, b)
            for name, op in ONE.items():
                assert_bitwise_equal(op(x, w, b, group), expected, f"{name} in {mode.__name__}")
            for name, several in MANY.items():
                assert_bitwise_equal(several(x, [w], [b], group, None)[0], expected, f"{name} in {mode.__name__}")


@pytest.mark.parametrize("op", grouped.GROUPED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_rank_of_an_op_with_experts_is_within_the_bound(group: Any, op: str, dtype: torch.dtype) -> None:
    """Where more than one rank sends a partial sum, its rounding has a place in the bound; so it has before a bias."""
    case = grouped.GroupedCase(op, (12,), (10, 16), bias=True, dtype=dtype, implementation="unfused")
    grouped.judge(case, group)


def test_the_gradient_of_a_part_lies_in_memory_as_the_part_does(group: Any) -> None:
    """Fused optimizers read the two as if it did."""
    weight = shard_parameter(payload((6, 4)), tp_mesh(group, "cpu"), 0)
    dw = payload((4, 6), name="dw").t()
    local(weight).backward(dw)
    assert weight.grad.placements == weight.placements and weight.grad.stride() == weight.stride()
    part = weight.grad.to_local()
    assert part.stride() == weight.to_local().stride() and torch.equal(part, dw)
