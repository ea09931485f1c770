"""A launch that passes Triton's own by gives the launcher what Triton's own would have given it.

Triton compiles nothing here and loads nothing: where its launcher would be, the arguments are written down.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.backends.test_symmetric_order import Recorder, caller, calls
from tpkernels.backends.symmetric import kernel_launches
from tpkernels.kernels import all_gather_matmul as gather
from tpkernels.kernels import grouped_matmul as grouped
from tpkernels.kernels import known_launches
from tpkernels.kernels import matmul_reduce_scatter as scatter
from tpkernels.kernels.config import GemmConfig, configure, configure_grouped
from tpkernels.kernels.known_launches import KnownLaunch

pytestmark = pytest.mark.cpu

M, N, K, TP = 96, 64, 128, 2
KERNELS = (gather.all_gather_matmul_kernel, scatter.matmul_reduce_scatter_kernel, grouped.grouped_matmul_kernel)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Noting:
    """A driver for a GPU that is not here; `launched`: grid, stream, function and arguments of each launch."""

    def __init__(self, capability: int) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.specialised = self.compiled = 0
        self.options: dict[str, Any] = {}
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def compile(self, source: Any, **options: Any) -> CompiledKernel:
        self.compiled, self.options = self.compiled + 1, options["options"]
        kernel = object.__new__(CompiledKernel)
        kernel.src, kernel.module, kernel.function, kernel.packed_metadata = source, "module", self.compiled, ()
        kernel.name = kernel.metadata = ""
        kernel._run = self._note
        return kernel

    def _note(self, *arguments: Any) -> None:
        *grid, stream, function, _packed, _metadata, _enter, _exit = arguments[:9]
        self.launched.append((tuple(grid), stream, function, *map(told, arguments[9:])))


def told(argument: Any) -> Any:
    """What of an argument reaches a GPU; Triton's launcher reads no more of a descriptor."""
    if isinstance(argument, TensorDescriptor):
        fields = {**vars(argument), "base": argument.base.data_ptr()}
        return "descriptor", *sorted((name, str(value)) for name, value in fields.items())
    return ("tensor", argument.data_ptr()) if isinstance(argument, Tensor) else argument


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Noting]]:
    specialise = JITFunction.run

    def install(capability: int) -> Noting:
        driver = Noting(capability)
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        monkeypatch.setattr(triton.compiler, "compile", driver.compile)
        for kernel in KERNELS:
            monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))

        def run(self: Any, *arguments: Any, **named: Any) -> Any:
            driver.specialised += 1
            return specialise(self, *arguments, **named)

        monkeypatch.setattr(JITFunction, "run", run)
        return driver

    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    yield install


# --- one launch of each kernel ----------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape).to(dtype)


def config_of(capability: int, dtype: torch.dtype, dual: bool = False) -> GemmConfig:
    return configure(
        capability=capability, num_sms=132, m=M, n=N, k=K, dtype=str(dtype).removeprefix("torch."), world_size=TP,
        moved_row_bytes=2 * K, dual=dual,
    )  # fmt: skip


def weight_of(kind: str, dtype: torch.dtype) -> Tensor:
    return zeros(K, N, dtype=dtype).t() if kind == "transposed" else zeros(N, K, dtype=dtype)


class Case(NamedTuple):
    """operands: new ones with each call; what launches of a kind share is made once."""

    operands: Callable[[], dict[str, Tensor]]
    launch: Callable[..., KnownLaunch | None]


def gathers(kind: str, capability: int) -> Case:
    dtype, gated = FP8 if kind == "scales" else BF16, kind == "gated"
    config, activation = config_of(capability, dtype, gated), {"plain": "gelu", "gated": "swiglu"}.get(kind, "none")
    arrivals = gather.Arrivals(zeros(5, 8, dtype=torch.int32), zeros(8, dtype=torch.int32), torch.zeros(9).long(), 3)

    def operands() -> dict[str, Tensor]:
        made = {"whole": zeros(M, K, dtype=dtype), "weight": weight_of(kind, dtype), "out": zeros(M, N)}
        if kind == "scales":
            return made | {"scale_whole": torch.ones(M, 1), "scale_weight": torch.ones(N, 1)}
        made |= {"bias": zeros(N), "preactivation": zeros(M, N)}
        up = {"weight_up": zeros(N, K), "bias_up": zeros(N), "preactivation_up": zeros(M, N)}
        return made | up if gated else made

    def launch(whole: Tensor, weight: Tensor, out: Tensor, **more: Any) -> KnownLaunch | None:
        return gather.all_gather_matmul(whole, weight, out, arrivals, config, activation=activation, **more)

    return Case(operands, launch)


