"""Llama 3 of torchtitan whose attention and feed-forward blocks run the ops of tpkernels.

torchrun --nproc-per-node 2 examples/torchtitan_llama3.py

torchtitan's own trainer takes one argument more (docs/trainers.md). This is what it does with it, without FSDP and on
batches made here: `IMPORTS` and its use are ours. It needs a GPU, as torchtitan's attention does.
"""

from __future__ import annotations

import argparse

import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

IMPORTS = ["tpkernels.integrations.torchtitan.attention", "tpkernels.integrations.torchtitan.feed_forward"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=world, pp=1, ep=1, world_size=world, spmd_backend="spmd_types"
    )
    dims.build_mesh()

    set_spmd_backend("spmd_types")
    config = model_registry("debugmodel").model
    config.layers = config.layers[: args.layers]
    set_llama3_sharding_config(config, enable_sp=True)
    apply_overrides(OverrideConfig(imports=IMPORTS), config)

    torch.manual_seed(0)  # the same whole model on every rank, of which each then keeps its part
    model = config.build().to(device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.parallelize(dims)
    # With sequence parallelism each rank has seen a part of the tokens; torchtitan's FSDP adds these gradients up.
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    ids = torch.randint(2048, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    positions = torch.arange(128, device=device).expand(2, 128)
    masks = model.get_attention_masks(positions)
    within = get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    for step in range(args.steps):
        with within():
            logits = model(inputs, positions=positions, attention_masks=masks)
            loss = cross_entropy_loss(logits, labels, global_vocab_size=2048) / labels.numel()
            loss.backward()
        for parameter in norms:
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
