"""transformers' Trainer on a tensor-parallel model, with checkpoints that any number of ranks goes on from.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --folder run
    torchrun --nproc-per-node 4 examples/transformers_trainer.py --folder run --steps 20 --resume run/checkpoint-10

accelerate accepts tensor parallelism on GPUs only.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tpkernels as tpk
import tpkernels.integrations.transformers as tpk_transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    mesh = tpk.init()
    torch.manual_seed(0)  # every rank builds the same model
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32))
    tpk_transformers.prepare(model, mesh)  # instead of transformers' own tp_plan, which GPT-2 has not

    rows = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        model,
        TrainingArguments(
            args.folder,
            max_steps=args.steps,
            save_steps=args.steps,
            save_only_model=True,  # the callback saves the rest
            logging_steps=1,
            report_to=[],
            use_cpu=args.cpu,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[tpk_transformers.Snapshots(args.resume)],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    if mesh.get_rank() == 0:
        losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
        print(f"losses {losses}")


if __name__ == "__main__":
    main()
