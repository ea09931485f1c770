"""Modules of several matrices that take and give whole tensors, whatever is around them: attention, and experts.

It owns what happens to torch's own attention, whose heads are cut inside, and to the experts of a mixture, of each of
which a rank has a slice of the features, or some of them whole.  Their outputs are summed before they are given.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import asdict

from torch import nn

from tpkernels.nn.multihead import why_not_parallel
from tpkernels.partition import chunk_sizes, unit_sizes
from tpkernels.planning.alone.ties import are_twins
from tpkernels.planning.entries.plan_entries import Chosen
from tpkernels.planning.modules.experts import KnownExperts
from tpkernels.planning.modules.layers import is_attention, unswappable
from tpkernels.planning.modules.source_reads import maybe_read
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import degrees, divisor
from tpkernels.planning.styles import Experts, Heads, Replicate

__all__ = ["READ", "attention_choices", "check_experts", "experts_choices"]

READ = "has parameters that the model uses without calling the module"


def attention_choices(
    modules: Mapping[str, nn.Module],
    chosen: Mapping[str, Chosen],
    world_size: int,
    read: Container[str],
    tied: Container[str],
) -> dict[str, Chosen]:
    """What happens to torch's attention modules for which nothing is ``chosen`` yet, and to what belongs to them."""
    found: dict[str, Chosen] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.MultiheadAttention) or not is_attention(module) or name in chosen:
            continue
        inner = f"{name}.out_proj" if name else "out_proj"
        why = why_not_parallel(module, world_size) or unswappable(module)
        if why is None and name in read:
            why = READ
        if why is None and not any(n in tied for n in (name, inner)) and inner not in chosen:
            sizes, unit = unit_sizes(module.num_heads, world_size), 1
            each = str(sizes[0])
            if len(set(sizes)) > 1:
                each, unit = f"{'/'.join(map(str, sizes))}", module.head_dim
            reason = f"{module.num_heads} heads, {each} per rank"
            found[name] = Chosen(Heads(unit=unit), "rule", reason)
            found[inner] = Chosen(Heads(inner=True, unit=unit), "rule", f"goes with {name}")
        elif why is not None:
            found[name] = Chosen(Replicate(), "default", why)
    return found


def check_experts(experts: object) -> None:
    """Refuse a way to cut experts that there is not."""
    if experts not in ("auto", "features", "experts"):
        raise ValueError(f'experts must be "auto", "features" or "experts", got {experts!r}')


def experts_choices(
    model: nn.Module,
    observation: Observation,
    chosen: Mapping[str, Chosen],
    world_size: int,
    tied: Mapping[str, Collection[str]],
    *,
    way: str,
    parts: bool,
) -> dict[str, Chosen]:
    """What happens to modules of experts, and to those that look like some, where nothing is ``chosen`` yet.

    Args:
        tied: modules that share a parameter, each with all that do.
        parts: whether those that no example calls might be given parts of a sequence.

    Raises:
        ValueError: some stay whole, and the ``way`` to cut them was asked for.
    """
    known_experts = {} if observation.shadow is None else observation.shadow.experts
    unseen = _unseen_experts(model, observation, known_experts, parts=parts)
    modules = dict(model.named_modules())
    unlike = {
        name for name, known in known_experts.items()
        if name in tied and (known.layout.rows or not are_twins(modules, tied[name]))
    }  # fmt: skip
    whole = observation.refused_experts | {
        name: why for name, known in known_experts.items()
        if (why := _why_whole(name, known, world_size, observation.recording, unseen, unlike, way)) is not None
    }  # fmt: skip
    whole = {name: why for name, why in whole.items() if name not in chosen}
    if whole and way != "auto":
        name = next(iter(whole))
        others = f" (and {len(whole) - 1} more)" if len(whole) > 1 else ""
        raise ValueError(f'experts="{way}" cannot cut {name!r}{others}: {whole[name]}')
    found = {name: Chosen(Replicate(), "default", f"experts that stay whole: {why}") for name, why in whole.items()}
    for name, known in known_experts.items():
        if name in whole or name in chosen:
            continue
        dealt = way == "experts" or known.layout.rows > 0
        each = "/".join(map(str, dict.fromkeys(chunk_sizes(known.num_experts if dealt else known.d_ff, world_size))))
        reason = f"{known.num_experts} experts, {each}{'' if dealt else f' of {known.d_ff} features of each'} per rank"
        style = Experts(**asdict(known.layout), dealt=dealt)
        assert observation.recording is not None
        seen = "" if name in observation.recording.layer_rows else "; not called by the example"
        found[name] = Chosen(style, "samples", f"{reason}; compared on samples{seen}")
    return found


def _unseen_experts(
    model: nn.Module, observation: Observation, known_experts: Mapping[str, KnownExperts], *, parts: bool
) -> dict[str, str]:
    """Experts that no example calls and that stay whole, with the reason: others, such as those that images alone go
    to, are called as modules of their class are elsewhere, and the source says that no code reads their parameters."""
    called = {} if observation.recording is None else observation.recording.layer_rows
    kinds = {type(model.get_submodule(name)) for name in known_experts if name in called}
    return {
        name: why for name, known in known_experts.items()
        if name not in called and (why := _why_unseen(model, name, known, kinds, parts=parts)) is not None
    }  # fmt: skip


def _why_unseen(
    model: nn.Module, name: str, known: KnownExperts, kinds: Container[type[nn.Module]], *, parts: bool
) -> str | None:
    module = model.get_submodule(name)
    if parts or known.layout.rows or type(module) not in kinds:
        return "not called by the example"
    reader = maybe_read(model, frozenset(key for key, _ in module.named_parameters(recurse=False))).get(name)
    return None if reader is None else f"not called by the example, and the code of {reader} may read their parameters"


def _why_whole(
    name: str,
    known: KnownExperts,
    world_size: int,
    recording: Recording | None,
    unseen: Mapping[str, str],
    tied: Container[str],
    way: str,
) -> str | None:
    if recording is None:
        return "without the data flow nobody knows who else reads their parameters"
    if name in recording.direct:
        return READ
    if name in unseen:
        return unseen[name]
    if name in tied:
        return "a parameter is tied to another module's"
    if way == "experts" and known.layout.call == "sorted":
        return "its experts have one matrix here, and the others in modules of their own"
    if known.layout.rows and way == "features":
        return "its experts stand in the rows of matrices, and whole ones are dealt out"
    ranks = divisor(world_size)
    if known.layout.rows and known.num_experts % ranks:
        return f"{known.num_experts} experts stand in the rows of matrices, and do not divide over {ranks} ranks"
    if way == "experts" and known.layout.identity:
        return "some experts have no matrices, and give what they take"
    if way == "experts" or known.layout.rows:
        return None
    if degrees() and known.d_ff % ranks:
        return f"{known.d_ff} features do not divide into the {ranks} blocks of same_bits"
    return f"fewer features ({known.d_ff}) than there are ranks" if known.d_ff < world_size else None
