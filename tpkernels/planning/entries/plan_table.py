"""A sharding plan as text of at most 100 columns: a table, what its notes say, totals.

A row stands for modules that differ only in their place in a list.  What a module sends, and why it is cut as it is,
stands in a note below the table, each text once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tpkernels.planning.style_names import style_to_dict
from tpkernels.planning.styles import Style

if TYPE_CHECKING:
    from tpkernels.planning.entries.plan import Entry, ShardingPlan

__all__ = ["WIDTH", "table"]

WIDTH = 100
COLUMNS = ("module", "style", "full -> local", "bytes/step", "note")
MOST = {"style": 24, "full -> local": 31}
"""Widths above which a cell takes several lines; of the module's, what the others leave."""


def table(plan: ShardingPlan) -> str:
    """The whole text that ``print(plan)`` shows."""
    implementations = _implementations(plan)
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for entry in plan.entries:
        text = _note(entry, with_implementation=len(implementations) > 1)
        note = str(notes.setdefault(text, len(notes) + 1))
        rows.setdefault((_pattern(entry.path), *_cells(entry), note), []).append(entry.path)
    lines = [(_name(pattern, names), *cells) for (pattern, *cells), names in rows.items()]
    totals = _totals(plan)
    if len(implementations) == 1:
        totals.append(f"implementation: {implementations[0]}")
    return "\n".join([
        *_aligned([COLUMNS, *lines]),
        *(line for text, number in notes.items() for line in _prose(f"{number}. {text}")),
        "",
        *(line for text in totals for line in _prose(text)),
    ])  # fmt: skip


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """The header, a rule, the other rows and a rule; cells that are too long take several lines."""
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [min(size, MOST.get(name, size)) for size, name in zip(longest, COLUMNS, strict=True)]
    widths[0] = min(longest[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    cells = [[_wrapped(text, width) for text, width in zip(row, widths, strict=True)] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    text = []
    for row in cells:
        for number in range(max(map(len, row))):
            parts = [cell[number] if number < len(cell) else "" for cell in row]
            text.append("  ".join(map(str.ljust, parts, widths)).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return [text[0], rule, *text[1:], rule]


def _wrapped(text: str, width: int, ends: str = " .|", indent: int = 2) -> list[str]:
    """Lines that end behind one of these characters; what follows the first is indented."""
    lines = [""]
    for piece in re.split(f"(?<=[{ends}])", text):
        if lines[-1].strip() and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append(" " * indent)
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _prose(text: str) -> list[str]:
    return _wrapped(text, WIDTH, " ", indent=3)


def _cells(entry: Entry) -> tuple[str, ...]:
    main = entry.parameters[0] if entry.parameters else None
    shapes = "-"
    if main is not None:
        shapes = f"{_shape(main.shape)} -> {_shape(main.local_shapes[0])}"
        last = main.local_shapes[-1]
        shapes += f" .. {_shape(last)}" if last != main.local_shapes[0] else ""
    wire = "?" if entry.wire_bytes is None else _bytes(entry.wire_bytes) if entry.wire_bytes else "-"
    return _style(entry.style), shapes, wire


def _note(entry: Entry, with_implementation: bool) -> str:
    """What a module sends, and why it is cut, or not."""
    sends = [
        f"{when}: {what}" for when, what in (("forward", entry.forward), ("backward", entry.backward)) if what != "-"
    ]
    if entry.forward == entry.backward != "-":
        sends = [entry.forward]
    if with_implementation and entry.implementation != "-":
        sends.append(f"implementation: {entry.implementation}")
    reason = f"{entry.source}: {entry.reason}"
    if entry.aliases:
        reason += f" (also {', '.join(entry.aliases)})"
    if any(cut.tied for cut in entry.parameters):
        reason += " (tied)"
    return ". ".join([*(["; ".join(sends)] if sends else []), reason])


def _implementations(plan: ShardingPlan) -> list[str]:
    return list(dict.fromkeys(entry.implementation for entry in plan.entries if entry.implementation != "-"))


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
    held = [_bytes(number) for number in sorted(plan.bytes_per_rank)]
    ranks = held[0] if held[0] == held[-1] else f"{held[0]} to {held[-1]}"
    lines = [
        f"{plan.model} over {plan.world_size} ranks, sequence parallel {'on' if plan.sequence_parallel else 'off'}",
        f"parameters per rank: {ranks} of {_bytes(plan.full_bytes)}, of which {_bytes(plan.replicated_bytes)} "
        f"replicated ({len(replicated)} modules)",
        f"sent per rank in one step{' of ' if plan.example else ''}{plan.example}: {_sent(plan)}"
        + (f", of which {_bytes(plan.residual_bytes)} to make the residual whole" if plan.residual_bytes else ""),
    ]
    lines += [f"attribute {line}" for line in _attributes(plan)]
    lines += [f"argument {line}" for line in _arguments(plan)]
    if plan.argument_bytes:
        lines.append(f"gradients of these arguments are gathered, which sends {_bytes(plan.argument_bytes)}")
    if plan.gathered:
        lines.append(f"gathered: {', '.join(_gathered(plan))}, which sends {_bytes(plan.gathered_bytes)}")
    if plan.summed_arguments:
        names = [name for name, _ in _pairs([(name, name) for name in plan.summed_arguments])]
        sent = _bytes(plan.summed_bytes)
        lines.append(f"gradients summed where whole tensors meet parts: of {', '.join(names)}, which sends {sent}")
    lines += [f"kept {line}" for line in _kept(plan)]
    lines += [f"called where {line}" for line in _by_weight(plan)]
    if plan.products:
        lines.append(f"products with parts: {', '.join(_products(plan))}, which sends {_bytes(plan.product_bytes)}")
    if plan.states:
        lines.append(f"states: {', '.join(_states(plan))}, which sends {_bytes(plan.state_bytes)}")
    if plan.statistics:
        sent = _bytes(plan.statistic_bytes)
        lines.append(f"sums, means and spreads over all ranks: of {', '.join(_statistics(plan))}, which sends {sent}")
    if plan.maxima:
        names = [name for name, _ in _pairs([(name, name) for name in plan.maxima])]
        sent = "" if plan.statistics else f", which sends {_bytes(plan.statistic_bytes)}"  # else it is said of both
        lines.append(f"largest and smallest elements over all ranks: in {', '.join(names)}{sent}")
    if plan.cut_results:
        lines.append(f"{len(plan.cut_results)} of the results are gathered, which sends {_bytes(plan.result_bytes)}")
    if plan.draws_from:
        lines.append(f"random numbers of {' and '.join(plan.draws_from)}: all ranks draw the same")
    if plan.random:
        pairs = [f"{row} and {norm}" for row, norm in _pairs(plan.random)]
        lines.append(f"dropout differs by rank between: {', '.join(pairs)}")
    if plan.whole_draws:
        names = [name for name, _ in _pairs([(name, name) for name in plan.whole_draws])]
        lines.append(f"but is the same in: {', '.join(names)}")
    lines += [f"the sum of {row} is one op with {norm}" for row, norm in _pairs([fused[:2] for fused in plan.fused])]
    lines += [f"no norm is fused with {line}" for line in plan.unfused]
    return lines + [f"note: {note}" for note in plan.notes]


def _attributes(plan: ShardingPlan) -> list[str]:
    """One line for attributes that differ only in their place in a list."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, (number, locals_) in plan.attributes.items():
        each = "/".join(map(str, locals_ if len(set(locals_)) > 1 else locals_[:1]))
        found.setdefault((_pattern(key), f"{number} -> {each}"), []).append(key)
    return [f"{_name(pattern, keys)}: {values}" for (pattern, values), keys in found.items()]


def _arguments(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, int], list[str]] = {}
    for key, (_, heads) in plan.arguments.items():
        found.setdefault((_pattern(key), heads), []).append(key)
    return [f"{_name(pattern, keys)}: this rank's of {heads} heads" for (pattern, heads), keys in found.items()]


def _gathered(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, int], list[str]] = {}
    for key, (features, _) in plan.gathered.items():
        found.setdefault((_pattern(key), features), []).append(key)
    return [f"all {features} features for {_name(pattern, keys)}" for (pattern, features), keys in found.items()]


def _kept(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, int], list[str]] = {}
    for key, (_, size) in plan.kept.items():
        found.setdefault((_pattern(key), size), []).append(key)
    return [f"{_name(pattern, keys)}: this rank's of {size}" for (pattern, size), keys in found.items()]


def _states(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, int], list[str]] = {}
    for key, (_, size) in plan.states.items():
        found.setdefault((_pattern(key), size), []).append(key)
    return [f"this rank's of {size} in {_name(pattern, keys)}" for (pattern, size), keys in found.items()]


def _by_weight(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, layers in plan.by_weight.items():
        prefix = f"{module}." if module else ""
        found.setdefault((_pattern(module), ", ".join(name.removeprefix(prefix) for name in layers)), []).append(module)
    return [
        f"{_name(pattern, modules) or plan.model} multiplies by the weight: {layers}"
        for (pattern, layers), modules in found.items()
    ]


def _products(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, names in plan.products.items():
        found.setdefault((_pattern(module), ", ".join(names)), []).append(module)
    return [f"{names} of {_name(pattern, modules) or plan.model}" for (pattern, names), modules in found.items()]


def _statistics(plan: ShardingPlan) -> list[str]:
    """As for attributes."""
    found: dict[tuple[str, int], list[str]] = {}
    for module, (features, _) in plan.statistics.items():
        found.setdefault((_pattern(module), features), []).append(module)
    return [
        f"{features} features in {_name(pattern, modules) or plan.model}"
        for (pattern, features), modules in found.items()
    ]


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of modules, one for those whose first differ only in their place in a list, and their second as well.

    The second may be in the next block (a norm that is fused with a row), so each of the two is named by itself.
    """
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for first, second in pairs:
        rows.setdefault((_pattern(first), _pattern(second)), []).append((first, second))
    return [
        (_name(first, [name for name, _ in found]), _name(second, list(dict.fromkeys(name for _, name in found))))
        for (first, second), found in rows.items()
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
