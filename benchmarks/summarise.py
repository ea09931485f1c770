"""Turn result files into the tables of this README.md, the project's and docs/benchmarks.md: no number is typed there.

python benchmarks/summarise.py            print the tables
python benchmarks/summarise.py --write    put them between the markers of these three files
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
TILES = "usual tiles / fastest"  # what the set `tiles` of one_gpu.py measures
COLUMNS = ("gemm", "comm", "torch", "unfused", "chunked", "auto")


def overlap_section(path: Path, content: dict[str, Any]) -> list[str]:
    lines = [f"### Two hosts at {content['setup']['rate']}", "", *_origin(path, content), ""]
    lines += ["| | op, MxKxN | " + " | ".join(COLUMNS) + " | torch / fused | unfused / fused | overlap efficiency |"]
    lines += ["|---|---|" + "---:|" * (len(COLUMNS) + 3)]
    for summary, result in zip(content["summary"], content["results"], strict=True):
        times = [_milliseconds(result["times"].get(name)) for name in COLUMNS]
        efficiency = result["overlap_efficiency"]
        lines.append(
            f"| {summary['target']} | {result['op']} {result['shape_MxKxN']} | "
            + " | ".join(times)
            + f" | {summary['torch_over_fused']:.2f} | {summary['unfused_over_fused']:.2f} | "
            + ("-" if efficiency is None else f"{efficiency:.0%}")
            + " |"
        )
    lines += ["", "| | fused / roof | auto / roof | target | met | unfused / roof | torch / roof | comm / GEMM | n |"]
    lines += ["|---|---:|---:|---:|---|---:|---:|---:|---:|"]
    for row in content["summary"]:
        lines.append(
            f"| {row['target']} | {row['fused_over_roof']:.3f} | {row['auto_over_roof']:.3f} | {row['bound']:.2f} | "
            f"{'yes' if row['met'] else 'no'} | {row['unfused_over_roof']:.2f} | {row['torch_over_roof']:.2f} | "
            f"{row['comm_over_gemm']:.2f} | {row['n']} |"
        )
    return [*lines, ""]


def overhead_section(path: Path, content: dict[str, Any]) -> list[str]:
    lines = ["### Host overhead at world size 1 (P8)", "", *_origin(path, content), ""]
    lines += [
        "| op | MxKxN | mode | F.linear us | ours us | overhead us | target us |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in content["results"]:
        linear, ours = (row["times"][name]["median_ms"] * 1e3 for name in ("F.linear", "ours"))
        target = "" if row["target_us"] is None else f"<= {row['target_us']:g}"
        lines.append(
            f"| {row['op']} | {row['shape_MxKxN']} | {row['mode']} | {linear:.2f} | {ours:.2f} | "
            f"{row['overhead_us']:.2f} | {target} |"
        )
    return [*lines, ""]


def one_host_section(path: Path, content: dict[str, Any]) -> list[str]:
    lines = ["### Ranks of one host (P4, P5, P6)", "", *_origin(path, content), ""]
    lines += ["| | what | times, us | ratio | | target | met |", "|---|---|---|---|---:|---|---|"]
    for row in content["results"]:
        times = "<br>".join(
            f"{name} {1e3 * t['median_ms']:,.1f} ±{1e3 * t['interquartile_range_ms'] / 2:,.1f}"
            for name, t in row["times"].items()
        )
        for number, ratio in enumerate(row["ratios"]):
            head = f"| {row['target']} | {row['what']} | {times} " if number == 0 else "| | | "
            verdict = {True: "yes", False: "no", None: ""}[ratio["met"]]  # a ratio without a target is there to be seen
            lines.append(f"{head}| {ratio['ratio']} | {ratio['value']:.3f} | {ratio['target'] or ''} | {verdict} |")
    return [*lines, ""]


def never_slower_section(path: Path, content: dict[str, Any]) -> list[str]:
    lines = ["### Is auto ever slower? (P7, P9)", "", *_origin(path, next(iter(content.values()))), ""]
    lines += ["| | problems | auto / unfused: median | worst | slower beyond noise | P7 | within 3 % of the fastest | "]
    lines[-1] += "estimates within 15 % | P9 | n |"
    lines += ["|---|---:|---:|---:|---:|---|---:|---:|---|---:|"]
    for key, part in content.items():
        place, world = key.rsplit("-", 1)
        found, hosts = part["summary"], {"host": "one host", "netlab": f"hosts at {part['setup']['rate']}"}[place]
        lines.append(
            f"| {hosts}, {world} ranks | {found['problems']} | {found['median']:.3f} | {found['worst']:.3f} | "
            f"{found['slower_beyond_noise']} | {'met' if found['P7_met'] else 'missed'} | "
            f"{found['auto_is_fastest_or_within_3_percent']} | {found['estimates_within_15_percent']:.0%} | "
            f"{'met' if found['P9_met'] else 'missed'} | {part['setup']['repeats']} |"
        )
    slower = [row for part in content.values() for row in part["results"] if row["interval"][0] > 1.03]
    if slower:
        lines += ["", "Slower beyond noise:", ""]
    for row in slower:
        low, high = row["interval"]
        lines.append(
            f"- {row['place']}, {row['world_size']} ranks, {row['op']} {row['shape_MxKxN']}: "
            f"{row['auto_over_unfused']:.2f} [{low:.2f}, {high:.2f}], auto chose `{row['chosen']}`"
        )
    return [*lines, ""]


def norm_section(path: Path, content: dict[str, Any]) -> list[str]:
    setup = content["setup"]
    lines = ["### A residual and an RMS norm behind a row layer", "", *_origin(path, content), ""]
    lines += [f"{setup['world_size']} ranks of one host, {setup['threads']} thread each, n={setup['repeats']}.", ""]
    lines += ["| op | dtype | passes | rows | single ops us | one op us | speed-up (quartiles) |"]
    lines += ["|---|---|---|---:|---:|---:|---:|"]
    for row in content["results"]:
        single, one = (row["times"][name]["median_ms"] * 1e3 for name in ("single ops", "one op"))
        low, high = row["speedup_quartiles"]
        lines.append(
            f"| {row['op']} | {row['dtype']} | {row['passes']} | {row['rows']} | {single:.0f} | {one:.0f} | "
            f"{row['speedup']:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return [*lines, ""]


def widened_section(path: Path, content: dict[str, Any]) -> list[str]:
    setup = content["setup"]
    lines = ["### bf16 and fp16 multiplied in fp32, one core", "", *_origin(path, content), ""]
    lines += [
        f"Instruction sets of oneDNN: {setup['onednn_max_cpu_isa']}. Weights stay in the caches where they fit.",
        "",
    ]
    lines += ["| dtype | MxKxN | library us | widened us | speed-up (quartiles) | taken from rows | n |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for row in content["results"]:
        library, own = (row["times"][name]["median_ms"] * 1e3 for name in ("library", "widened"))
        low, high = row["speedup_quartiles"]
        mark = "~ " if row["noise"] else ""
        least = "never" if row["least_rows"] is None else row["least_rows"]
        lines.append(
            f"| {row['dtype']} | {row['shape_MxKxN']} | {library:.0f} | {own:.0f} | "
            f"{mark}{row['speedup']:.2f} ({low:.2f} to {high:.2f}) | {least} | {row['repeats']} |"
        )
    return [*lines, ""]


def experts_section(path: Path, content: dict[str, Any]) -> list[str]:
    """A layer of experts in both layouts: every way's time, and the fastest fused one against what a user has today."""
    ways = ("gemm", "comm", "torch", "transformers", "unfused", "chunked", "shared_memory", "auto")
    rate = content["setup"]["rate"]
    where = f"two hosts in the network lab at {rate}" if rate else "two ranks of one host"
    lines = [f"### Layers of experts, {where}", "", *_origin(path, content), ""]
    lines += [
        "| layer | layout | "
        + " | ".join(ways)
        + " | torch / auto | transformers / auto | unfused / auto | auto / roof | n |"
    ]
    lines += ["|---|---|" + "---:|" * (len(ways) + 5)]
    for result in content["results"]:
        for layout in result["summary"]:
            times = {way: result["times"].get(f"{layout} {way}") for way in ways}
            ms = {way: time["median_ms"] for way, time in times.items() if time is not None}
            roof = f"{ms['auto'] / max(ms['gemm'], ms['comm']):.2f}"
            theirs = f"{ms['transformers'] / ms['auto']:.2f}" if "transformers" in ms else "-"
            lines.append(
                f"| {result['layer']} / {result['divided']} | {layout} | "
                + " | ".join(_milliseconds(times[way]) for way in ways)
                + f" | {ms['torch'] / ms['auto']:.2f} | {theirs} | {ms['unfused'] / ms['auto']:.2f} | {roof} | "
                f"{len(times['auto']['samples_ms'])} |"  # type: ignore[index]
            )
    return [*lines, ""]


