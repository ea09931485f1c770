"""Names for what a plan says about one module: in our plans and their files, in torch's and in Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from tpkernels.planning.styles import (
    Channels,
    Column,
    CopiedHeads,
    Experts,
    Features,
    Heads,
    PartNorm,
    Replicate,
    Row,
    Sliced,
    Style,
    Vocabulary,
)

__all__ = ["HUGGING_FACE", "STYLES", "as_style", "style_from_dict", "style_to_dict"]

STYLES: dict[str, Style] = {
    "column": Column(),
    "row": Row(),
    "replicate": Replicate(),
    "column_gather": Column(gather_output=True),
    "row_split": Row(split_input=True),
    "vocabulary": Vocabulary(),
    "features": Features(gather_output=True),
    "channels": Channels(),
}
"""Styles by the names that a plan may use instead."""

HUGGING_FACE: dict[str, Style] = {
    "colwise": Column(),
    "rowwise": Row(),
    "colwise_rep": Column(gather_output=True),
    "colwise_gather_output": Column(gather_output=True),
    "rowwise_rep": Row(split_input=True),
    "rowwise_split_input": Row(split_input=True),
    "embedding_rowwise": Vocabulary(),
    "embedding_colwise": Features(gather_output=True),
    "sequence_parallel": Replicate(sequence_parallel=True),
    "replicated_with_grad_allreduce": Replicate(sequence_parallel=True),
}
"""Names of transformers' ``tp_plan``; those of experts and packed parameters have no module to replace."""

_KINDS = {
    "column": Column,
    "row": Row,
    "copied_heads": CopiedHeads,
    "vocabulary": Vocabulary,
    "features": Features,
    "channels": Channels,
    "heads": Heads,
    "experts": Experts,
    "sliced": Sliced,
    "part_norm": PartNorm,
    "replicate": Replicate,
}


def as_style(key: str, value: object, *, embedding: bool = False) -> Style:
    """A style from what a plan may say: one of ours, a name of ours or of transformers, a style of torch's.

    ``embedding``: the module is one; columns of a table are its features, rows its vocabulary.

    Raises:
        ValueError: something else, or layouts that have no counterpart.
    """
    style: Style | None = None
    if isinstance(value, Style):
        style = value
    elif isinstance(value, str):
        style = STYLES.get(value) or HUGGING_FACE.get(value)
    elif isinstance(value, ColwiseParallel | RowwiseParallel | SequenceParallel):
        style = _from_torch(key, value)
    if style is None:
        raise ValueError(
            f"plan[{key!r}] must be one of {list(STYLES)}, a name of transformers' tp_plan "
            f"({', '.join(HUGGING_FACE)}), "
            f"a Column, Row, Replicate, ... object, or a style of torch.distributed.tensor.parallel, got {value!r}"
        )
    if embedding and isinstance(style, Column):
        return Features(gather_output=style.gather_output)
    if embedding and isinstance(style, Row):
        return Vocabulary(style.implementation)
    return style


def _from_torch(key: str, style: ColwiseParallel | RowwiseParallel | SequenceParallel) -> Style:
    if isinstance(style, SequenceParallel):
        return Replicate(sequence_parallel=True)
    (source,), (target,) = style.input_layouts, style.output_layouts
    if isinstance(style, ColwiseParallel):
        sequence = _sequence_dim(source)
        if (source.is_replicate() or sequence is not None) and (target.is_replicate() or target == Shard(-1)):
            dim = -2 if sequence is None else sequence
            return Column(sequence is not None, dim, gather_output=target.is_replicate())
    else:
        sequence = _sequence_dim(target)
        if (source.is_replicate() or source == Shard(-1)) and (target.is_replicate() or sequence is not None):
            dim = -2 if sequence is None else sequence
            return Row(sequence is not None, dim, split_input=source.is_replicate())
    raise ValueError(f"plan[{key!r}]: {type(style).__name__} from {source} to {target} has no counterpart here")


def _sequence_dim(placement: Any) -> int | None:
    return placement.dim if isinstance(placement, Shard) and placement.dim != -1 else None


def style_to_dict(style: Style) -> dict[str, Any]:
    """The style's name and the fields that are not at their defaults."""
    name = next(name for name, kind in _KINDS.items() if type(style) is kind)
    values = asdict(style)
    given = {f.name: values[f.name] for f in fields(style) if values[f.name] != f.default}
    return {"style": name} | given


def style_from_dict(value: object) -> Style:
    """The inverse of :func:`style_to_dict`.

    Raises:
        ValueError: an unknown name or field, or a value of another type.
    """
    if not isinstance(value, Mapping) or value.get("style") not in _KINDS:
        raise ValueError(f"a style must name one of {list(_KINDS)}, got {value!r}")
    kind = _KINDS[value["style"]]
    given = {key: item for key, item in value.items() if key != "style"}
    known = {f.name: f for f in fields(kind)}
    for key, item in given.items():
        if key not in known:
            raise ValueError(f"style {value['style']!r} has no option {key!r}; it has {list(known)}")
        wanted = {"bool": bool, "int": int, "str": str, "float": float}.get(str(known[key].type))
        if key == "parameters":
            given[key] = _named_dims(item)
        elif key == "runs":
            given[key] = _named_runs(item)
        elif wanted is None:
            if not isinstance(item, list) or not all(type(part) is int and part > 0 for part in item):
                raise ValueError(f"option {key!r} must be a list of positive numbers, got {item!r}")
            given[key] = tuple(item)
        elif type(item) is not wanted:
            raise ValueError(f"option {key!r} must be a {wanted.__name__}, got {item!r}")
    missing = [name for name, option in known.items() if option.default is MISSING and name not in given]
    if missing:
        raise ValueError(f"style {value['style']!r} lacks {missing}")
    style: Style = kind(**given)
    return style


def _named_runs(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) is str
        and isinstance(pair[1], list | tuple) and all(type(size) is int and size > 0 for size in pair[1])
        for pair in pairs
    ):  # fmt: skip
        raise ValueError(f"option 'runs' must be a list of names with sizes, got {value!r}")
    return tuple((name, tuple(sizes)) for name, sizes in pairs)


def _named_dims(value: Any) -> tuple[tuple[str, int], ...]:
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and type(pair[0]) is str and type(pair[1]) is int
        and pair[1] >= 0 for pair in pairs
    ):  # fmt: skip
        raise ValueError(f"option 'parameters' must be a list of names with dimensions, got {value!r}")
    return tuple((name, dim) for name, dim in pairs)
