"""Before `symmetric` is trusted with a kind of call, a small problem whose answer is known: on emulated GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import tpkernels as tpk
from tests.backends.contract import JUDGES, run
from tests.backends.emulated import Emulation, give_up_after
from tests.backends.test_symmetric import FAULTS as FORGOTTEN
from tests.backends.test_symmetric import case_of, preferred
from tests.ops import scaled
from tpkernels.backends.symmetric import copy_engine_traffic, self_check
from tpkernels.backends.symmetric import implementations as symmetric
from tpkernels.backends.symmetric.resource import channels_of
from tpkernels.comm.groups import resolve
from tpkernels.dispatch import OPS
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER, operands
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PATIENCE_S = 180.0


def checked(emulation: Emulation, dtypes: list[torch.dtype]) -> tuple[list[Any], int]:
    """The kinds that were tried, all of them with success, and how often; the calls behind them are judged."""
    with emulation.group() as made, mock.patch.object(self_check, "_verdict_of", wraps=self_check._verdict_of) as tried:
        for dtype in dtypes:
            for op in OPS:
                JUDGES["values"](case_of(op, dtype=dtype), made)
            JUDGES["values"](case_of("all_reduce", dtype=dtype, shape=(24, 24)), made)  # another of a known kind
        if emulation.capability >= 89:
            size = dist.get_world_size(made)
            of_fp8 = scaled.ScaledCase(GATHER, (6 * size, 32), ns=(10,), implementation="symmetric")
            scaled.judge_cases([of_fp8], made)
        channels = channels_of(resolve(made))
        assert set(channels.first_uses.values()) == {None}
        return list(channels.first_uses), tried.call_count


@pytest.mark.sample(1)
@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 16], ids=["in two steps", "in one step"])
@pytest.mark.slow("4 s in the interpreter")
def test_every_op_is_tried_once_per_dtype_and_then_runs(
    pools: Pools, emulation: Emulation, one_shot_bytes: int
) -> None:
    settings = replace(emulation, checks=True, one_shot_bytes=one_shot_bytes)
    if one_shot_bytes == 0:
        settings = replace(settings, multicast=True, capability=90)
    dtypes = [torch.float32] if one_shot_bytes else [torch.bfloat16]
    for kinds, count in pools(2).run(checked, settings, dtypes, timeout=PATIENCE_S):
        assert count == len(kinds) == len(OPS) * len(dtypes) + (one_shot_bytes == 0)
        ways = {op: way for op, _, _, way in kinds}
        assert ways["all_reduce"] == ("in one step" if one_shot_bytes else "in two steps")
        assert ways[SCATTER] == "beside the GEMM"


# --- what is wrong is said, on every rank, and not computed with ------------------------------------------------------


def one_more(name: str, out: int, module: ModuleType = symmetric) -> Any:
    """`module.NAME` whose argument number `out` is wrong by one, in one element of this rank's own rows."""
    original = getattr(module, name)

    def spoiled(*arguments: Any, **settings: Any) -> Any:
        result = original(*arguments, **settings)
        found = arguments[out] if out >= 0 else result
        found[0 if name != "pull" else arguments[3].sizes[0], 0] += 1  # rank 1 has these rows of a whole
        return result

    return mock.patch.object(module, name, spoiled)


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a shard is not what was sent": (GATHER, lambda: one_more("pull", 4, copy_engine_traffic)),
    "a sum over ranks is wrong": (SCATTER, lambda: one_more("reduce", 5)),
    "a sum in one kernel is wrong": (REDUCE, lambda: one_more("one_shot", -1)),
}


def refused(emulation: Emulation, fault: str) -> tuple[list[str], float]:
    """What a forced call, the same again, and one of "auto" raise on this rank; the sum that "unfused" then makes."""
    op, spoil = FAULTS[fault]
    said = []
    with emulation.group() as made:
        size = dist.get_world_size(made)
        with spoil() if dist.get_rank(made) == 1 else mock.patch.dict({}), preferred(op):
            for name in ("symmetric", "symmetric", "auto"):
                case = case_of(op, implementation=name)
                with pytest.raises(tpk.errors.UnsupportedProblem) as caught:
                    run(case, operands(case, size), made)
                said.append(str(caught.value))
        JUDGES["values"](case_of(op, implementation="unfused"), made)
        other = GATHER if op != GATHER else SCATTER  # another kind is tried by itself
        JUDGES["values"](case_of(other), made)
        return said, float(tpk.all_reduce(torch.ones(1), made, implementation="unfused"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow("3 s in the interpreter")
def test_a_wrong_result_is_an_error_on_every_rank_and_the_group_goes_on(
    pools: Pools, emulation: Emulation, fault: str
) -> None:
    settings = replace(emulation, checks=True, one_shot_bytes=1 << 16 if "one kernel" in fault else 0)
    for said, total in pools(2).run(refused, settings, fault, timeout=PATIENCE_S):
        assert total == 2.0
        for text in said:
            assert re.search(r"rank 1: \d+ of \d+ elements are wrong", text), text
            assert FAULTS[fault][0] in text and "implementation='chunked'" in text, text
            assert "rank 0:" not in text, text


def hangs(emulation: Emulation) -> str:
    with emulation.group() as made:
        give_up_after(made, 2.0)
        case = case_of(GATHER)
        with FORGOTTEN["the signal of the shard is forgotten"]() if dist.get_rank(made) == 1 else mock.patch.dict({}):
            try:
                run(case, operands(case, dist.get_world_size(made)), made)
            except tpk.errors.CommunicationError as error:
                return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow("2 s in the interpreter")
def test_a_check_that_does_not_end_is_a_time_out_that_names_it(pools: Pools, emulation: Emulation) -> None:
    told = pools(2).run(hangs, replace(emulation, checks=True), timeout=PATIENCE_S)
    assert any(
        "CollectiveTimeout" in text and "the check at the first use of all_gather_matmul" in text for text in told
    )
    assert all(text.split(":")[0] in ("CollectiveTimeout", "GroupPoisoned", "PeerLost") for text in told), told