def decoding_section(path: Path, content: dict[str, Any]) -> list[str]:
    """Greedy decoding by each way, and the CPU time of a rank."""
    lines = ["### Decoding, two ranks of one host", "", *_origin(path, content), ""]
    lines += ["| model | way | ms per token (quartiles) | CPU ms of rank 0 | one / way | CPU: way / one | n |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for result in content["results"]:
        times, cpu = result["ms_per_token_quartiles"], result["cpu_ms_per_token_of_rank_0_quartiles"]
        model = f"{result['model']}, {result['parameters'] / 1e6:.0f} M"
        for way, (low, median, high) in times.items():
            lines.append(
                f"| {model} | {way} | {median:.1f} ({low:.1f} to {high:.1f}) | {cpu[way][1]:.1f} | "
                f"{times['one'][1] / median:.2f} | {cpu[way][1] / cpu['one'][1]:.2f} | {content['setup']['repeats']} |"
            )
    return [*lines, ""]


def values_section(path: Path, content: dict[str, Any]) -> list[str]:
    """Cells that passed, of those that there are, by mode and ranks; which models were not seen at all in a mode."""
    setup, rows = content["setup"], content["results"]
    lines = ["### Whole models against the unsharded one", "", *_origin(path, content), ""]
    lines += [f"Errors in units of the unsharded model's own; more than {setup['factor']:g} is wrong. Cells by ", ""]
    lines[-2] += "model, residual and dtype, each with the date and commit of its own run:"
    lines += ["| mode | ranks | passed | failed | of | models | of | worst | where |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---|"]
    for (mode, world), (cells, models) in _every_value(setup).items():
        mine = [row for row in rows if row["mode"] == mode and row["world"] == world]
        good = [row for row in mine if row["passed"]]
        worst = max(good, key=lambda row: row["worst"], default=None)
        where = "" if worst is None else f"{worst['name']}, {worst['dtype']}: {worst['where']}"
        seen = len({row["name"] for row in good})
        lines.append(
            f"| {mode} | {world} | {len(good)} | {len(mine) - len(good)} | {cells} | {seen} | "
            f"{models} | {'' if worst is None else format(worst['worst'], '.2f')} | {where} |"
        )
    return [*lines, ""]


def _every_value(setup: dict[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    """Cells and models by mode and number of ranks."""
    return {(mode, world): (cells, models) for mode, cells, models in setup["modes"] for world in setup["worlds"]}


def one_host_overview() -> str:
    """The table of docs/benchmarks.md: what ranks of one host pay."""
    lines = ["| CPU | problem | GEMM, us | torch, us | `shared_memory`, us | torch / ours | ours / GEMM |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for path in sorted(HERE.glob("results/*one-host*.json")):
        content = json.loads(path.read_text())
        for row in content["results"]:
            times = {name: 1e3 * t["median_ms"] for name, t in row["times"].items()}
            ours, torch = times["shared_memory"], times.get("torch", times.get("dtensor", 0.0))
            gemm = times.get("gemm")
            lines.append(
                f"| {_cpu(content)} | {row['what']} | {'' if gemm is None else f'{gemm:,.0f}'} | {torch:,.0f} | "
                f"{ours:,.0f} | {torch / ours:.2f}x | {'' if gemm is None else f'{ours / gemm:.2f}'} |"
            )
    return "\n".join(lines) + "\n"


def _cpu(content: dict[str, Any]) -> str:
    """Its name, and whether it has AMX."""
    hardware = content["hardware"]
    name = re.sub(r"\((R|TM)\)|Processor", "", hardware["cpu"]).strip()
    return f"{name}, AMX" if "amx_bf16" in hardware.get("isa", []) else name


def _origin(path: Path, content: dict[str, Any]) -> list[str]:
    hardware, versions = content["hardware"], content["versions"]
    load = hardware.get("load_average")
    return [
        f"`results/{path.name}`: {content['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores "
        f"({', '.join(hardware.get('isa', []))}), torch {versions['torch']}, Python {versions['python']}"
        + (f"; load average when written {load[0]}" if load else ""),
        f"`python benchmarks/{content['command'].removeprefix('benchmarks/')}`",
    ]


def same_bits_section(path: Path, content: dict[str, Any]) -> list[str]:
    """A layer's GEMMs, the block of P3 and a training step, with the mode and without."""
    rate, world = content["setup"].get("rate"), content["setup"]["world_size"]
    where = f"{world} hosts in the network lab at {rate}" if rate else f"{world} ranks of one host"
    lines = [f"### The same bits at any number of ranks: what they cost, {where}", "", *_origin(path, content), ""]
    lines += [
        "| dtype | what | rows x features x inner | off ms | on ms | on / off | quartiles | under a GEMM: off, on |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for row in content["results"]:
        low, high = row["ratio_quartiles"]
        off, on = (_milliseconds(row["times"][name]) for name in ("off", "on"))
        what, shares = row.get("what", "ops"), row.get("under_gemm")
        sizes = f"{row['rows']}x{row['width']}x{row['inner']}" if row["rows"] else "-"
        hidden = f"{shares['off']:.0%}, {shares['on']:.0%}" if shares else "-"
        lines.append(
            f"| {row['dtype']} | {what} | {sizes} | {off} | {on} | {row['ratio']:.2f} | {low:.2f} to {high:.2f} | "
            f"{hidden} |"
        )
    return [*lines, ""]


def one_gpu_section(path: Path, content: dict[str, Any]) -> list[str]:
    """A line for each figure of each target: of how many problems, from lowest to highest, and what was modelled."""
    gpu, sets = (", ".join(names) for names in (content["hardware"]["gpus"], content["setup"]["sets"]))
    origin = _origin(path, {**content, "command": content["command"].partition(" --out")[0]})
    versions = [f"CUDA {content['versions']['cuda']}", *(f"Triton {found}" for found in _triton(content))]
    lines = [f"### One GPU, {gpu}: {sets}", "", f"{origin[0]}; {', '.join(versions)}", *origin[1:], ""]
    lines += ["| | what | kind | problems | lowest | median | highest | target | met | modelled |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---|---:|---:|"]
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in (row for step in content["steps"] for row in step["rows"]):
        if row["target"] not in ("-", "smoke") or row["what"] == TILES:
            found.setdefault((row["target"], _figure(row), row["label"], row["bound"]), []).append(row)
    for (target, what, label, bound), rows in sorted(found.items()):
        values, modelled = sorted(row["value"] for row in rows), sorted(row["predicted"] for row in rows)
        met = f"{sum(bool(row['met']) for row in rows)} of {len(rows)}" if bound else ""
        figures = " | ".join(f"{value:.3f}" for value in (values[0], statistics.median(values), values[-1]))
        lines.append(
            f"| {target} | {what} | {label} | {len(rows)} | {figures} | {bound} | {met} | "
            f"{modelled[0]:.2f} to {modelled[-1]:.2f} |"
        )
    return [*lines, ""]


def _figure(row: dict[str, Any]) -> str:
    """What is measured, and of which op where that matters."""
    op = row["problem"].split(" ")[0]
    of_op = row["target"] in ("G1", "G2", "G3", "G5") or row["what"] == TILES
    return f"{op.replace('_', ' ')}: {row['what']}" if of_op else row["what"]


def _triton(content: dict[str, Any]) -> list[str]:
    """As the step `environment` has found it, if it ran."""
    return [str(step["facts"]["triton"]) for step in content["steps"] if "triton" in step["facts"]]


def _milliseconds(times: dict[str, Any] | None) -> str:
    return "-" if times is None else f"{times['median_ms']:.1f} ±{times['interquartile_range_ms'] / 2:.1f}"


def sections() -> str:
    lines: list[str] = []
    order = {
        "overlap": overlap_section,
        "one-host": one_host_section,
        "overhead": overhead_section,
        "never-slower": never_slower_section,
        "residual-norm": norm_section,
        "widened-gemm": widened_section,
        "experts": experts_section,
        "decoding": decoding_section,
        "values": values_section,
        "same-bits": same_bits_section,
        "one-gpu": one_gpu_section,
    }
    for kind, section in order.items():
        found = [(path, json.loads(path.read_text())) for path in HERE.glob(f"results/*{kind}*.json")]
        for path, content in sorted(found, key=lambda pair: -_rate(pair[1])):
            lines += section(path, content)
    return "\n".join(lines).rstrip() + "\n"


def overview() -> str:
    """The table of the project's README.md: what overlap leaves and what it gains, per link and problem."""
    found = [(path, json.loads(path.read_text())) for path in HERE.glob("results/*overlap*.json")]
    lines = ["| link | problem, MxKxN | torch ms | `chunked` ms | over torch | over `unfused` | of the roof |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for _, content in sorted(found, key=lambda pair: -_rate(pair[1])):
        for summary, result in zip(content["summary"], content["results"], strict=True):
            lines.append(
                f"| {content['setup']['rate']} | {result['op']} {result['shape_MxKxN']} | "
                f"{_milliseconds(result['times']['torch'])} | {_milliseconds(result['times']['chunked'])} | "
                f"{summary['torch_over_fused']:.2f}x | {summary['unfused_over_fused']:.2f}x | "
                f"{summary['fused_over_roof']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _rate(content: dict[str, Any]) -> float:
    match = re.fullmatch(r"([\d.]+)([mg])bit", str(content.get("setup", {}).get("rate", "")))
    return float(match[1]) * {"m": 1, "g": 1000}[match[2]] if match else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if not args.write:
        print(sections())
        return 0
    project = HERE.parent / "README.md"
    for readme, mark, tables in (
        (README, "results", sections()),
        (project, "results", overview()),
        (HERE.parent / "docs" / "benchmarks.md", "one host", one_host_overview()),
    ):
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, rest = readme.read_text(encoding="utf-8").split(begin)
        after = rest.split(end)[1]
        readme.write_text(f"{before}{begin}\n{tables}{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
