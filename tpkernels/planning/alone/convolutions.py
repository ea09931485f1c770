"""Convolutions by themselves: which of them are cut by their output channels.

It owns the rule.  A convolution that the data flow has not cut takes and gives whole tensors, as a linear layer by
itself does: each rank computes its output channels, and all are gathered.  One that works on each channel by itself
stays whole: its weight is small beside what would be sent.

It assumes of code that no example runs, and of modules that need the values of tensors, what their source says: a
convolution whose weight they may read past it stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from tpkernels.nn.convolution import own_code, why_not_cut
from tpkernels.nn.normed_weight import weight_norm_of
from tpkernels.nn.paired_convolution import why_not_paired
from tpkernels.planning.alone.whole_in_out import READ
from tpkernels.planning.entries.convolution_entries import NORMED
from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.modules.own_code import calls_super
from tpkernels.planning.modules.source_reads import maybe_read
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.splits import degrees, divisor
from tpkernels.planning.styles import Channels, Replicate

__all__ = ["check_channels", "convolution_choices"]


def convolution_choices(
    modules: Mapping[str, nn.Module],
    chosen: dict[str, Chosen],
    world_size: int,
    read: Container[str],
    tied: Container[str],
    observation: Observation | None,
    unpaired: Callable[[str], str],
) -> dict[str, Chosen]:
    """What happens to torch's convolutions for which nothing is ``chosen`` yet.

    ``read``: modules whose parameters are read past them; ``unpaired``: why a convolution is not cut in a pair.

    Raises:
        ValueError: an override asks for channels of a module that cannot be cut so.
    """
    for name, choice in chosen.items():
        if isinstance(choice.style, Channels):
            check_channels(name, modules[name], world_size, choice.style)
    convolutions = {name: m for name, m in modules.items() if name not in chosen and isinstance(m, _ConvNd)}
    recordings = [] if observation is None else [recording for _, recording in observation.recordings]
    called = {scope.name for recording in recordings for scope in recording.scopes}
    if observation is None or not observation.followed:  # parts of the model alone were called
        called = set()
    unseen = maybe_read(modules[""]) if not convolutions.keys() <= called else {}
    found: dict[str, Chosen] = {}
    for name, module in convolutions.items():
        why = _why_own(module) or why_not_cut(module, divisor(world_size), degrees())
        why = why or _why_whole(name, module, read, tied)
        if why is None and name not in called and name in unseen:
            why = f"has a weight that the code of {unseen[name]} may use without calling the module"
        found[name] = _gathered(unpaired(name)) if why is None else Chosen(Replicate(), "default", why)
    for name, choice in (chosen | found).items():
        if isinstance(modules[name], _ConvNd) and weight_norm_of(modules[name]) is not None:
            inner = f"{name}.{NORMED}" if name else NORMED
            found[inner] = replace(choice, reason=f"makes the weight of {name}: {choice.reason}")
    return found


def _gathered(unpaired: str) -> Chosen:
    return Chosen(Channels(), "rule", f"by its output channels, gathered{unpaired and f' (not in a pair: {unpaired})'}")


def check_channels(
    name: str, module: nn.Module, world_size: int, style: Channels | None = None, same_bits: int = 0
) -> None:
    """Refuse to cut ``module`` by channels where that cannot be done."""
    why = _why_own(module)
    if why is None and style is not None and style.paired:
        gives, gathers = not style.gather_output, style.gather_input
        sizes: Any = {name: getattr(style, name) for name in ("segments", "taken", "copied", "behind")}
        why = why_not_paired(module, world_size, inputs=style.inputs, outputs=gives, gathers=gathers, **sizes)
    elif why is None:
        why = why_not_cut(module, world_size, same_bits)
    if why is not None:
        raise ValueError(f"module {name!r} is a {type(module).__name__} that cannot be cut by channels: it {why}")


def _why_own(module: nn.Module) -> str | None:
    base: Any = own_code(module)
    kind: Any = type(module)
    if base is not None and not calls_super(kind, base):
        return "is no convolution as torch's are: it has code of its own that may use the weight"
    return None


def _why_whole(name: str, module: _ConvNd, read: Container[str], tied: Container[str]) -> str | None:
    if name in read:
        return READ
    if name in tied:
        return "a parameter is tied to another module's"
    if module.groups == module.in_channels > 1:
        return "works on each channel by itself: its weight is small beside what would be sent"
    return None
