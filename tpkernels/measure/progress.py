"""What is left of a measurement, told while it runs."""

from __future__ import annotations

__all__ = ["remaining"]


def remaining(done: int, count: int, seconds: float) -> str:
    """What is left, if the rest takes as long as what was done; nothing where that is not known yet."""
    if not done:
        return ""
    left = seconds / done * (count - done)
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
