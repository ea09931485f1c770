"""A sharding plan as a table: one line for modules that differ only in their place in a list, then totals."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tpkernels.planning.styles import Style, style_to_dict

if TYPE_CHECKING:
    from tpkernels.planning.plan import Entry, ShardingPlan

__all__ = ["table"]

COLUMNS = (
    "module", "class", "style", "full -> local", "dim", "forward", "backward", "bytes/step", "implementation", "reason",
)  # fmt: skip


def table(plan: ShardingPlan) -> str:
    """The whole text that ``print(plan)`` shows."""
    rows: dict[tuple[str, ...], list[tuple[str, Entry]]] = {}
    for entry in plan.entries:
        rows.setdefault((_pattern(entry.path), *_cells(entry)), []).append((entry.path, entry))
    lines: list[tuple[str, ...]] = [COLUMNS]
    for (pattern, *cells), entries in rows.items():
        names = [name for name, _ in entries]
        lines.append((_name(pattern, names), *cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS) - 1)]
    rule = "  ".join("-" * width for width in [*widths, len(COLUMNS[-1])])
    text = ["  ".join([*map(str.ljust, line[:-1], widths), line[-1]]).rstrip() for line in lines]
    return "\n".join([text[0], rule, *text[1:], rule, *_totals(plan)])


def _cells(entry: Entry) -> tuple[str, ...]:
    cuts = entry.parameters
    main = cuts[0] if cuts else None
    shapes, dims = "-", "-"
    if main is not None:
        shapes = f"{_shape(main.shape)} -> {_shape(main.local_shapes[0])}"
        last = main.local_shapes[-1]
        shapes += f" .. {_shape(last)}" if last != main.local_shapes[0] else ""
        dims = "-" if main.dim is None else str(main.dim)
    wire = "?" if entry.wire_bytes is None else _bytes(entry.wire_bytes) if entry.wire_bytes else "-"
    reason = f"{entry.source}: {entry.reason}"
    if entry.aliases:
        reason += f" (also {', '.join(entry.aliases)})"
    if any(cut.tied for cut in cuts):
        reason += " (tied)"
    style = _style(entry.style)
    return entry.kind, style, shapes, dims, entry.forward, entry.backward, wire, entry.implementation, reason


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "{}", path)


def _name(pattern: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    numbers = [re.findall(r"(?:^|(?<=\.))\d+(?=\.|$)", name) for name in names]
    filled = pattern
    for column in zip(*numbers, strict=True):
        distinct = sorted({int(number) for number in column})
        run = distinct == list(range(distinct[0], distinct[-1] + 1))
        short = f"[{distinct[0]}-{distinct[-1]}]" if run else f"[{','.join(map(str, distinct))}]"
        filled = filled.replace("{}", str(distinct[0]) if len(distinct) == 1 else short, 1)
    return f"{filled} (x{len(names)})"


def _style(style: Style) -> str:
    options = style_to_dict(style)
    name = str(options.pop("style"))
    for option, value in options.items():
        if option == "segments":
            name += f" {'|'.join(map(str, value))}"
        elif option == "units":
            name += f" units={'|'.join(map(str, value))}"
        else:
            name += f" {option}" if value is True else f" {option}={value}"
    return name


def _totals(plan: ShardingPlan) -> list[str]:
    replicated = [entry for entry in plan.entries if entry.parameters and all(c.dim is None for c in entry.parameters)]
    held = plan.bytes_per_rank
    ranks = _bytes(held[0]) if len(set(held)) == 1 else "/".join(map(_bytes, held))
    lines = [
        f"{plan.model} over {plan.world_size} ranks, sequence parallel {'on' if plan.sequence_parallel else 'off'}",
        f"parameters per rank: {ranks} of {_bytes(plan.full_bytes)}, of which {_bytes(plan.replicated_bytes)} "
        f"replicated ({len(replicated)} modules)",
        f"sent per rank in one step{' of ' if plan.example else ''}{plan.example}: {_sent(plan)}"
        + (f", of which {_bytes(plan.residual_bytes)} to make the residual whole" if plan.residual_bytes else ""),
    ]
    for key, (number, locals_) in plan.attributes.items():
        each = "/".join(map(str, locals_ if len(set(locals_)) > 1 else locals_[:1]))
        lines.append(f"attribute {key}: {number} -> {each}")
    if plan.random:
        lines.append(f"dropout differs by rank between: {', '.join(f'{a} .. {b}' for a, b in plan.random)}")
    lines += [f"with its sum, {row} computes {norm}" for row, norm in _pairs(plan)]
    lines += [f"no norm is fused with {line}" for line in plan.unfused]
    return lines + [f"note: {note}" for note in plan.notes]


def _pairs(plan: ShardingPlan) -> list[tuple[str, str]]:
    """Fused rows and norms, one line for those that differ only in their place in a list.

    A norm of the next block goes with the rows of this one, so rows alone are put together.
    """
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row, norm, _ in plan.fused:
        rows.setdefault((_pattern(row), _pattern(norm)), []).append((row, norm))
    return [
        (_name(row, [name for name, _ in pairs]), _name(norm, list(dict.fromkeys(name for _, name in pairs))))
        for (row, norm), pairs in rows.items()
    ]


def _sent(plan: ShardingPlan) -> str:
    """The bytes that are known; a sum that lacks some says so."""
    unknown = sum(entry.wire_bytes is None for entry in plan.entries)
    if not unknown:
        return _bytes(plan.wire_bytes)
    known = f"{_bytes(plan.wire_bytes)} and what " if plan.wire_bytes else "? (what "
    return (
        f"{known}{unknown} modules send, whose rows are not known{'' if plan.wire_bytes else ')'}; pass example_inputs"
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
