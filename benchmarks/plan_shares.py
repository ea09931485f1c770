"""How much of each architecture's body a plan cuts, and how much of it in pairs; no rank is started.

    python benchmarks/plan_shares.py [--only NAME,...] [--world 2] [--out FILE.json] [--again]

Every architecture is built small (tests/models/architectures/) and planned for ``--world`` ranks, without inputs and,
where those show more, with example inputs.  What a plan says of a parameter counts with the parameter's bytes in the
default configuration, which is built on the meta device (benchmarks/default_sizes.py): convolutions and tables of a
small model are larger than they are in a real one.  A row without such sizes says so, and is counted apart.  Models
without ``forward``, and those of which no call runs, do not count.  The body is all but output heads, tables, and
modules that no code calls (benchmarks/never_called.py).  Tables are ``nn.Embedding``, modules of another class that
look up their rows as it does, and parameters whose rows are looked up and added, which a run tells
(benchmarks/looked_up.py).  "In pairs" are columns and rows, linear layers or convolutions, that the data flow proves,
what stands between them, heads and experts: one sum serves a pair, where a layer by itself is gathered.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import tpkernels as tpk
from benchmarks import revision
from benchmarks.default_sizes import pattern, published_bytes
from benchmarks.looked_up import tables
from benchmarks.never_called import never_called
from tests.models.architectures.catalogue import architectures
from tests.models.architectures.inputs import calls
from tests.models.architectures.reference import CannotBuild, build, computing
from tpkernels.measure import report
from tpkernels.planning.entries.plan import NO_DATA_FLOW, Entry
from tpkernels.planning.modules.layers import layer_of
from tpkernels.planning.styles import Channels, Column, Features, Replicate, Row, Vocabulary

COMMON = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3 phi phi3 olmo olmo2 olmo3 cohere cohere2 "
    "stablelm falcon bloom mpt gpt2 gptj gpt_neox gpt_bigcode gpt_oss mixtral deepseek_v2 deepseek_v3 "
    "qwen3_moe t5 bart m2m_100 whisper bert roberta deberta-v2 vit dinov3_vit beit swin clip siglip llava "
    "qwen2_5_vl internvl paligemma blip-2 mamba mamba2 jamba falcon_h1 zamba2 nemotron_h lfm2 segformer "
).split()
"""Those that most people run."""

HEADS = frozenset("lm_head lm_heads codec_head codebooks_head char_head bpe_head wp_head".split())
"""What heads over a vocabulary are called in models whose ``get_output_embeddings`` does not name them: Bark, CSM's
depth decoder, MGP-STR, and the talkers of Qwen Omni."""


def in_pairs(entry: Entry) -> bool:
    style = entry.style
    if isinstance(style, Replicate | Vocabulary) or "not proven" in entry.reason:
        return False
    if isinstance(style, Channels):
        return style.paired
    if isinstance(style, Column | Features):
        return not style.gather_output
    return not (isinstance(style, Row) and style.split_input)


def is_table(module: nn.Module) -> bool:
    """torch's, or one of a class of its own that looks up its rows as torch's does (I-BERT)."""
    return isinstance(module, nn.Embedding) or getattr(layer_of(module), "kind", "") == "embedding"


def declared_heads(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that a model says may have the weight of an embedding (FSMT), whether they have it or not."""
    for module in model.modules():
        ties, within = getattr(module, "_tied_weights_keys", None), dict(module.named_modules())
        for pair in ties.items() if isinstance(ties, dict) else ():
            head, table = (within.get(name.rpartition(".")[0]) for name in pair)
            if isinstance(head, nn.Linear) and isinstance(table, nn.Embedding):
                yield head


def output_heads(model: nn.Module) -> set[int]:
    """The ids of output heads, and of what is in them: some models have a list, with a head for each codebook."""
    found = [one.get_output_embeddings() for one in model.modules() if hasattr(one, "get_output_embeddings")]
    found += declared_heads(model)
    found += [module for path, module in model.named_modules() if path.rpartition(".")[2] in HEADS]
    return {id(inner) for head in found if isinstance(head, nn.Module) for inner in head.modules()}


def shares(
    model: nn.Module,
    plan: tpk.ShardingPlan,
    sizes: Counter[str],
    looked_up: Collection[str],
    idle: Collection[str] = (),
) -> dict[str, Any]:
    """``looked_up``: parameters that are tables; ``idle``: modules that nothing calls."""
    heads = output_heads(model)
    heads |= {id(inner) for path in idle for inner in model.get_submodule(path).modules()}
    small: Counter[str] = Counter()
    for key, parameter in model.named_parameters():
        small[pattern(key)] += parameter.numel()
    total = cut = pairs = 0.0
    rest: Counter[str] = Counter()
    for entry in plan.entries:
        module = model.get_submodule(entry.path)
        if is_table(module) or id(module) in heads:
            continue
        for part in entry.parameters:
            full = f"{entry.path}.{part.name}" if entry.path else part.name
            if part.tied or full in looked_up:
                continue
            key = pattern(full)
            size = torch.Size(part.shape).numel() * (sizes[key] / small[key] if sizes[key] and small[key] else 1.0)
            total += size
            cut += size if part.dim is not None else 0
            pairs += size if part.dim is not None and in_pairs(entry) else 0
            if part.dim is None or not in_pairs(entry):
                where = f"{pattern(entry.path)}.{part.name}: {'whole' if part.dim is None else 'gathered'}"
                rest[f"{where}, {entry.reason}"] += size
    total = total or 1.0
    shown = [f"{100 * size / total:.0f} % {why[:230]}" for why, size in rest.most_common(5) if size > 0.01 * total]
    return {"cut": cut / total, "pairs": pairs / total, "rest": shown, "notes": list(plan.notes)}


