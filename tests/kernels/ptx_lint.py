"""A lint of generated PTX: what the memory ordering of `tpkernels/kernels/signals.py` needs, proved on every path.

The instructions become a graph of basic blocks; three facts are carried along its edges until nothing changes:

    stored      data was stored and no barrier came since: a release here would not cover the other threads' stores
    unshared    a signal was acquired and no barrier came since: a load here could be a thread's that did not acquire
    unfenced    the same at system scope, and no proxy fence came since: a descriptor load here is not ordered after it

A loop that is pipelined loads for the next tile before it is done with this one, and then an order of instructions in
the source says nothing. So each place in the gathered rows (the kernel's first argument) from which a load into shared
memory is made is followed back through the registers: what comes out of memory, as a tile's row does, must pass
`signals.behind`, and that must depend on something.

Inline assembly of the compiler has labels of its own, without `$L`; those loops touch none of this and are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

RELEASE = re.compile(r"\b(?:atom|red|st)\.\S*(?:release|acq_rel)")
SYSTEM_RELEASE = re.compile(r"\bst\.release\.sys\.")
ACQUIRE = re.compile(r"\b(?:atom|ld)\.\S*(?:acquire|acq_rel)")
POLL = re.compile(r"\b(?:atom\.\S*\.sys\.\S*add|ld\.\S*\.sys\b)")  # Triton makes a load of adding zero
COUNT = re.compile(r"\batom\.(?=\S*\.add)\S*acq_rel")
BARRIER = re.compile(r"\b(?:bar|barrier)\.sync")
STORE = re.compile(r"\bst\.(?:global|volatile|relaxed)|cp\.async\.bulk\.\S*global\.shared")
LOAD = re.compile(r"\bld\.global\.(?!sys)|\bcp\.async\.c[ag]|\bcp\.async\.bulk\.tensor\.\S*shared\S*\.global")
DESCRIPTOR_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.\S*shared\S*\.global")
PROXY_FENCE = re.compile(r"\bfence\.proxy\.async(?:\.global)?;")
LABEL = re.compile(r"^(\$L\w+):")
BRANCH = re.compile(r"^(@!?%\w+ )?bra(?:\.uni)?\s+(\$L\w+);")
END = re.compile(r"^(ret|exit);")

BEHIND = re.compile(r"^mov\.b32 (%r\d+), (%r\d+); // behind (%r\d+)")
COPY = re.compile(r"\bcp\.async\.(?:c[ag]\.shared\.global \[[^]]*\], \[(?P<place>[^]]*)\]|"
                  r"bulk\.tensor\.\S*shared\S*\.global\S* \[[^]]*\], \[(?P<described>[^]]*)\])")  # fmt: skip
REGISTER = re.compile(r"%\w+")

Facts = frozenset[str]


@dataclass
class Block:
    code: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    entered_with: set[str] = field(default_factory=set)


def blocks(ptx: str) -> dict[str, Block]:
    """Basic blocks by name, the entry first."""
    found = {"entry": Block()}
    current, open_end = found["entry"], True
    for number, raw in enumerate(ptx.splitlines()):
        line = raw.strip()
        label, branch = LABEL.match(line), BRANCH.match(line)
        if not line or line.startswith(("//", ".")) or line.startswith("$L__tmp"):
            continue
        if label is not None or branch is not None:
            name = label.group(1) if label is not None else f"after line {number + 1}"
            if label is not None and open_end:
                current.next.append(name)
            if branch is not None:
                current.next.append(branch.group(2))
                open_end = branch.group(1) is not None
                if open_end:
                    current.next.append(name)
            else:
                open_end = True
            current = found[name] = Block()
        else:
            current.code.append(line)
            if END.match(line):
                open_end = False
    return found


def step(line: str, facts: Facts) -> Facts:
    if STORE.search(line):
        facts |= {"stored"}
    if ACQUIRE.search(line):
        facts |= {"unshared", "unfenced"} if ".sys." in line else {"unshared"}
    if BARRIER.search(line):
        facts -= {"stored", "unshared"}
    if PROXY_FENCE.search(line):
        facts -= {"unfenced"}
    return facts


def lint(ptx: str, *, waits: bool, announces: bool, descriptors: bool) -> list[str]:
    """Violations, as sentences. `waits`, `announces`, `descriptors` say what the kernel is made to do."""
    graph = blocks(ptx)
    code = [line for block in graph.values() for line in block.code]
    found = []
    polls = [line for line in code if POLL.search(line)] if waits else []
    if waits and not polls:
        found.append("nothing is waited for at system scope")
    found += [f"a wait does not acquire: {line}" for line in polls if not ACQUIRE.search(line)]
    if announces and not any(SYSTEM_RELEASE.search(line) for line in code):
        found.append("nothing is announced with release semantics at system scope")
    if announces and not any(COUNT.search(line) for line in code):
        found.append("a CTA's tile is not counted with acquire and release semantics")
    if descriptors and not any(DESCRIPTOR_LOAD.search(line) for line in code):
        found.append("no descriptor load in a kernel made for them")
    if waits:
        found += _places_behind_no_wait(code)
    return found + sorted(_violations(graph))


def _places_behind_no_wait(code: list[str]) -> list[str]:
    sources = _sources(code)
    found, gathered = [], 0
    copies = [(line, copy) for line in code if (copy := COPY.search(line))]
    for line, copy in copies:
        passed = _traced(REGISTER.findall(copy.group("place") or copy.group("described")), sources)
        if not any("_param_0" in one for one in passed):
            continue  # a weight's
        gathered += 1
        behind = [waited.group(3) for one in passed if (waited := BEHIND.match(one))]
        if not behind or any("ld.global" in one for one in passed):
            found.append(f"rows are loaded from a place that is behind no wait: {line}")
        found += [
            f"a place is behind a constant, not behind a wait: {line}"
            for outcome in behind
            if len({one.partition(",")[2] for one in sources.get(outcome, ())}) < 2
        ]
    return found if gathered or not copies else ["no load of gathered rows: this lint sees nothing"]


def _sources(code: list[str]) -> dict[str, list[str]]:
    """The instructions that write each register."""
    found: dict[str, list[str]] = {}
    for line in code:
        for instruction in [line] if BEHIND.match(line) else line.strip("{} ").split(";"):
            written = re.match(r"(?:@!?%\w+ )?\S+\s+(\{[^}]*\}|[%\w|]+)", instruction.strip())
            for register in REGISTER.findall(written.group(1)) if written else ():
                found.setdefault(register, []).append(instruction.strip())
    return found


def _traced(registers: list[str], sources: dict[str, list[str]]) -> set[str]:
    """All instructions that what is in the registers can have come through, back to memory, `behind` or an argument."""
    passed: set[str] = set()
    waiting = list(registers)
    while waiting:
        for instruction in sources.get(waiting.pop(), ()):
            if instruction not in passed:
                passed.add(instruction)
                if not BEHIND.match(instruction) and not instruction.startswith(("ld.", "atom.")):
                    waiting += REGISTER.findall(instruction.partition(",")[2])
    return passed


def _violations(graph: dict[str, Block]) -> set[str]:
    found: set[str] = set()
    waiting = list(graph)
    while waiting:
        block = graph[waiting.pop()]
        facts: Facts = frozenset(block.entered_with)
        for line in block.code:
            if "stored" in facts and RELEASE.search(line):
                found.add(f"a store reaches a release without a barrier: {line}")
            if "unshared" in facts and LOAD.search(line):
                found.add(f"data is loaded after a wait without a barrier: {line}")
            if "unfenced" in facts and DESCRIPTOR_LOAD.search(line):
                found.add(f"a descriptor load follows a wait without a proxy fence: {line}")
            facts = step(line, facts)
        for name in block.next:
            if name in graph and not facts <= graph[name].entered_with:
                graph[name].entered_with |= facts
                waiting.append(name)
    return found
