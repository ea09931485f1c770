"""Which layers of a plan read the same tensor and can run as one op, and the hook that tidies up after them.

It owns the rule.  Layers of one module share one gather (or one sum of the gradient) if in every recorded call they
read the very same tensor, unchanged between them, and their options agree.  At run time a result belongs to one tensor
object (:mod:`tpkernels.nn.shared_input`), so a model that takes another path still computes the right result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from tpkernels.nn.shared_input import ColumnLike, SharedInput
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.styles import Column, CopiedHeads, Style

__all__ = ["find_shared", "share_inputs"]


def find_shared(recordings: Sequence[Recording], styles: Mapping[str, Style]) -> tuple[tuple[str, ...], ...]:
    """Groups of column layers with one input in all recordings, in the order of their calls."""
    found: dict[Any, list[str]] = {}
    for name in dict.fromkeys(name for recording in recordings for name in recording.layer_reads):
        style = styles.get(name)
        reads = [tuple(recording.layer_reads.get(name, ())) for recording in recordings]
        if isinstance(style, Column) and not style.sum_input_gradient:
            continue
        if not isinstance(style, Column | CopiedHeads) or any(node < 0 for some in reads for _, node in some):
            continue
        saves = isinstance(style, Column) and style.save_gathered
        options = (style.sequence_parallel, style.sequence_dim, style.implementation, saves)
        found.setdefault((name.rpartition(".")[0], tuple(reads), options), []).append(name)
    return tuple(tuple(names) for names in found.values() if len(names) > 1)


def share_inputs(shared: Sequence[Sequence[str]], model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Let swapped layers run together; whatever a forward pass of ``model`` leaves waiting goes at its end."""
    groups = []
    for names in shared:
        layers = [modules[name] for name in names]
        group = SharedInput(names, cast("list[ColumnLike]", layers))
        for layer in layers:
            layer.shared = group  # type: ignore[assignment]
        groups.append(group)

    def forget(module: nn.Module, args: Any, output: Any) -> None:
        for group in groups:
            group.forget()

    if groups:
        model.register_forward_hook(forget, always_call=True)
