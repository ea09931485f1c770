"""A GPT of Megatron-Core whose layers, head and loss are those of tpkernels.

torchrun --nproc-per-node 2 examples/megatron_gpt.py

Three lines are ours: the import, `layer_spec` and `convert_output`. It needs a GPU, as Megatron does.
"""

from __future__ import annotations

import argparse

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import tpkernels.integrations.megatron as tpk_megatron


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(0)

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=4,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    spec = tpk_megatron.layer_spec(get_gpt_layer_local_spec())
    torch.manual_seed(0)  # every rank builds the same model
    model = tpk_megatron.convert_output(GPTModel(config, spec, vocab_size=128, max_sequence_length=32))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    ids = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(32, device=device).expand(2, 32)
    mask = torch.ones(1, 1, 32, 32, device=device).tril() < 0.5
    for step in range(args.steps):
        loss = model(ids, positions, mask, labels=ids).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
