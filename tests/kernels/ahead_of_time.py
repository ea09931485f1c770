"""Compiles the kernels for GPUs that are not here, and reads what the assembler says of them.

A program of its own: Triton must not be in interpreter mode, and mutants are packages of another name.

    python -m tests.kernels.ahead_of_time [--full] [--ptx DIR] > report.json
    python -m tests.kernels.ahead_of_time --only gather-sm_90-... --packages mutant_1
    python -m tests.kernels.ahead_of_time --packages mutant_1=gather-sm_90-... mutant_2=probe
    python -m tests.kernels.ahead_of_time --write       all variants; what this Triton gives comes into resources.json

The report maps each package and variant to its registers, shared memory, stack and local memory in bytes, to what its
loop executes (sass.py), to its stores by width, and to the violations of the two lints.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.index_lint import narrow_products
from tests.kernels.ptx_lint import lint
from tests.kernels.sass import disassemble, work
from tpkernels.kernels.config import STORED_COLUMNS
from tpkernels.kernels.tiles import GATED

TABLE = Path(__file__).with_name("resources.json")
SHAPE = {"m": 8192, "n": 3584, "k": 4096, "world_size": 8}
COLUMNS = (
    "registers per thread", "bytes of shared memory", "instructions per step", "barriers per step",
    "instructions more per tile", "barriers more per tile", "loads more per tile",
    "mbarriers set up or taken down per tile",
)  # fmt: skip
POINTER = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}


@triton.jit
def probe_kernel(x, out, signal, value, ANNOUNCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores of all threads, then a signal; nothing in between whose barriers could stand in for a missing one."""
    places = tl.arange(0, 1024)
    tl.store(out + places, tl.load(x + places) * 2)
    ANNOUNCE(signal, value)


def compile_probe(package: str) -> Any:
    announce = importlib.import_module(f"{package}.signals").announce
    signature = {"x": "*fp32", "out": "*fp32", "signal": "*i32", "value": "i32", "ANNOUNCE": "constexpr"}
    source = ASTSource(fn=probe_kernel, signature=signature, constexprs={"ANNOUNCE": announce})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def probe(package: str) -> list[str]:
    found = lint(compile_probe(package).asm["ptx"], waits=False, announces=True, descriptors=False)
    return [sentence for sentence in found if "counted" not in sentence]


@dataclass(frozen=True)
class Variant:
    """One specialisation, at the configuration that config.py gives for a typical shape."""

    kernel: str  # "gather", "scatter"; or "experts", grouped, which gathers, or with top_k sums a token's rows
    capability: int
    dtype: str = "bfloat16"
    activation: str = "none"
    scale: str = "none"
    bias: bool = False
    preactivation: bool = False
    addend: bool = False
    staging: str = "fp32"
    pads: bool = False  # signals go to peers
    pointers: bool = False  # operands that do not fit descriptors
    even_k: bool = True
    transposed: bool = False  # the weight is contiguous along N
    m: int = SHAPE["m"]
    loop: str = ""  # another than that of the configuration
    top_k: int = 0
    sampled: bool = True  # part of the run without --full

    @property
    def name(self) -> str:
        told = [self.kernel, f"sm_{self.capability}", self.dtype]
        told += [value for value in (self.activation, self.scale) if value != "none"]
        told += [f"top_{self.top_k}"] if self.top_k else []
        told += [
            key for key in ("bias", "preactivation", "addend", "transposed", "pointers", "pads") if getattr(self, key)
        ]
        if self.kernel == "scatter" or self.top_k:
            told.append(f"staging_{self.staging}")
        told += [self.loop] if self.loop else []
        return "-".join([*told, *([] if self.even_k else ["odd_k"]), *([] if self.m == SHAPE["m"] else [f"m{self.m}"])])


