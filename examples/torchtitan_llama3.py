"""Llama 3 of torchtitan whose attention and feed-forward blocks run the ops of tpkernels.

torchrun --nproc-per-node 2 examples/torchtitan_llama3.py

torchtitan's own trainer takes it as an argument (docs/trainers.md). This is what it does with it, on batches made here:
`IMPORTS` and its use are ours. It needs a GPU, as torchtitan's attention does.
"""

from __future__ import annotations

import argparse

import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig, apply_overrides
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

IMPORTS = ["tpkernels.integrations.torchtitan.model"]


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
    parallelism = ParallelismConfig(tensor_parallel_degree=world, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()

    set_spmd_backend(parallelism.spmd_backend)
    spec = model_registry("debugmodel")
    config = spec.model
    config.layers = config.layers[: args.layers]
    set_llama3_sharding_config(config, enable_sp=True)
    apply_overrides(OverrideConfig(imports=IMPORTS), spec)

    torch.manual_seed(0)  # the same whole model on every rank, of which each then keeps its part
    model = config.build().to(device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="outputs",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    ids = torch.randint(2048, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    inputs, labels = ids[:, :-1], ids[:, 1:]
    positions = torch.arange(128, device=device).expand(2, 128)
    masks = model.get_attention_masks(positions)
    for step in range(args.steps):
        logits = model(inputs, positions=positions, attention_masks=masks)
        loss = cross_entropy_loss(logits, labels, global_vocab_size=2048) / labels.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
