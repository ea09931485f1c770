"""trl's SFTTrainer on a tensor-parallel model, with checkpoints that any number of ranks goes on from.

    torchrun --nproc-per-node 2 examples/trl_sft.py --folder run
    torchrun --nproc-per-node 4 examples/trl_sft.py --folder run --steps 20 --resume run/checkpoint-10

accelerate accepts tensor parallelism on GPUs only.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tpkernels as tpk
import tpkernels.integrations.transformers as tpk_transformers

WORDS = "<pad> <end> the a cat dog bird sees hears follows and sleeps".split()


def tokenizer() -> PreTrainedTokenizerFast:
    """One number for each word; yours comes from ``AutoTokenizer.from_pretrained``."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<pad>", pad_token="<pad>", eos_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", help="a checkpoint")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    mesh = tpk.init()
    torch.manual_seed(0)  # every rank builds the same model
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes))
    tpk_transformers.prepare(model, mesh)

    texts = [f"the {one} sees a {other} and sleeps" for one in WORDS[4:7] for other in WORDS[4:7]]
    trainer = SFTTrainer(
        model,
        SFTConfig(
            args.folder,
            max_steps=args.steps,
            save_steps=args.steps,
            save_only_model=True,  # the callback saves the rest
            logging_steps=1,
            learning_rate=1e-3,
            bf16=False,
            report_to=[],
            use_cpu=args.cpu,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[tpk_transformers.Snapshots(args.resume)],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    if mesh.get_rank() == 0:
        losses = [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry]
        print(f"losses {losses}")


if __name__ == "__main__":
    main()
