"""A lint of Triton's IR: no offset of a row is computed in 32 bits.

Matrices may have more than 2^31 elements, while a row's number and the distance between two rows fit 32 bits; so what
must be 64 bits wide is every product with such a distance (arguments named `stride...`). Addresses then are, too.
"""

from __future__ import annotations

import re

ASSIGNED = re.compile(r"^(%\w+) = ([\w.]+) (.*?) : (.*?)(?: loc\(.*\))?$")
COPIES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.select")
PRODUCTS = ("arith.muli", "arith.shli")
NARROW = re.compile(r"\bi32$|xi32>$")


def narrow_products(ttir: str) -> list[str]:
    """Violations, as sentences."""
    strides = set(re.findall(r"%stride_\w+(?=: i\d+)", ttir))
    found = [] if strides else ["the kernel has no strides: this lint sees nothing"]
    for line in ttir.splitlines():
        assigned = ASSIGNED.match(line.strip())
        if assigned is None:
            continue
        result, operation, operands, kind = assigned.groups()
        if not NARROW.search(kind) or strides.isdisjoint(re.findall(r"%\w+", operands)):
            continue
        if operation in COPIES:
            strides.add(result)
        elif operation in PRODUCTS:
            found.append(f"a stride is multiplied in 32 bits: {operation} {operands} : {kind}")
    return found
