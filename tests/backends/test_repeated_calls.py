"""Small calls that were made before take a short way; it gives the same values, errors and failures as the long one.

All values here are integers whose sums are exact, so that every comparison is bit for bit with the product in fp64.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels as tpk
from tests.nn.reference import tp_mesh
from tests.ops.support import new_group
from tpkernels.comm.groups import resolve
from tpkernels.errors import CollectiveTimeout, GroupMismatch, GroupPoisoned
from tpkernels.gemm.native import native, why_not
from tpkernels.nn import ParallelMLP, RowParallelLinear
from tpkernels.ops import agreed_call
from tpkernels.testing.numeric import Bounded, assert_bitwise_equal
from tpkernels.testing.payload import integer_payload, payload
from tpkernels.testing.spawn import Pools

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(native() is None, reason=why_not() or "the compiled core is there"),
]


@contextmanager
def long_ways() -> Iterator[list[str]]:
    """The ops that do not take the short way."""
    ops: list[str] = []
    run_checked = agreed_call.run_checked

    def counted(group: Any, checked: Any, *rest: Any) -> Any:
        ops.append(checked.signature.op)
        return run_checked(group, checked, *rest)

    with mock.patch.object(agreed_call, "run_checked", counted):
        yield ops


def operands(call: int, *lead: int, k: int = 12, n: int = 10, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """x and w of this rank, a bias, and the exact result."""
    size, rank = dist.get_world_size(), dist.get_rank()
    xs = [integer_payload((*lead, k), dtype, rank=r, call=call, name="x", nonzeros=6) for r in range(size)]
    ws = [integer_payload((n, k), dtype, rank=r, call=call, name="w") for r in range(size)]
    bias = integer_payload((n,), dtype, call=call, name="bias", largest=3)
    exact = sum((x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True)), torch.zeros(()).double())
    return xs[rank], ws[rank], bias, exact


def agree(y: Tensor, exact: Tensor, like: Tensor, what: str) -> None:
    assert_bitwise_equal(y, exact.to(like.dtype), what)


def every_kind_three_times() -> list[str]:
    with new_group() as group, long_ways() as ways:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for lead in ((1,), (8,), (2, 1, 3), (0,)):
                for with_bias in (False, True):
                    for call in range(3):
                        x, w, bias, exact = operands(call, *lead, dtype=dtype)
                        y = tpk.matmul_all_reduce(x, w, group, bias=bias if with_bias else None)
                        agree(y, exact + with_bias * bias.double(), x, f"{dtype} {lead} {with_bias} {call}")
                        x_again, *_ = operands(call, *lead, dtype=dtype)
                        assert_bitwise_equal(x, x_again, "the input")
                x, w = payload((*lead, 12), dtype, rank=group.rank()), payload((10, 12), dtype, rank=group.rank())
                both = [tpk.matmul_all_reduce(x, w, group, implementation=name) for name in ("shared_memory", "auto")]
                assert_bitwise_equal(both[1], both[0], f"real numbers, the short way and the long one, {dtype} {lead}")
        assert resolve(group).in_flight is None
        return ways


@pytest.mark.parametrize("world", [2, 3])
def test_values_do_not_change_when_a_call_is_repeated_and_only_the_first_takes_the_long_way(
    ranks: Pools, world: int
) -> None:
    for ways in ranks(world).run(every_kind_three_times):
        assert len(ways) == 4 * 4 * (2 + 1)


def one_rank_goes_the_long_way() -> int:
    """What a rank may do otherwise for reasons of its own: strides of x and the bias, a profiler, gradients, modes."""
    with new_group() as group, long_ways() as ways:
        x, w, bias, exact = operands(0, 4)
        scattered = torch.stack([bias, bias], 1)[:, 0]
        leaf = x.clone().requires_grad_()
        alone = {
            "the first call": lambda: tpk.matmul_all_reduce(x, w, group, bias=bias),
            "x by columns": lambda: tpk.matmul_all_reduce(x.t().contiguous().t(), w, group, bias=bias),
            "a strided bias": lambda: tpk.matmul_all_reduce(x, w, group, bias=scattered),
            "a gradient": lambda: tpk.matmul_all_reduce(leaf, w, group, bias=bias).detach(),
        }
        for what, call in alone.items():
            y = call() if group.rank() == 0 else tpk.matmul_all_reduce(x, w, group, bias=bias)
            agree(y, exact + bias.double(), x, what)
        with torch.profiler.profile() if group.rank() == 0 else torch.inference_mode():
            y = tpk.matmul_all_reduce(x, w, group, bias=bias)
        agree(y, exact + bias.double(), x, "a profiler")
        return len(ways)


def test_ranks_may_take_different_ways_to_the_same_call(ranks: Pools) -> None:
    assert ranks(2).run(one_rank_goes_the_long_way) == [5, 1]


class Block(nn.Module):
    """Its sizes are nobody else's: the mesh is one for all tests, and so are the calls that it knows."""

    def __init__(self, bias: bool, call: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(22, 14, bias), nn.Linear(14, 22, bias)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(integer_payload(parameter.shape, torch.float32, call=call, name=name))

    def exact(self, x: Tensor, highest: float = float("inf")) -> Tensor:
        linears = [(x.weight.double(), None if x.bias is None else x.bias.double()) for x in (self.up, self.down)]
        h = nn.functional.linear(x.double(), *linears[0]).clamp(0, highest)
        return nn.functional.linear(h, *linears[1]).detach()

    def parallel(self) -> ParallelMLP:
        return ParallelMLP.from_linears(self.up, self.down, tp_mesh(), activation="relu")


class SeenOps(TorchDispatchMode):
    """Names of the ops that the dispatcher is given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Clamped(nn.Module):
    """What somebody puts around a layer; it has no ``forward``, only a ``__call__``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, x: Tensor, **options: Any) -> Tensor:
        return self.layer(x, **options).clamp(0, 3)


