"""What one GPU can not show: peers over NVLink or PCIe, and NCCL's copy-engine collectives. A sample of each."""

from __future__ import annotations

import pytest
import torch

from tests.backends.test_collectives import even_cases
from tests.gpu import ranks as scenarios
from tests.gpu.conftest import Shared
from tests.gpu.test_symmetric import CALL_S, cases_of
from tests.ops.test_gradients import within_bounds
from tpkernels.dispatch import OPS
from tpkernels.testing.cases import GATHER, REDUCE, SCATTER

pytestmark = pytest.mark.multi_gpu


@pytest.mark.parametrize("op", OPS)
def test_symmetric_is_exact_between_gpus(symmetric_gpus: Shared, op: str, full: bool) -> None:
    world = min(4, torch.cuda.device_count()) if full else 2
    for judge in ("values", "poison"):
        cases = cases_of(op, world, full)
        cases = cases if judge == "values" else cases[-2:]
        symmetric_gpus(world).run(scenarios.judge_all, cases, judge, 3, timeout=CALL_S)


@pytest.mark.parametrize("op", [GATHER, SCATTER, REDUCE])
def test_graphs_between_gpus_replay_with_fresh_data(symmetric_gpus: Shared, op: str, full: bool) -> None:
    symmetric_gpus(2).run(scenarios.replay, "symmetric", op, 10_000 if full else 200, 384, timeout=4 * CALL_S)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_chunks_as_collectives_on_registered_memory_are_exact(zero_cta_gpus: Shared, op: str) -> None:
    cases = even_cases(op, 2)
    zero_cta_gpus(2).run(scenarios.judge_all, cases, "values", 3, timeout=CALL_S)
    zero_cta_gpus(2).run(scenarios.judge_all, cases[:1], "poison", 3, timeout=CALL_S)
    zero_cta_gpus(2).run(scenarios.replay, "chunked", op, 50, timeout=CALL_S)


def test_gradients_between_gpus_are_within_the_bound(symmetric_gpus: Shared, zero_cta_gpus: Shared) -> None:
    symmetric_gpus(2).run(within_bounds, torch.bfloat16, 3, ("symmetric",), 264, timeout=CALL_S)
    zero_cta_gpus(2).run(within_bounds, torch.bfloat16, 3, ("chunked",), 264, timeout=CALL_S)


@pytest.mark.parametrize("how", ["late", "dies"])
def test_a_rank_that_is_missing_is_named_and_the_others_live(nccl_gpus: Shared, how: str) -> None:
    scenarios.check_without_a_peer(nccl_gpus(2), how, 10.0)
