"""What does it cost to cut a convolution by its channels?  Two ranks of one host, forward and backward.

    python benchmarks/convolutions.py --json benchmarks/results/FILE.json

The patch embedding of ViT-L/16 on images (whose gradient nobody wants), and the three convolutions of a bottleneck
block of ResNet-50 with ReLU between them, in fp32. "whole": every rank computes all channels, as before they were cut.
"channels": each computes its own, gathers, and sums the input's gradient. "alone": each computes its own channels of
every convolution, from a whole input that is there already, and sends nothing. Results of the first two are compared
before they are timed; all take turns in one run, one thread per rank and a core of its own for each.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.measure import report
from tpkernels.measure.timing import measure
from tpkernels.nn.convolution import cut_channels

CASES = ("patches of ViT-L/16, 4 images", "bottleneck of ResNet-50, 8 x 14 x 14")


def layers_of(case: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    if case == CASES[0]:
        return nn.Sequential(nn.Conv2d(3, 1024, 16, stride=16)), torch.randn(4, 3, 224, 224)
    block = nn.Sequential(
        nn.Conv2d(1024, 256, 1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 1024, 1)
    )
    return block, torch.randn(8, 1024, 14, 14).requires_grad_()


def steps(case: str) -> dict[str, Callable[[], list[Tensor]]]:
    whole, x = layers_of(case)
    channels, inputs = copy.deepcopy(whole), [x]
    for layer in channels:
        if isinstance(layer, nn.Conv2d):
            cut_channels(layer, dist.group.WORLD)
    with torch.no_grad():
        for layer in whole[:-1]:
            inputs.append(layer(inputs[-1]))
    upstream = torch.randn(whole(x).shape, generator=torch.Generator().manual_seed(1))
    alone = []
    for place, layer in enumerate(whole):
        if isinstance(layer, nn.Conv2d):
            own = copy.deepcopy(layer)
            own.weight, own.bias = (
                nn.Parameter(one.detach().chunk(2)[0].clone()) for one in (layer.weight, layer.bias)
            )
            start = inputs[place].detach().requires_grad_(place > 0 or x.requires_grad)
            with torch.no_grad():
                like = own(start)
            alone.append((own, start, torch.randn_like(like)))

    def step(net: nn.Module) -> list[Tensor]:
        for one in (x, *net.parameters()):
            one.grad = None
        y = net(x)
        y.backward(upstream)
        return [y.detach()] + ([x.grad] if x.requires_grad and x.grad is not None else [])

    def without() -> list[Tensor]:
        for own, start, dy in alone:
            for one in (start, *own.parameters()):
                one.grad = None
            own(start).backward(dy)
        return []

    return {"whole": lambda: step(whole), "channels": lambda: step(channels), "alone": without}


def run(case: str, repeats: int) -> dict[str, Any]:
    ways = steps(case)
    for one, other in zip(ways["whole"](), ways["channels"](), strict=True):
        off = float((one - other).abs().max() / (1 + other.abs().max()))
        assert off <= 1e-4, f"{case} differs by {off:.2e} of the largest"
    times = measure(ways, repeats=repeats, warmup=3)
    whole = layers_of(case)[0]
    return {
        "case": case,
        "weights_mb": 4 * sum(parameter.numel() for parameter in whole.parameters()) / 1e6,
        "times": {name: report.measurement_to_json(time) for name, time in times.items()},
    }


def ranked(repeats: int) -> list[dict[str, Any]]:
    """`launch` has given each rank a core of its own."""
    tpk.init(device="cpu")
    torch.set_num_threads(1)
    return [run(case, repeats) for case in CASES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = tpk.launch(ranked, 2, args.repeats)[0]
    print(f"{'case':<42}{'weights MB':>11}{'whole ms':>10}{'channels ms':>13}{'alone ms':>10}")
    for row in rows:
        each = [row["times"][name]["median_ms"] for name in ("whole", "channels", "alone")]
        print(f"{row['case']:<42}{row['weights_mb']:>11.1f}{each[0]:>10.2f}{each[1]:>13.2f}{each[2]:>10.2f}")
    if args.json:
        setup = {"world_size": 2, "threads": 1, "repeats": args.repeats}
        content = {**report.describe_environment(setup), "results": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