def variants() -> list[Variant]:
    found = []
    for capability in (80, 90, 100):
        gather, scatter = Variant("gather", capability), Variant("scatter", capability)
        found += [
            replace(gather, activation="gelu", bias=True, sampled=capability > 80),
            replace(scatter, sampled=capability < 100),
            replace(gather, activation="swiglu", bias=True, sampled=False),
            replace(gather, activation="swiglu", preactivation=True, sampled=False),
            replace(gather, activation="geglu", bias=True, preactivation=True, sampled=False),
            replace(gather, even_k=False, pointers=True, bias=True, sampled=capability == 80),
            replace(gather, activation="gelu_tanh", bias=True, preactivation=True, sampled=False),
            replace(gather, dtype="float16", activation="silu", sampled=False),
            replace(gather, dtype="float32", activation="relu", bias=True, sampled=False),
            replace(gather, activation="gelu", bias=True, loop="nested", sampled=capability == 90),
            replace(scatter, loop="nested", sampled=False),
            replace(gather, m=8, bias=True, sampled=False),
            replace(gather, m=256, bias=True, sampled=False),
            replace(scatter, transposed=True, pointers=True, addend=True, sampled=False),
            replace(scatter, transposed=True, staging="bf16", sampled=False),
            replace(gather, transposed=True, sampled=False),
            replace(scatter, staging="bf16", pads=True, sampled=False),
            replace(scatter, dtype="float32", sampled=False),
            replace(scatter, m=8, sampled=False),
        ]
        experts = Variant("experts", capability)
        found += [
            replace(experts, activation="swiglu", bias=True, sampled=capability == 90),
            replace(experts, activation="clamped_swiglu", preactivation=True, bias=True, sampled=False),
            replace(experts, top_k=8, staging="bf16", sampled=capability == 90),
            replace(experts, transposed=True, sampled=False),
            replace(experts, top_k=2, staging="bf16", transposed=True, addend=True, sampled=False),
            replace(experts, dtype="float32", even_k=False, sampled=False),
            replace(experts, top_k=8, staging="bf16", m=32, sampled=False),
        ]
        if capability >= 90:
            found += [
                replace(gather, dtype="float8_e4m3fn", scale="row", bias=True, sampled=capability == 90),
                replace(gather, dtype="float8_e4m3fn", scale="tensor", activation="swiglu", sampled=False),
                replace(gather, activation="swiglu", pointers=True, preactivation=True, sampled=False),
                replace(gather, activation="swiglu", transposed=True, sampled=False),
                replace(gather, pointers=True, bias=True, sampled=False),
                replace(gather, activation="swiglu", bias=True, loop="flat", sampled=capability == 90),
                replace(scatter, dtype="float8_e4m3fn", scale="row", sampled=False),
                replace(experts, dtype="float8_e4m3fn", scale="row", activation="swiglu", bias=True, sampled=False),
                replace(experts, dtype="float8_e4m3fn", scale="row", top_k=8, staging="bf16", sampled=False),
            ]
    return found


def configuration(variant: Variant, package: str) -> Any:
    configs = importlib.import_module(f"{package}.config")
    common: dict[str, Any] = {
        "capability": variant.capability, "num_sms": {80: 108, 100: 148}.get(variant.capability, 132),
        "dtype": variant.dtype, "dual": variant.activation in GATED, "moved_row_bytes": 2 * SHAPE["k"],
        **{name: SHAPE[name] for name in ("n", "k", "world_size")},
    }  # fmt: skip
    if variant.kernel == "experts":  # of 8, each with as many rows as a dense GEMM of this shape
        return configs.configure_grouped(tokens=4 * variant.m, top_k=2, experts=8, **common)
    return configs.configure(m=variant.m, pointers=variant.pointers, **common)