def examine(name: str, world: int) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "world": world}
    try:
        model = build(name)
    except CannotBuild as error:
        return row | {"status": error.stage, "why": error.reason}
    if type(model).forward is nn.Module.forward:
        return row | {"status": "run", "why": "has no forward of its own"}
    try:
        sizes = published_bytes(name)
    except Exception as error:  # noqa: BLE001 - a default configuration can make a class raise anything
        sizes, row["small"] = Counter(), f"{type(error).__name__}: {str(error)[:80]}"
    with computing(torch.float32):
        looked_up = tables(build(name), calls(name, model))
    idle = list(never_called(model))
    row |= {"tables": sorted({pattern(one) for one in looked_up})} if looked_up else {}
    row |= {"never called": sorted({pattern(one) for one in idle})} if idle else {}
    best: dict[str, Any] = {}
    for kind, arguments in [("", None), *calls(name, model)]:
        if kind == "" or not best or best["pairs"] < 0.9:
            try:
                with computing(torch.float32):
                    plan = tpk.make_plan(model, world, example_inputs=arguments)
            except ValueError as error:
                row.setdefault("why", str(error)[:200])
                continue
            found = shares(model, plan, sizes, looked_up, idle) | {"inputs": kind}
            found["traced"] = not any(note.startswith(NO_DATA_FLOW) for note in plan.notes)
            if kind == "":
                row["without inputs"] = [found["cut"], found["pairs"], found["traced"]]
            if not best or found["pairs"] > best["pairs"] + 0.005:
                best = found
    if best and not best["traced"] and (why := why_not_run(model, name)):
        return {key: row[key] for key in ("name", "world")} | {"status": "run", "why": why}
    return row | best


def why_not_run(model: nn.Module, name: str) -> str:
    """Why no call of the unsharded model runs; empty if one does."""
    why = "there is nothing to call it with"
    for _, arguments in calls(name, model):
        try:
            with computing(torch.float32), torch.no_grad():
                model(**arguments)
        except Exception as error:  # noqa: BLE001 - a model can raise anything
            why = f"{type(error).__name__}: {str(error)[:120]}"
        else:
            return ""
    return why


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["results"]} if path.exists() else {}


def write(path: Path, about: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """In the order of transformers' list; a new file takes the place of the old one at once."""
    order = {name: index for index, name in enumerate(architectures())}
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join(
        "  " + json.dumps(row) for row in sorted(rows.values(), key=lambda row: order.get(row["name"], 0))
    )
    new = path.with_suffix(".new")
    new.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    new.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMMON), help='names, separated by commas, or "all" (default: 54)')
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", metavar="FILE", help="result file; rows it has are kept")
    parser.add_argument("--again", action="store_true", help="also rows that the file has")
    args = parser.parse_args()
    revision.commit()
    names = list(architectures()) if args.only == "all" else [name for name in args.only.split(",") if name]
    if strangers := [name for name in names if name not in architectures()]:
        parser.error(f"this transformers has no {', '.join(strangers)}")
    path = Path(args.out) if args.out else None
    rows = read(path) if path else {}
    about = report.describe_environment({"cores": os.cpu_count(), "world": args.world})
    about["versions"]["transformers"] = importlib.metadata.version("transformers")
    for name in names:
        if name in rows and not args.again:
            continue
        begun = time.monotonic()
        row = rows[name] = examine(name, args.world)
        row["seconds"] = round(time.monotonic() - begun, 1)
        row |= {"date": revision.now(), "commit": revision.commit()}
        if path:
            rows = read(path) | {name: row}
            write(path, about, rows)
        without = row.get("without inputs", [0, 0, False])
        found = f"cut {row['cut']:5.1%} pairs {row['pairs']:5.1%}" if "cut" in row else row.get("why", "")[:100]
        alone = f"{without[0]:.0%}, {without[1]:.0%}{'' if without[2] else ', untraced'}"
        print(
            f"{name:<24}{found}  (without inputs {alone}; {row.get('inputs') or '-'}; {row['seconds']} s)", flush=True
        )
        if "small" in row:
            print(f"    by the sizes of the small model: the default configuration cannot be built ({row['small']})")
        for line in row.get("rest", []):
            print(f"    {line}")
    told(rows.values())
    return 0


def told(rows: Iterable[dict[str, Any]]) -> None:
    """Counts of rows, apart for those that are weighed by the sizes of a small model."""
    done = [row for row in rows if "cut" in row]
    for some, by in (
        ([row for row in done if "small" not in row], "the default configuration"),
        ([row for row in done if "small" in row], "the small model, whose convolutions and tables count too much"),
    ):
        whole, paired = (sum(row[key] >= least for row in some) for key, least in (("cut", 0.95), ("pairs", 0.9)))
        if some:
            print(
                f"{len(some)} planned, by the sizes of {by}: {whole} with at least 95 % of the body cut, "
                f"{paired} with at least 90 % in pairs"
            )


if __name__ == "__main__":
    sys.exit(main())