def scatters(kind: str, capability: int) -> Case:
    dtype = FP8 if kind == "scales" else BF16
    config = config_of(capability, dtype)
    starts, flags, counters, group = (torch.zeros(size).long() for size in (TP, TP, 8, 9))
    departures = scatter.Departures(
        zeros(5, 8, dtype=torch.int32), starts, flags, counters.int(), group, torch.float32, N
    )

    def operands() -> dict[str, Tensor]:
        scales = {"scale_x": torch.ones(M, 1), "scale_weight": torch.ones(N, 1)} if kind == "scales" else {}
        made = {"x": zeros(M, K, dtype=dtype), "weight": weight_of(kind, dtype), "staging": torch.zeros(TP).long()}
        return made | scales | {"addend": zeros(M, N)}

    def launch(x: Tensor, weight: Tensor, staging: Tensor, **more: Any) -> KnownLaunch | None:
        return scatter.matmul_reduce_scatter(x, weight, replace(departures, staging=staging), config, **more)

    return Case(operands, launch)


def experts(kind: str, capability: int) -> Case:
    """A grouped GEMM, of which the tables of the routing are others with each call, too."""
    config = configure_grouped(
        capability=capability, num_sms=132, tokens=M, top_k=2, experts=3, n=N, k=K, dtype="bfloat16", world_size=TP,
        moved_row_bytes=2 * K, dual=kind == "gated",
    )  # fmt: skip
    flags, group, many = zeros(8, dtype=torch.int32), torch.zeros(9).long(), {"dtype": torch.int32}
    arrivals = gather.Arrivals(zeros(1, 8, **many), flags, group, 3)

    def operands() -> dict[str, Tensor]:
        made = {"weight": zeros(3, N, K), "out": zeros(2 * M, N), "order": zeros(5, 8, **many)}
        if kind == "gated":
            up = {"weight_up": zeros(3, N, K), "bias": zeros(3, N), "bias_up": zeros(3, N)}
            return {"x": zeros(M, K), **made, **up, "tokens": zeros(2 * M, **many)}
        sums = {
            "staging": torch.zeros(TP).long(),
            "rows_of_tokens": zeros(M, 2, **many),
            "chunks": zeros(TP, 4, **many),
        }
        return {"x": zeros(2 * M, K), **made, **sums, "row_weights": torch.zeros(2 * M), "token_addend": zeros(M, N)}

    def launch(x: Tensor, weight: Tensor, out: Tensor, order: Tensor, **more: Any) -> KnownLaunch | None:
        if kind == "sums":
            of_call = {name: more.pop(name) for name in list(more) if name not in ("known", "rehearsal")}
            more["combination"] = grouped.Combination(
                flags=addresses, counters=flags, staging_dtype=BF16, staging_stride=N, **of_call
            )
        activation = "swiglu" if kind == "gated" else "none"
        return grouped.grouped_matmul(
            x, weight, out, replace(arrivals, order=order), config, activation=activation, **more
        )

    addresses = torch.zeros(TP).long()
    return Case(operands, launch)


def both(driver: Noting, case: Case) -> list[tuple[Any, ...]]:
    """What the launcher is given for the same operands by Triton, and by a launch that is known from others."""
    first, later = case.operands(), case.operands()
    if "bias_up" in first:
        first["bias_up"] = first["bias"]  # one tensor in two places, and in later calls two
    known = case.launch(**first, rehearsal=True)
    case.launch(**later)
    case.launch(**later, known=known)
    rehearsed, *launched = driver.launched
    assert rehearsed[0] == (1, 1, 1) and driver.compiled == 1 and driver.specialised == 2
    return launched


CASES = [
    (gathers, "plain", 90), (gathers, "gated", 90), (gathers, "scales", 90), (gathers, "transposed", 90),
    (gathers, "gated", 80), (experts, "gated", 80), (experts, "sums", 80),
    (scatters, "plain", 90), (scatters, "scales", 90), (scatters, "transposed", 80),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "capability"), CASES)
def test_the_launcher_is_given_what_tritons_own_launch_gives_it(
    on_gpu: Callable[[int], Noting], make: Callable[[str, int], Case], kind: str, capability: int
) -> None:
    by_triton, by_known = both(on_gpu(capability), make(kind, capability))
    assert by_triton == by_known and len(by_triton) > 20
    assert any(argument[0] == "descriptor" for argument in by_known[3:] if isinstance(argument, tuple)) is (
        capability == 90
    )