def parameters_change_under_a_block(bias: bool) -> list[str]:
    x = integer_payload((5, 22), torch.float32, name="x", largest=2)
    with torch.no_grad(), long_ways() as ways:
        block, other = Block(bias, 0), Block(bias, 1)
        mlp = block.parallel()
        hooked: list[nn.Module] = []

        def check(what: str, reference: Block, dtype: torch.dtype = torch.float32) -> None:
            for _ in range(2):
                agree(mlp(x.to(dtype)), reference.exact(x), x.to(dtype), what)

        check("as built", block)
        mlp.load_state_dict(other.parallel().state_dict())
        check("loaded in place", other)
        mlp.load_state_dict(block.parallel().state_dict(), assign=True)
        check("loaded by assignment", block)
        mlp.down.weight = other.parallel().down.weight
        block.down.weight = other.down.weight
        check("a parameter replaced", block)
        mlp.double()
        check("in another dtype", block, torch.float64)
        mlp.float()
        check("and back", block)
        with torch.inference_mode():
            check("in inference mode", block)
        for layer in (mlp.up, mlp.down):
            for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
                handle = register(lambda module, *_: hooked.append(module))
                check("with a hook", block)
                handle.remove()
        replaced = mlp.down.forward
        mlp.down.forward = lambda x, **_: replaced(x).clamp(0, 3)  # type: ignore[method-assign]
        agree(mlp(x), block.exact(x).clamp(0, 3), x, "with another forward in the second layer")
        del mlp.down.forward
        first: Any = mlp.up
        plain = first.forward
        first.forward = lambda x, **_: plain(x).clamp(0, 3)
        agree(mlp(x), block.exact(x, 3), x, "with another forward in the first layer")
        del first.forward
        with SeenOps() as seen:
            check("under a mode", block)
        assert seen.names.count("tpkernels::matmul_all_reduce") == 2
        with torch.enable_grad():
            y = mlp(x)
        assert y.requires_grad
        agree(y.detach(), block.exact(x), x, "with gradients")
        check("after gradients", block)
        assert hooked == [mlp.up] * 4 + [mlp.down] * 4
        mlp.up = Clamped(mlp.up)  # type: ignore[assignment, arg-type]
        agree(mlp(x), block.exact(x, 3), x, "with another layer in a layer's place")
        return ways


@pytest.mark.parametrize("bias", [False, True])
def test_a_block_sees_every_way_of_changing_its_parameters_and_its_hooks(ranks: Pools, bias: bool) -> None:
    """The long way: each dtype's first call, the one with gradients, and the two that a mode sees."""
    for ways in ranks(2).run(parameters_change_under_a_block, bias):
        assert ways == ["matmul_all_reduce"] * 5


def a_gated_block_repeats() -> list[str]:
    x = integer_payload((5, 26), torch.float64, name="x", largest=2)
    gate, up, down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((26, 18), (26, 18), (18, 26)))
    with torch.no_grad(), long_ways() as ways:
        for number, linear in enumerate((gate, up, down)):
            for name, parameter in linear.named_parameters():
                parameter.copy_(integer_payload(parameter.shape, torch.float64, call=number, name=name))
        mlp = ParallelMLP.from_linears(up, down, tp_mesh(), gate=gate, activation="swiglu")
        for factor in (1, 1, 2):
            for weight in (gate.weight, mlp.get_parameter("gate_up.gate.weight")):
                weight.mul_(factor)
            exact = down(nn.functional.silu(gate(x)) * up(x))
            Bounded(exact, 1e-12 * exact.abs().max().expand_as(exact)).check(mlp(x), f"gate times {factor}")
    return ways


