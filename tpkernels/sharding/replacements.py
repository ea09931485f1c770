"""The parallel layers that take the place of plain ones, made of their parameters; nothing of the model changes yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.packed_row import PackedRowParallelLinear
from tpkernels.nn.replicated import Converted
from tpkernels.nn.row import RowParallelLinear
from tpkernels.planning.modules.layers import as_torchs
from tpkernels.planning.styles import Column, CopiedHeads, Features, Row, Style, Vocabulary

__all__ = ["replacements"]


def replacements(
    modules: Mapping[str, nn.Module], swaps: Mapping[str, Style], tp: DeviceMesh
) -> tuple[list[tuple[nn.Module, nn.Module]], Converted]:
    """A new layer for each old one, and what their parameters became, so that tied ones stay one."""
    made: list[tuple[nn.Module, nn.Module]] = []
    converted: Converted = {}
    done: set[int] = set()
    for name, style in swaps.items():
        old = modules[name]
        if id(old) in done:
            continue
        done.add(id(old))
        new = _replace(old, style, tp)
        made.append((old, new))
        for key, parameter in new.named_parameters(recurse=False):
            plain = old._parameters[key]
            assert plain is not None
            if id(plain) in converted:
                new._parameters[key] = converted[id(plain)][1]
            else:
                converted[id(plain)] = plain, parameter
    return made, converted


def _replace(old: nn.Module, style: Style, tp: DeviceMesh) -> nn.Module:
    options = asdict(style)
    options.pop("summed_gradient", None)
    sums = options.pop("sum_input_gradient", True)
    old = as_torchs(old)
    if isinstance(style, Column):
        packed = ("segments", "units", "copied", "behind", "copied_heads", "copies")
        for option in ("gather_output", "gather_input", "unit") if style.segments else packed:
            del options[option]
        kind = PackedColumnParallelLinear if style.segments else ColumnParallelLinear
        column = kind.from_linear(old, tp, **options)
        if not sums:
            column.sum_input_gradient = False
        return column
    if isinstance(style, Row):
        for option in ("split_input", "unit") if style.segments else ("segments",):
            del options[option]
        row = PackedRowParallelLinear if style.segments else RowParallelLinear
        return row.from_linear(old, tp, **options)
    if isinstance(style, CopiedHeads):
        return CopiedHeadsLinear.from_linear(old, tp, **options)
    assert isinstance(old, nn.Embedding)
    if isinstance(style, Vocabulary):
        return VocabParallelEmbedding.from_embedding(old, tp, **options)
    assert isinstance(style, Features)
    return FeatureParallelEmbedding.from_embedding(old, tp, **options)
