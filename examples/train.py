"""Train a small model with tensor parallelism, replicas and snapshots.

    torchrun --nproc-per-node 2 examples/train.py
    torchrun --nproc-per-node 4 examples/train.py --tp 2 --folder snapshots --save-every 10

The same program runs under `srun` and `mpirun`; `python examples/train.py` is a job of one rank.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F

import tpkernels as tpk


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, width)
        block = torch.nn.TransformerEncoderLayer
        self.blocks = torch.nn.ModuleList(
            block(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, replica: int, args: argparse.Namespace) -> torch.Tensor:
    """What a data loader would give: seeded by the step and the replica, so that the ranks of a replica agree."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(args.vocabulary, (args.batch, args.length), generator=generator)


def last_snapshot(folder: Path) -> Path | None:
    """A folder gets its name once it is complete: a job that was killed while it saved leaves only a `saving`."""
    return max(folder.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    saving = folder / "saving"
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(saving, ignore_errors=True)
    torch.distributed.barrier()
    tpk.save_snapshot(model, optimizer, saving, extra={"step": step})  # on every rank
    if torch.distributed.get_rank() == 0:
        saving.rename(folder / f"step-{step}")
    torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, help="ranks that share every layer (default: all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a replica")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="of snapshots, each in step-N; training goes on from the last")
    parser.add_argument("--save-every", type=int, help="steps between two snapshots (default: one, at the end)")
    args = parser.parse_args()

    mesh = tpk.init(tp=args.tp)
    torch.manual_seed(0)  # every rank builds the same model
    model = Model(args.vocabulary, args.width, args.layers).to(mesh.device_type)
    tpk.parallelize(model, mesh, example_inputs=torch.zeros(args.batch, args.length, dtype=torch.long))
    tpk.data_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after parallelize

    first = 0
    if args.folder is not None and (found := last_snapshot(args.folder)) is not None:
        first = tpk.load_snapshot(model, optimizer, found)["step"]
    for step in range(first, args.steps):
        ids = batch(step, mesh.get_local_rank("dp"), args).to(mesh.device_type)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        norm = tpk.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}", flush=True)
        due = step + 1 == args.steps or (args.save_every and (step + 1) % args.save_every == 0)
        if args.folder is not None and due:
            save(model, optimizer, args.folder, step + 1)


if __name__ == "__main__":
    main()
