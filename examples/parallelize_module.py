"""torch's parallelize_module with the layers of tpkernels, and a residual that is cut along the sequence.

torchrun --nproc-per-node 2 examples/parallelize_module.py
"""

from __future__ import annotations

import argparse

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import tpkernels as tpk
from tpkernels.integrations.styles import ColumnParallel, Replicated, RowParallel, SequenceParallel


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    mesh = tpk.init()
    torch.manual_seed(0)  # every rank builds the same model
    model = torch.nn.Sequential(torch.nn.Linear(16, args.width), Block(args.width), torch.nn.Linear(args.width, 16))
    cut = Shard(1)  # of [batch, sequence, features]
    plan = {
        "0": RowParallel(input_layouts=Shard(-1), output_layouts=cut, use_local_output=False),
        "1.norm": SequenceParallel(),
        "1.up": ColumnParallel(input_layouts=cut),  # gathers behind its GEMM
        "1.down": RowParallel(output_layouts=cut, use_local_output=False),  # scatters behind its GEMM
        "2": ColumnParallel(input_layouts=cut, output_layouts=Shard(-1)),
        "": Replicated(),  # last: what is left becomes DTensors, too
    }
    parallelize_module(model.to(mesh.device_type), mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after parallelize_module

    x = torch.randn(4, 8, 16).to(mesh.device_type)
    target = x.flip(1).chunk(mesh["tp"].size(), -1)[mesh["tp"].get_local_rank()]  # this rank's features
    own = x.chunk(mesh["tp"].size(), -1)[mesh["tp"].get_local_rank()]
    for step in range(args.steps):
        loss = (model(own) - target).square().sum() / x.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = tpk.all_reduce(loss.detach().view(1, 1), mesh["tp"]).item()
        if mesh.get_rank() == 0:
            print(f"step {step + 1}: loss {total:.4f}")


if __name__ == "__main__":
    main()
