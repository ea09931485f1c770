"""A rank that makes a plan by itself is told that all have to."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tests.ops.support import new_group
from tpkernels.errors import CommunicationError
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo


def one_rank_plans() -> str:
    with new_group(timeout=1.0) as group:
        if dist.get_rank() > 0:
            time.sleep(1.5)
            return ""
        try:
            tpk.make_plan(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), group)
        except CommunicationError as error:
            return str(error)
    return "no error"


def test_the_error_says_that_every_rank_must_call_make_plan(ranks: Pools) -> None:
    said, _ = ranks(2).run(one_rank_plans)
    assert said.startswith("every rank must call tpk.make_plan with a mesh") and "rank 1" in said
