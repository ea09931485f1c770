"""Lightning's Trainer with a plan of tpkernels, which finds what to cut.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from tpkernels.integrations import lightning as tpk_lightning


class Module(lightning.LightningModule):
    def configure_model(self) -> None:
        """The model is made here, where Lightning has made its mesh."""
        if hasattr(self, "model"):  # Lightning may call this again
            return
        torch.manual_seed(0)  # every rank builds the same model
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        device = self.trainer.strategy.root_device  # not yet self.device
        self.model = torch.nn.Sequential(layer, torch.nn.Linear(64, 64)).to(device)
        example = torch.zeros(8, 12, 64, device=device)
        tpk_lightning.parallelize(example_inputs=example)(self.model, self.device_mesh)

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.model(x) - x.flip(1)).square().mean()
        if self.trainer.is_global_zero:
            print(f"step {index + 1}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", default="run", help="of checkpoints")
    args = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        num_nodes=ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks),
        max_epochs=1,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # the ranks of a replica train on the same batches
        callbacks=[ModelCheckpoint(args.folder, "last", every_n_train_steps=args.steps)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x = torch.randn(8, 12, 64, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(), torch.utils.data.DataLoader([x] * args.steps, batch_size=None))


if __name__ == "__main__":
    main()
