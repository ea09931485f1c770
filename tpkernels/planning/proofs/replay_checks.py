"""What a replay of the whole model may say against groups that hold: gradients, or random numbers, of two kinds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpkernels.planning.replays.replay import Replay
from tpkernels.planning.splits import Unproven, degrees

__all__ = ["drawn_for_whole", "half_partial"]


def half_partial(replay: Replay, modules: Mapping[str, nn.Module]) -> dict[int, Unproven]:
    """Groups that make only some of a module's parameters partial: the module is summed as one."""
    blamed: set[int] = set()
    for name in replay.partial:
        prefix = name.rpartition(".")[0]
        own = {f"{prefix}.{key}" if prefix else key for key, _ in modules[prefix].named_parameters(recurse=False)}
        if any(other in replay.slices for other in own) or not own <= replay.partial:
            blamed |= replay.partial_groups[name]
    return dict.fromkeys(blamed, Unproven("a module would have gradients of two kinds"))


def drawn_for_whole(replay: Replay, says_all: bool) -> dict[int, Unproven]:
    """Groups between whose layers whole tensors are drawn for; a plan that says less, or draws by blocks, cannot."""
    blamed = set[int]().union(*replay.whole_draws.values()) if degrees() or not says_all else ()
    return dict.fromkeys(blamed, Unproven("random numbers are drawn for whole tensors between its layers"))
