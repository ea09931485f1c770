"""What a compiled GEMM executes per step along K and per tile: counted in its machine code, on the cheapest way around.

A *step* is the cheapest way from the first tensor-core instruction of the loop back to it; a *tile* is the cheapest
way that passes the stores of the result, less one step. What is outside of both (a wait, a failure, rows that end with
their chunk) is not counted.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_CONDITION = re.compile(r"^!?U?P\d")

# What is counted: (name, which instructions).
_COUNTED = {
    "mmas": re.compile(r"^(?:H|Q|B|I|UTC\w*|D)?[GHQ]?MMA"),
    "barriers": re.compile(r"^(?:BAR|WARPGROUP\.DEPBAR)"),
    "loads": re.compile(r"^(?:UTMALDG|LDGSTS)"),
    "stores": re.compile(r"^(?:UTMASTG|STG\.E\.(?:\w+\.)*128)"),
    "mbarriers": re.compile(r"^SYNCS\.(?:EXCH|CCTL)"),
}


@dataclass
class Block:
    instructions: list[str] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        found = Counter(instructions=len(self.instructions))
        for name, pattern in _COUNTED.items():
            found[name] += sum(pattern.search(one) is not None for one in self.instructions)
        return found


def disassemble(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True, timeout=60).stdout


def blocks(text: str) -> list[Block]:
    """Basic blocks in their order, with the places of those that follow each."""
    found, labels, jumps = [Block()], {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            found[-1].next.append(len(found))
            labels[label.group(1)] = len(found)
            found.append(Block())
        elif read := _LINE.match(line):
            predicate, operation, operands = read.groups()
            found[-1].instructions.append(operation)
            target = _TARGET.search(operands)
            ends = operation.startswith(("EXIT", "RET"))
            if operation.startswith(("BRA", "CALL")) and target is not None:  # the assembler jumps with calls, too
                if ".ANY" not in operation:  # goes on with other threads of a warp: not another turn
                    jumps.append((len(found) - 1, target.group(1)))
                ends = operation == "BRA" and _CONDITION.match(operands) is None
            elif not ends:
                continue
            if not ends or predicate is not None:
                found[-1].next.append(len(found))
            found.append(Block())
    for place, name in jumps:
        found[place].next.append(labels[name])
    return found


def _cheapest(graph: list[Block], start: int, ends: set[int]) -> list[int] | None:
    """Places from `start` to one of `ends`, without the last; at least one step."""
    best: dict[int, int] = {}
    waiting: list[tuple[int, int, list[int]]] = [(0, start, [])]
    while waiting:
        cost, place, path = heapq.heappop(waiting)
        if path and place in ends:
            return path
        if best.get(place, cost + 1) <= cost:
            continue
        if path:
            best[place] = cost
        for after in graph[place].next:
            heapq.heappush(waiting, (cost + len(graph[place].instructions), after, [*path, place]))
    return None


def work(text: str) -> dict[str, dict[str, int]]:
    """What is counted of a step, and of a tile."""
    graph = blocks(text)
    counted = [block.counts() for block in graph]

    def total(path: list[int]) -> Counter[str]:
        return sum((counted[place] for place in path), Counter())

    turns = []
    for start, counts in enumerate(counted):
        if counts["mmas"] and (around := _cheapest(graph, start, {start})) is not None:
            turns.append((total(around)["instructions"], start, around))
    if not turns:
        raise ValueError("there is no loop with tensor-core instructions")
    _, start, around = min(turns)
    step = total(around)
    stores = {place for place, counts in enumerate(counted) if counts["stores"] and _cheapest(graph, place, {start})}
    described = {place for place in stores if any("UTMASTG" in one for one in graph[place].instructions)}
    ways = []
    for place in described or stores:
        there, back = _cheapest(graph, start, {place}), _cheapest(graph, place, {start})
        if there is not None and back is not None:
            ways.append(total(there) + total(back))
    if not ways:
        raise ValueError("the loop stores nothing")
    tile = min(ways, key=lambda way: way["instructions"])
    names = ("instructions", *_COUNTED)
    return {"step": {name: step[name] for name in names}, "tile": {name: tile[name] - step[name] for name in names}}
