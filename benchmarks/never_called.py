"""Modules that a model has and no code of its file mentions but where it makes them: nothing ever calls them.

XCodec makes a second decoder, which belongs to its training, and none of its methods uses it.  No plan can say how such
a module is cut with others, and no rank computes with it.  Told by the source: the attribute is written, and neither
read by name anywhere in the file nor by a name that is made up (``getattr``, ``self.children()``).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator

from torch import nn

__all__ = ["never_called"]

_MADE_UP = r"getattr\(self, [^\"']|self\.(named_)?(children|modules)\(\)|self\._modules\b"


def never_called(model: nn.Module) -> Iterator[str]:
    """The paths of such modules."""
    sources: dict[str, str] = {}
    for path, module in model.named_modules():
        home = type(module).__module__
        if home.startswith("torch.") or not type(module).__dict__.get("__init__"):
            continue
        if home not in sources:
            sources[home] = inspect.getsource(sys.modules[home])
        made_up = re.search(_MADE_UP, sources[home])
        for name in () if made_up else module._modules:
            reads = re.findall(rf"[.\"']{re.escape(name)}\b(?!\s*(?::[^=\n]+)?=[^=])", sources[home])
            if name.isidentifier() and f"self.{name}" in inspect.getsource(type(module)) and not reads:
                yield f"{path}.{name}" if path else name
