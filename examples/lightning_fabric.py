"""Lightning Fabric with a plan of tpkernels, which finds what to cut.

torchrun --nproc-per-node 2 examples/lightning_fabric.py
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from tpkernels.integrations import lightning as tpk_lightning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    x = torch.randn(8, 12, 64, generator=torch.Generator().manual_seed(1))
    strategy = ModelParallelStrategy(
        tpk_lightning.parallelize(example_inputs=x), data_parallel_size=1, tensor_parallel_size=ranks
    )
    fabric = Fabric(accelerator="auto", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)  # every rank builds the same model
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(64, 64)).to(fabric.device)
    model, x = fabric.setup_module(model), x.to(fabric.device)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))  # after setup_module
    for step in range(args.steps):
        loss = (model(x) - x.flip(1)).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
