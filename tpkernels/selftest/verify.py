"""`tpkernels verify`: is a model, parallelized here, the model that it was? Outputs, loss, every gradient, by name.

Owns: the command line, the model that it names, and the local ranks. The model is built with small random weights, so
that nothing is downloaded and any configuration will do; `--layers` makes it short enough for a laptop.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "main", "verify_on_rank"]

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "fp64": "float64"}
RANK_TIMEOUT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a config.json, a folder with one, a name that transformers knows, or package.module:function for a "
        "function that returns a model, or a model and its inputs (a tensor, a tuple or a dict)",
    )
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="local ranks to start (default 2)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of weights and inputs (default fp32)")
    parser.add_argument("--layers", type=int, metavar="N", help="build a configuration with so many hidden layers")
    parser.add_argument("--train", action="store_true", help="in training mode (without dropout); default: evaluation")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    parser.add_argument(
        "--override", action="append", default=[], metavar="PATTERN=STYLE", help="for example *.lm_head=replicate"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was found to a file, too")


def main(options: argparse.Namespace) -> int:
    from tpkernels import config
    from tpkernels.launching.local_ranks import launch

    if options.layers is not None and options.layers < 1:
        raise ValueError(f"--layers must be at least 1, got {options.layers}")
    overrides = {}
    for item in options.override:
        pattern, separator, style = item.partition("=")
        if not separator:
            raise ValueError(f"--override takes PATTERN=STYLE, got {item!r}")
        overrides[pattern] = style
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
        model, inputs = _model(source, layers)
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


def _model(source: str, layers: int | None) -> tuple[Any, object]:
    """The model that the command line names, with weights, and inputs, if it has some."""
    import torch

    from tpkernels.verification.model_copies import randomise_

    module, separator, function = source.partition(":")
    torch.manual_seed(0)
    if not separator or "/" in module:
        from tpkernels.integrations.transformers import real_model

        model = real_model(source, layers=layers)
        randomise_(model)
        return model, None
    if layers is not None:
        raise ValueError("--layers is for configurations of transformers")
    sys.path.insert(0, "")  # as python -m does: a module in the current directory
    make = getattr(importlib.import_module(module), function, None)
    if make is None:
        raise ValueError(f"module {module!r} has no function {function!r}")
    made = make()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{source} returned a {type(model).__name__}, not a torch.nn.Module")
    return model, inputs


def _with_dtype(inputs: object, dtype: Any) -> object:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, inputs)