@pytest.mark.parametrize(("kind", "fuses"), [("plain", True), ("scales", False)])
def test_a_scaled_product_is_rounded_before_an_addend_comes(
    on_gpu: Callable[[int], Noting], kind: str, fuses: bool
) -> None:
    """As it is where it is stored: `same_bits` adds blocks in one place on some ranks and in another on others."""
    driver, case = on_gpu(90), scatters(kind, 90)
    case.launch(**case.operands())
    assert driver.options["enable_fp_fusion"] is fuses


def test_the_operands_that_a_launch_is_known_from_may_go(on_gpu: Callable[[int], Noting]) -> None:
    on_gpu(90)
    case = gathers("plain", 90)
    operands = case.operands()
    known, left = case.launch(**operands, rehearsal=True), [weakref.ref(one) for one in operands.values()]
    operands.clear()
    assert known is not None and [one() for one in left] == [None] * 5


def test_a_descriptor_of_other_operands_would_be_seen(on_gpu: Callable[[int], Noting]) -> None:
    right, other = known_launches._described, zeros(M, K)
    with mock.patch.object(known_launches, "_described", lambda like, tensor: right(like, other)):
        by_triton, by_known = both(on_gpu(90), gathers("plain", 90))
    wrong = [one[0] for one, other in zip(by_triton[3:], by_known[3:], strict=True) if one != other]
    assert wrong == ["descriptor"] * 3


def test_operands_in_another_order_would_be_seen(on_gpu: Callable[[int], Noting]) -> None:
    original = KnownLaunch.__call__

    def swapped(self: KnownLaunch, first: Tensor, second: Tensor, *rest: Tensor | None) -> None:
        original(self, second, first, *rest)

    with mock.patch.object(KnownLaunch, "__call__", swapped):
        by_triton, by_known = both(on_gpu(80), scatters("plain", 80))
    assert by_triton != by_known


def test_where_kernels_are_interpreted_and_where_nothing_is_launched_no_launch_is_known() -> None:
    assert known_launches.known_launch(None, 1, [], []) is None
    x, weight, out, none = zeros(0, K), zeros(N, K), zeros(0, N), torch.zeros(0)
    arrivals = gather.Arrivals(none, none, none, 3)
    assert gather.all_gather_matmul(x, weight, out, arrivals, config_of(80, BF16)) is None


# --- calls of the backend ---------------------------------------------------------------------------------------------


class Launching(Recorder):
    def launch(self, kernel: Callable[[], None]) -> None:
        super().launch(kernel)
        kernel()


GEMMS = {"all_gather_matmul": 2, "matmul_reduce_scatter": 1}  # of a call; those of a gather are alike


@pytest.mark.parametrize("faulty", [False, True], ids=["as it is", "not remembered"])
@pytest.mark.parametrize("op", GEMMS)
def test_triton_specialises_at_the_first_call_of_a_kind_alone(
    on_gpu: Callable[[int], Noting], op: str, faulty: bool
) -> None:
    driver, device = on_gpu(80), Launching()
    make_call = caller(device, op, calls()[op])
    fault = mock.patch.object(kernel_launches, "rehearse", lambda launch: None)
    with fault if faulty else nullcontext():
        for _ in range(3):
            make_call()
    assert device.noted.count("GEMM") == 3 * GEMMS[op]
    launches = 3 * GEMMS[op]
    assert driver.specialised == (launches if faulty else 1)
    assert len(driver.launched) == (launches if faulty else 1 + launches)  # the first one is rehearsed


def shifted(x: Tensor) -> Tensor:
    """The same, not at a multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def wider(x: Tensor) -> Tensor:
    """The same, its rows further apart."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]


@pytest.mark.parametrize("change", [shifted, wider])
def test_operands_that_lie_otherwise_are_another_kind(
    on_gpu: Callable[[int], Noting], change: Callable[[Tensor], Tensor]
) -> None:
    driver, call = on_gpu(80), calls()["matmul_reduce_scatter"]
    make_call = caller(Launching(), "matmul_reduce_scatter", call)
    for operand in (call.xs[0], call.xs[0].clone(), change(call.xs[0]), change(call.xs[0])):
        call.xs[0] = operand
        make_call()
    assert driver.specialised == 2
