"""What follows the product in the kernels of `symmetric`, in calls and where tiles are measured; as W processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends.emulated import Emulation
from tests.ops import test_gated
from tpkernels.backends.symmetric import tuning
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.backends.symmetric.tuning import Gemm
from tpkernels.comm.groups import resolve
from tpkernels.partition import Layout
from tpkernels.testing.numeric import BoundExceeded
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 180.0  # of one call on all ranks


def gated_launches(emulation: Emulation, fault: bool) -> tuple[list[str], str]:
    """Activations of the GEMMs that calls of a gated pair launch, forward and backward, and what the judge says."""
    from tpkernels.kernels import all_gather_matmul as kernel

    launch, seen, said = kernel.all_gather_matmul, [], "nothing"

    def noted(*operands: Any, **settings: Any) -> None:
        if not settings.get("rehearsal"):
            seen.append(settings["activation"])
        if fault:  # gate and up exchanged
            whole, gate, *others = operands
            operands, settings = (whole, settings["weight_up"], *others), {**settings, "weight_up": gate}
        launch(*operands, **settings)

    case = test_gated.BASE.but(dtype=torch.bfloat16, implementation="symmetric")
    with emulation.group() as group, mock.patch.object(kernel, "all_gather_matmul", noted):
        try:
            test_gated.judge(case.but(activation="swiglu"), group)
            test_gated.judge(case.but(activation="geglu", save_gathered=True, bias=False), group)
        except BoundExceeded as error:
            said = str(error)
    return seen, said


@pytest.mark.sample(1)
@pytest.mark.parametrize("capability", [80, 90])
def test_a_gated_pair_is_one_launch_whose_epilogue_makes_the_output(
    pools: Pools, emulation: Emulation, capability: int
) -> None:
    settings = replace(emulation, num_chunks=2, capability=capability)
    for seen, said in pools(2).run(gated_launches, settings, False, timeout=PATIENCE_S):
        assert (seen, said) == (["swiglu", "geglu"], "nothing")
    for _, said in pools(2).run(gated_launches, settings, True, timeout=PATIENCE_S):
        assert "exceed the bound" in said


def measured(emulation: Emulation) -> list[tuple[str, str, bool, bool]]:
    """How TPKERNELS_TUNE launches kinds of GEMMs: name, activation, whether with a bias, whether with scales."""
    from tpkernels.kernels import all_gather_matmul, matmul_reduce_scatter

    seen: list[tuple[str, str, bool, bool]] = []

    def noting(launch: Any) -> Any:
        def noted(*operands: Any, **settings: Any) -> None:
            has_scale = settings.get("scale_whole", settings.get("scale_x")) is not None
            name, activation = launch.__name__, settings.get("activation", "none")
            seen.append((name, activation, settings.get("bias") is not None, has_scale))
            launch(*operands, **settings)

        return mock.patch.object(sys.modules[launch.__module__], launch.__name__, noted)

    bf16, fp8, layout = torch.bfloat16, torch.float8_e4m3fn, Layout(1, (20, 12), 1)
    with emulation.group() as group:
        channels = channels_of(resolve(group))
        device = channels.device
        with noting(all_gather_matmul.all_gather_matmul), noting(matmul_reduce_scatter.matmul_reduce_scatter):
            for gemm in (
                Gemm(True, 32, 40, 32, bf16, 2, None, "swiglu"),
                Gemm(True, 32, 40, 32, fp8, 2, torch.float16, "gelu"),
                Gemm(True, 32, 40, 32, fp8, 2, bf16, "geglu"),
                Gemm(False, 32, 40, 32, fp8, 2, bf16),
            ):
                (took,) = tuning._measure(gemm, layout, device, dist.get_rank(group), (gemm.configure(device).tiles,))
                assert took is not None and took > 0, gemm
                x = tuning._Bench(gemm, layout, device, dist.get_rank(group))._x
                assert x.dtype == gemm.dtype and x.float().std() > 0.5, "numbers as they occur"
    return seen


@pytest.mark.full("measures tiles of interpreted kernels")
def test_tiles_are_measured_with_what_follows_the_product(pools: Pools, emulation: Emulation) -> None:
    for seen in pools(2).run(measured, replace(emulation, capability=90), timeout=PATIENCE_S):
        assert list(dict.fromkeys(seen)) == [
            ("all_gather_matmul", "swiglu", True, False),
            ("all_gather_matmul", "gelu", True, True),
            ("all_gather_matmul", "geglu", True, True),
            ("matmul_reduce_scatter", "none", False, True),
        ]
        assert len(seen) == 4 * tuning.ROUNDS


def explained(emulation: Emulation) -> str:
    with emulation.group() as group:
        return str(tpk.explain("matmul_all_reduce", m=512, n=512, k=64, dtype=torch.bfloat16, group=group))


def test_explain_names_multicast_where_the_groups_memory_has_it(pools: Pools, emulation: Emulation) -> None:
    for multicast in (False, True):
        for said in pools(2).run(explained, replace(emulation, multicast=multicast), timeout=PATIENCE_S):
            (line,) = [line for line in said.splitlines() if line.startswith("   symmetric")]
            assert ("pushed by multicast stores (NVLS)" in line) == multicast, line
