"""accelerate in a loop of one's own, whose state any number of ranks loads, or accelerate alone.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --folder run
    torchrun --nproc-per-node 4 examples/accelerate_loop.py --folder run --resume run/state

accelerate accepts tensor parallelism of several ranks on GPUs only.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, ParallelismConfig
from transformers import GPT2Config, GPT2LMHeadModel

import tpkernels as tpk
import tpkernels.integrations.accelerate as tpk_accelerate
import tpkernels.integrations.transformers as tpk_transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", help="what save_state wrote")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    mesh = tpk.init()
    accelerator = Accelerator(
        cpu=args.cpu,
        parallelism_config=ParallelismConfig(tp_size=mesh["tp"].size()),
        step_scheduler_with_optimizer=False,  # accelerate would step the scheduler once for each rank
    )
    tpk_accelerate.save_whole(accelerator)  # before prepare
    torch.manual_seed(0)  # every rank builds the same model
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32))
    tpk_transformers.prepare(model.to(accelerator.device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after prepare
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if args.resume is not None:
        accelerator.load_state(args.resume)

    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1)).to(accelerator.device)
    for step in range(args.steps):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    accelerator.save_state(f"{args.folder}/state")  # on every rank; the folder is that of one process


if __name__ == "__main__":
    main()
