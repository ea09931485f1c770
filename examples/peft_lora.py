"""LoRA of PEFT on a tensor-parallel model: adapters that load anywhere, and the merged model.

torchrun --nproc-per-node 2 examples/peft_lora.py --folder run
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import tpkernels as tpk
import tpkernels.integrations.transformers as tpk_transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    mesh = tpk.init()
    torch.manual_seed(0)  # every rank builds the same model
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(mesh.device_type)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]))
    tpk_transformers.prepare(adapted, mesh)  # after the adapters were added
    optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], lr=1e-2)

    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1)).to(mesh.device_type)
    for step in range(args.steps):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        tpk.clip_grad_norm_([x for x in adapted.parameters() if x.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    adapted.save_pretrained(f"{args.folder}/adapter")  # on every rank; the files are whole
    adapted.merge_and_unload().save_pretrained(f"{args.folder}/merged")


if __name__ == "__main__":
    main()
