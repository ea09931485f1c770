"""Does a model decode faster on two ranks of one host?  Greedy `generate` of transformers, one row, bf16.

    python benchmarks/decoding.py --json benchmarks/results/FILE.json
    python benchmarks/decoding.py --model mixtral --tokens 8 --repeats 3

The ways take turns in one run, one rank per core, one thread each:

one             the unsharded model on rank 0, while rank 1 waits
transformers    `from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`: its own `tp_plan`, over gloo
ours            `tpk.parallelize(model)`

A sample is one `generate` of a prompt of 8 tokens: the time of the slower rank and the CPU time of each rank (all its
threads), both divided by the number of new tokens. Before anything is timed, the logits of every step of both sharded
ways are held against the unsharded model in fp64, along its tokens: the error (root mean square) is at most twice
that of the unsharded model in bf16.
Targets: "ours" at least as fast as "transformers", and its CPU time of a rank at most 0.6 of "one"; the small Mixtral
at least 1.5 times as fast as "one".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig
from transformers.distributed import DistributedConfig

import tpkernels as tpk
from tpkernels.comm import gloo_threads
from tpkernels.measure import report

WORLD, PROMPT, VOCABULARY = 2, 8, 32000
WAYS = ("one", "transformers", "ours")


def llama() -> PretrainedConfig:
    """113 million parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2176, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip


def mixtral() -> PretrainedConfig:
    """Layers of Mixtral-8x7B with hidden size and features divided by four; four of them."""
    return MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
    )  # fmt: skip


MODELS: dict[str, Callable[[], PretrainedConfig]] = {"llama-113m": llama, "mixtral": mixtral}


@dataclass
class Sample:
    seconds: float
    cpu_seconds: list[float]
    """Of each rank."""


def generate(model: Any, tokens: int, **options: Any) -> Any:
    ids = torch.arange(PROMPT)[None] * 97 % VOCABULARY
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip


def logits(model: Any, ids: Tensor) -> Tensor:
    """Of the last token of every step: [steps, vocabulary], with a cache as `generate` has it."""
    rows, cache = [], None
    with torch.no_grad():
        for step in range(PROMPT, ids.shape[1]):
            given = ids[:, :step] if cache is None else ids[:, step - 1 : step]
            said = model(given, past_key_values=cache, use_cache=True)
            rows.append(said.logits[0, -1].double())
            cache = said.past_key_values
    return torch.stack(rows)


def models(folder: str) -> dict[str, Any]:
    """Each way's model, from one checkpoint."""
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.arange(2 * PROMPT).view(2, PROMPT)
    mesh = tpk.init(device="cpu")
    plan = tpk.make_plan(ours, mesh, example_inputs={"input_ids": ids})
    return {
        "one": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(),
        "transformers": AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=WORLD)
        ).eval(),
        "ours": tpk.parallelize(ours, mesh, plan),
    }


def verify(found: dict[str, Any], folder: str, tokens: int) -> None:
    # `F.grouped_mm`, the default of experts, takes no fp64.
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    ids = generate(exact, tokens)
    expected = logits(exact, ids)
    error = {way: float((logits(model, ids) - expected).square().mean().sqrt()) for way, model in found.items()}
    for way in WAYS[1:]:
        assert error[way] <= 2 * error["one"], f"{way}: logits are off by {error[way]:.3g}, bf16 by {error['one']:.3g}"


def sample(way: str, model: Any, tokens: int) -> Sample:
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    if way == "transformers":
        with gloo_threads.as_torch_made_them():
            generate(model, tokens)
    elif way == "ours" or dist.get_rank() == 0:
        generate(model, tokens)
    mine = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64) / tokens
    rows = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(rows, mine)
    return Sample(max(float(row[0]) for row in rows), [float(row[1]) for row in rows])


def run_rank(names: list[str], tokens: int, repeats: int, folder: str) -> list[dict[str, Any]]:
    own_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    tpk.init(device="cpu", timeout=300)  # starts gloo's threads, which may use all cores
    os.sched_setaffinity(0, own_core)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated")
    return [run_model(name, tokens, repeats, os.path.join(folder, name)) for name in names]


def run_model(name: str, tokens: int, repeats: int, folder: str) -> dict[str, Any]:
    found = models(folder)
    verify(found, folder, tokens)
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    for turn in range(1 + repeats):
        for way in WAYS:
            taken = sample(way, found[way], tokens)
            if turn:  # the first warms up
                samples[way].append(taken)
    times = {way: quartiles([one.seconds for one in taken]) for way, taken in samples.items()}
    cpu = {way: quartiles([one.cpu_seconds[0] for one in taken]) for way, taken in samples.items()}

    def over(one: str, other: str, of: dict[str, list[float]] = times) -> float:
        return of[one][1] / of[other][1]

    return {
        "model": name, "parameters": sum(p.numel() for p in found["one"].parameters()), "tokens": tokens,
        "ms_per_token_quartiles": times, "cpu_ms_per_token_of_rank_0_quartiles": cpu,
        "transformers_over_ours": over("transformers", "ours"), "one_over_ours": over("one", "ours"),
        "cpu_of_ours_over_one": over("ours", "one", cpu),
        "cpu_of_transformers_over_one": over("transformers", "one", cpu),
    }  # fmt: skip


def quartiles(seconds: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile, in ms."""
    return [1e3 * value for value in statistics.quantiles(seconds, n=4, method="inclusive")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="repeatable; default: all")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.repeats < 2 or args.tokens < 1:
        parser.error("--repeats must be at least 2, of which quartiles are taken, and --tokens at least 1")
    names = args.model or list(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16)
            model.save_pretrained(os.path.join(folder, name))
        results = tpk.launch(run_rank, WORLD, names, args.tokens, args.repeats, folder, timeout=1800)[0]
    for result in results:
        print(f"{result['model']}, {result['parameters'] / 1e6:.0f} M parameters, bf16, ms per token (quartiles)")
        for way in WAYS:
            low, median, high = result["ms_per_token_quartiles"][way]
            cpu = result["cpu_ms_per_token_of_rank_0_quartiles"][way][1]
            print(f"  {way:<13} {median:7.2f} ({low:.2f} to {high:.2f})   CPU of rank 0: {cpu:.2f}")
        over = {name: result[name] for name in ("transformers_over_ours", "one_over_ours", "cpu_of_ours_over_one")}
        print("  " + ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in over.items()))
    if args.json:
        setup = {"world_size": WORLD, "threads_per_rank": 1, "repeats": args.repeats, "dtype": "bf16"}
        content = {**report.describe_environment(setup), "results": results}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
