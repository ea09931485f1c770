"""What single architectures need beyond the rules: data only.

``CONFIGS``: fields of the configuration, those of a part in a dict of their own.  ``INPUTS``: arguments of the call by
name, ("int", shape, below) or ("float", shape), which win over what the names of arguments suggest.  ``KINDS``: the
class to build where it is not the preferred one.  ``NEEDS``: why an architecture cannot be built here at all.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIGS", "INPUTS", "KINDS", "NEEDS"]

CONFIGS: dict[str, dict[str, Any]] = {}

INPUTS: dict[str, dict[str, Any]] = {}

KINDS: dict[str, str] = {}

NEEDS: dict[str, str] = {}
