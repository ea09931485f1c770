"""`tpkernels verify`: is a model, parallelized here, the model that it was? Outputs, loss, every gradient, by name.

Owns: the command line, the model that it names, and the local ranks. The model is built with small random weights, so
that nothing is downloaded and any configuration will do; `--layers` makes it short enough for a laptop.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpkernels import flags
from tpkernels.integrations import named_models

__all__ = ["add_arguments", "main", "verify_on_rank"]

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}
RANK_TIMEOUT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=named_models.source, metavar="MODEL",
        help=f"{named_models.HELP}, or a model and its inputs (a tensor, a tuple or a dict)",
    )  # fmt: skip
    flags.add_tp(parser, 2, "local ranks to start (default 2); under torchrun those that it has started")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="fp32", help="dtype of weights and inputs (default fp32)"
    )
    parser.add_argument(
        "--layers", type=flags.at_least(1), metavar="N", help="build a configuration with so many hidden layers"
    )
    parser.add_argument(
        "--train", action="store_true", help="run in training mode, without dropout (default: evaluation)"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    flags.add_override(parser)
    flags.add_json(parser, "write what was found to a file, too")


def main(options: argparse.Namespace) -> int:
    from tpkernels import config
    from tpkernels.launching.local_ranks import launch

    overrides = dict(options.override)
    question = (
        options.model, DTYPES[options.dtype], options.layers, options.train, options.sequence_parallel, overrides,
    )  # fmt: skip
    job = config.job_environment()
    if job is None:
        ok, text, found = launch(verify_on_rank, options.tp, *question, timeout=RANK_TIMEOUT_S)[0]
    else:
        ok, text, found = verify_on_rank(*question)
    if job is None or job.rank == 0:
        print(text)
        if options.json:
            Path(options.json).write_text(found, encoding="utf-8")
    return 0 if ok else 1


def verify_on_rank(
    source: str,
    dtype_name: str,
    layers: int | None,
    train: bool,
    sequence_parallel: bool,
    overrides: Mapping[str, object],
) -> tuple[bool, str, str]:
    """One rank's part; public because ranks import it. Whether all is right, and what was found as text and JSON."""
    import torch
    import torch.distributed as dist

    import tpkernels as tpk

    mesh = tpk.init()
    try:
        torch.manual_seed(0)
        model, inputs = named_models.real_model(source, layers)
        model = model.to(getattr(torch, dtype_name)).train(train)
        if mesh.device_type == "cuda":
            model.cuda()
        plan = tpk.make_plan(
            model, mesh, sequence_parallel=sequence_parallel, overrides=overrides, example_inputs=inputs
        )
        found = tpk.verify(model, mesh, _with_dtype(inputs, getattr(torch, dtype_name)), plan=plan)
        return found.ok, f"{found}\n({found.seconds:.1f} s)", found.to_json()
    finally:
        dist.destroy_process_group()


def _with_dtype(inputs: object, dtype: Any) -> object:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, inputs)
