"""Ray Train: workers that share every layer, and go on from the last snapshot where one of them was lost.

    python examples/ray_train.py --workers 2 --folder /shared/run

`--folder` is on storage that all nodes share.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import tpkernels as tpk


def loop(config: dict[str, Any]) -> list[float]:
    """What each worker runs. Ray has made its process group; tpk.init() finds it."""
    mesh = tpk.init()
    torch.manual_seed(0)  # every worker builds the same model
    model = torch.nn.Sequential(torch.nn.Linear(16, 44), torch.nn.GELU(), torch.nn.Linear(44, 16)).to(mesh.device_type)
    tpk.parallelize(model, mesh, example_inputs=torch.zeros(4, 16, device=mesh.device_type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after parallelize

    folder = Path(config["folder"])
    last = max(folder.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
    losses = tpk.load_snapshot(model, optimizer, last)["losses"] if last else []
    for step in range(len(losses), config["steps"]):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(mesh.device_type)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        tpk.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        save(model, optimizer, folder, losses)
    return losses


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, losses: list[float]) -> None:
    """A folder gets its name once it is complete: a job that was killed while it saved leaves only a `saving`."""
    saving, first = folder / "saving", torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(saving, ignore_errors=True)
    torch.distributed.barrier()
    tpk.save_snapshot(model, optimizer, saving, extra={"losses": losses})  # on every worker
    if first:
        saving.rename(folder / f"step-{len(losses)}")
    torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", default="run", help="of snapshots, and of what Ray writes")
    parser.add_argument("--failures", type=int, default=2, help="how often the job begins anew when a worker is lost")
    args = parser.parse_args()

    folder = Path(args.folder).absolute()  # workers run elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "steps": args.steps},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(args.failures)),
    )
    print(f"losses {trainer.fit().return_value}")


if __name__ == "__main__":
    main()