def compile_variant(variant: Variant, package: str) -> tuple[Any, Any]:
    """The compiled kernel, and its configuration."""
    config = configuration(variant, package)
    narrow = not config.descriptors and (variant.transposed or not variant.even_k)
    config = replace(config, loop="nested" if narrow else variant.loop or config.loop)  # as `operands.loop_of` has it
    element = POINTER[variant.dtype]
    staging = {"fp32": triton.language.float32, "bf16": triton.language.bfloat16}[variant.staging]
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "EVEN_K": variant.even_k,
        "DESCRIPTORS": config.descriptors,
        "TRANSPOSED": config.descriptors and variant.transposed,
        "PRECISION": config.precision,
        "SCALE": variant.scale,
        "LOOP": config.loop,
    }

    def matrix(rows: int, transposed: bool = False) -> str:
        box = (config.block_k, rows) if transposed else (rows, config.block_k)
        return f"tensordesc<{element}[{box[0]}, {box[1]}]>" if config.descriptors else f"*{element}"

    types = {name: "i32" for name in ("num_row_tiles", "n", "k", "op")} | {"group": "*i64", "order": "*i32"}
    scaled = variant.scale != "none"
    out = "bf16" if element == "fp8e4nv" else element
    if variant.kernel == "experts":
        kernel = importlib.import_module(f"{package}.grouped_matmul").grouped_matmul_kernel
        dual, sums = variant.activation in GATED, variant.top_k > 0
        pointers = {
            "x": True, "weight": True, "weight_up": dual, "out": True, "preactivation": variant.preactivation,
            "preactivation_up": variant.preactivation and dual, "bias": variant.bias, "bias_up": variant.bias and dual,
            "addend": variant.addend, "token_addend": sums and variant.addend,
        }  # fmt: skip
        of = {name: element if name in ("x", "weight", "weight_up") else out for name in pointers}
        types |= {name: f"*{of[name]}" if given else None for name, given in pointers.items()}
        scales = {"scale_x": scaled, "scale_weight": scaled, "scale_weight_up": scaled and dual}
        types |= {name: "*fp32" if given else None for name, given in scales.items()}
        types |= {name: "*i32" if sums else None for name in ("chunks", "counters", "rows_of_tokens")}
        types |= {name: "*i64" if sums else None for name in ("staging", "flags")}
        types |= {"tokens": None if sums else "*i32", "row_weights": "*fp32" if sums else None, "signals": "*i32"}
        strides = ("x", "we", "wn", "wk", "out", "staging", "scale")
        types |= {"num_slots": "i32", **{f"stride_{name}": "i32" for name in strides}}
        constants = {name: constants[name] for name in constants if name in kernel.arg_names}
        constants |= {
            "ACTIVATION": variant.activation, "TOP_K": variant.top_k, "STAGING_DTYPE": staging if sums else None
        }  # fmt: skip
    elif variant.kernel == "gather":
        kernel = importlib.import_module(f"{package}.all_gather_matmul").all_gather_matmul_kernel
        dual = variant.activation in GATED
        described = f"tensordesc<{out}[{config.block_m}, {min(STORED_COLUMNS, config.block_n)}]>"
        types |= {
            "whole": matrix(config.block_m),
            "weight": matrix(config.block_n, variant.transposed),
            "weight_up": matrix(config.block_n, variant.transposed) if dual else None,
            "out": f"*{out}",
            "out_descriptor": described if config.descriptors and config.loop == "flat" else None,
            "preactivation": f"*{out}" if variant.preactivation else None,
            "preactivation_up": f"*{out}" if variant.preactivation and dual else None,
            "bias": f"*{out}" if variant.bias else None,
            "bias_up": f"*{out}" if variant.bias and dual else None,
            "scale_whole": "*fp32" if scaled else None,
            "scale_weight": "*fp32" if scaled else None,
            "scale_weight_up": "*fp32" if scaled and dual else None,
            "signals": "*i32",
            "stride_whole": "i32",
            "stride_wn": "i32",
            "stride_wk": "i32",
            "stride_out": "i32",
            "stride_scale": "i32",
        }
        constants |= {
            "ACTIVATION": variant.activation,
            "HAS_BIAS": variant.bias,
            "KEEP_PREACTIVATION": variant.preactivation,
        }
    else:
        kernel = importlib.import_module(f"{package}.matmul_reduce_scatter").matmul_reduce_scatter_kernel
        types |= {
            "x": matrix(config.block_m),
            "weight": matrix(config.block_n, variant.transposed),
            "addend": "*fp32" if variant.addend else None,
            "scale_x": "*fp32" if scaled else None,
            "scale_weight": "*fp32" if scaled else None,
            "staging": "*i64",
            "signals": "*i64",
            "counters": "*i32",
            "stride_x": "i32",
            "stride_wn": "i32",
            "stride_wk": "i32",
            "stride_addend": "i32",
            "addend_rows": "i32",
            "stride_staging": "i32",
            "stride_scale": "i32",
        }
        signal = triton.language.int64 if variant.pads else triton.language.int32
        constants |= {"STAGING": staging, "SIGNAL": signal, "ADDENDS": int(variant.addend)}
    constants["stride_wn" if variant.transposed else "stride_wk"] = 1  # as the launcher specialises them
    constants |= {name: None for name, kind in types.items() if kind is None}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    plain = {"num_row_tiles", "op", *(() if variant.even_k else ("k",))}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and not kind.startswith("tensordesc") and name not in plain
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": 255}
    return triton.compile(source, target=GPUTarget("cuda", variant.capability, 32), options=options), config


