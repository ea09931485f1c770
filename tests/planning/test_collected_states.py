"""What code collects of blocks whose residual is cut along the sequence, and reads behind them, is a part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk

pytestmark = pytest.mark.cpu

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Collecting(nn.Module):
    """It reads what one of its blocks gave, as decoders of dense prediction do, or took."""

    def __init__(self, read: int) -> None:
        super().__init__()
        self.blocks, self.head, self.read = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        y: Tensor = self.head(states[self.read])
        return y


@pytest.mark.parametrize(("read", "cut"), [(-1, True), (0, True), (1, False), (2, False)])
def test_a_residual_is_cut_along_the_sequence_where_nobody_reads_it_between_blocks(read: int, cut: bool) -> None:
    plan = tpk.make_plan(Collecting(read), 2, sequence_parallel=True, example_inputs=torch.zeros(2, 6, WIDTH))
    assert plan["blocks.0.up"].style.sequence_parallel == cut
    assert cut or any("blocks is not cut along the sequence: head takes" in note for note in plan.notes)