def test_a_gated_block_repeats_with_the_weights_of_now(ranks: Pools) -> None:
    for ways in ranks(2).run(a_gated_block_repeats):
        assert ways == ["matmul_all_reduce"]


def refusals_after_repetitions() -> list[str]:
    said = []
    with new_group() as group, torch.no_grad():
        linear = nn.Linear(8, 6, bias=False)
        row = RowParallelLinear.from_linear(linear, group)
        x = torch.ones(2, row.shard_sizes[group.rank()])
        expected = row(x)
        for bad in (x[:, 1:].contiguous(), x.double(), x[0].unsqueeze(0).expand(3, -1).reshape(1, 1, 3, -1)[..., 1:]):
            try:
                row(bad)
            except ValueError as error:
                said.append(str(error))
            assert_bitwise_equal(row(x), expected, "after a refusal")
        weight = row.weight.to_local()
        for wrong in (weight[0], weight.double()):
            try:
                tpk.matmul_all_reduce(x, wrong, group)
            except ValueError as error:
                said.append(str(error))
        assert_bitwise_equal(row(x), expected, "after all refusals")
    return said


def test_a_wrong_argument_is_refused_as_before_and_the_group_goes_on(ranks: Pools) -> None:
    for said in ranks(2).run(refusals_after_repetitions):
        features, dtype, more, vector, wide = said
        assert "takes 4 features" in features
        assert "must have the dtype of x (torch.float64)" in dtype
        assert "takes 4 features" in more
        assert "weight must have 2 dimensions" in vector
        assert "weight must have the dtype of x (torch.float32), got torch.float64" in wide


def two_known_calls_meet() -> str:
    with new_group() as group:
        x, w, _, _ = operands(0, 4)
        other, v, _, _ = operands(0, 5)
        for _ in range(2):
            tpk.matmul_all_reduce(x, w, group)
            tpk.matmul_all_reduce(other, v, group)
        with pytest.raises(GroupMismatch) as caught:
            tpk.matmul_all_reduce(*((x, w) if group.rank() == 0 else (other, v)), group)
        with pytest.raises(GroupPoisoned, match="different calls"):
            tpk.matmul_all_reduce(x, w, group)
    with new_group() as group:
        x, w, _, exact = operands(1, 4)
        for _ in range(2):
            agree(tpk.matmul_all_reduce(x, w, group), exact, x, "a new group")
    return str(caught.value)


def test_repetitions_of_different_calls_raise_on_every_rank_and_a_new_group_works(ranks: Pools) -> None:
    for said in ranks(2).run(two_known_calls_meet):
        assert "matmul_all_reduce" in said
        assert "row shards=[2, 2]" in said
        assert "row shards=[3, 2]" in said


def a_rank_is_late() -> tuple[float, str]:
    """Late by much: the monitor sees the call; then it does not come at all."""
    with new_group(timeout=2.0) as group:
        state = resolve(group)
        x, w, _, exact = operands(0, 4)
        for call in range(3):
            if group.rank() == 1 and call == 2:
                time.sleep(1.0)
            start = time.monotonic()
            agree(tpk.matmul_all_reduce(x, w, group), exact, x, f"call {call}")
        waited = time.monotonic() - start
        assert state.in_flight is None
        said = ""
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeout) as caught:
                tpk.matmul_all_reduce(x, w, group)
            said = str(caught.value)
            assert caught.value.ranks == (1,)
        dist.barrier()  # rank 1 is alive until then
    return waited, said


def test_a_late_rank_is_waited_for_and_one_that_does_not_come_is_named(ranks: Pools) -> None:
    (waited, said), _ = ranks(2).run(a_rank_is_late)
    assert waited > 0.8
    assert "rank 0, call 4" in said
    assert "matmul_all_reduce(dtype=float32" in said


def many_threads() -> int:
    """Two threads on one group and one on another, at once; each call of a group has the same operands."""
    wrong: list[BaseException] = []
    with new_group() as group, new_group() as second:
        x, w, bias, exact = operands(0, 4)
        y, v, _, also = operands(1, 3)
        tpk.matmul_all_reduce(x, w, group, bias=bias)
        tpk.matmul_all_reduce(y, v, second)

        def work(call: Any, expected: Tensor) -> None:
            try:
                for i in range(100):
                    agree(call(), expected, x, f"call {i}")
            except BaseException as error:  # noqa: BLE001 - reported below
                wrong.append(error)

        on_first = (lambda: tpk.matmul_all_reduce(x, w, group, bias=bias), exact + bias.double())
        on_second = (lambda: tpk.matmul_all_reduce(y, v, second), also)
        threads = [threading.Thread(target=work, args=job) for job in (on_first, on_first, on_second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise wrong[0]
        return resolve(group).calls


def test_threads_may_share_a_group(ranks: Pools) -> None:
    first, other = ranks(2).run(many_threads)
    assert first == other