def resources(compiled: Any) -> dict[str, int]:
    """What the assembler gave the kernel, from the cubin itself."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", told)
    assert match, told
    registers, stack, _, local = map(int, match.groups())
    return {"registers": registers, "shared": int(compiled.metadata.shared), "stack": stack, "local": local}


def in_table(row: dict[str, Any]) -> list[int]:
    """What resources.json keeps of a row of the report, by COLUMNS; float32 has no tensor-core loop to count."""
    kept = [row["registers"], row["shared"]]
    if row["work"] is not None:
        step, tile = row["work"]["step"], row["work"]["tile"]
        kept += [step["instructions"], step["barriers"], tile["instructions"], tile["barriers"], tile["loads"]]
        kept += [tile["mbarriers"]]
    return kept


def write_table(kept: dict[str, list[int]]) -> None:
    """Put the rows of this Triton into resources.json, in the place of those that it had; one line for each variant."""
    versions: dict[str, Any] = json.loads(TABLE.read_text())["kernels"] | {triton.__version__: kept}
    tables = []
    for version, kernels in sorted(versions.items()):
        rows = ",\n".join(f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in kernels.items())
        tables.append(f'  "{version}": {{\n{rows}\n  }}')
    every = ",\n".join(tables)
    TABLE.write_text(f'{{\n "columns": {json.dumps(COLUMNS)},\n "kernels": {{\n{every}\n }}\n}}\n')


def report(variant: Variant, package: str, ptx_folder: Path | None) -> dict[str, Any]:
    compiled, config = compile_variant(variant, package)
    ptx = compiled.asm["ptx"]
    if ptx_folder is not None:
        (ptx_folder / f"{variant.name}.ptx").write_text(ptx)
    announces = variant.kernel == "scatter" or variant.top_k > 0
    return {
        **resources(compiled),
        "loop": config.loop,
        "work": work(disassemble(compiled.asm["cubin"])) if variant.dtype != "float32" else None,
        "lint": lint(ptx, waits=not announces, announces=announces, descriptors=config.descriptors)
        + narrow_products(compiled.asm["ttir"]),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4", ptx)),
        "narrow_stores": len(re.findall(r"st\.global\.b(?:16|32|64)? ", ptx)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every variant, not the sample")
    parser.add_argument(
        "--packages", nargs="*", default=["tpkernels.kernels"], help="the kernels, or mutants; =VARIANT: only that"
    )
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--ptx", type=Path, help="folder for the PTX")
    parser.add_argument("--write", action="store_true", help="regenerate resources.json")
    options = parser.parse_args()
    chosen = [v for v in variants() if v.sampled or options.full or options.write or options.only]
    chosen = [v for v in chosen if not options.only or v.name in options.only]
    found: dict[str, dict[str, Any]] = {}
    probes: dict[str, list[str]] = {}
    for given in options.packages:
        package, _, only = given.partition("=")
        probes[package] = probe(package)
        found[package] = {v.name: report(v, package, options.ptx) for v in chosen if not only}
        found[package] |= {v.name: report(v, package, options.ptx) for v in variants() if v.name == only}
    if options.write:
        write_table({name: in_table(row) for name, row in found["tpkernels.kernels"].items()})
    json.dump({"triton": triton.__version__, "packages": found, "probes": probes}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
