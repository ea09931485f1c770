"""``parallelize``: swap the linears of a model that exists for tensor-parallel ones, as a plan says.

Owns: matching a plan to modules, all checks before anything is touched, the swap in place.

Assumes replicas: every rank holds the same model with the same weights.

Refuses: patterns that match nothing, styles that do not fit, weights that are tied to something outside the plan, a
second pass over the same model.  After an error the model is as it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels import dispatch
from tpkernels.comm.groups import GroupLike
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.parameters import check_unit, tp_mesh
from tpkernels.nn.replicated import Converted, replicate_parameters
from tpkernels.nn.row import RowParallelLinear
from tpkernels.sharding.styles import STYLES, Column, Replicate, Row, Style

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(model: M, mesh: GroupLike, plan: Mapping[str, str | Style]) -> M:
    """Make ``model`` tensor-parallel in place, and return it.

    Args:
        mesh: a mesh with a "tp" axis (``tpk.init()``), a one-dimensional mesh, or a ProcessGroup.
        plan: module names to styles.  Names are fully qualified (``encoder.layer.0.output.dense``) and may be patterns:
            ``*`` matches within one part of the name, ``**`` any number of parts, ``[0-2]`` one of the characters.
            Styles are "column", "row", "replicate", or :class:`Column`, :class:`Row`, :class:`Replicate` objects with
            options.

    Columns and rows replace ``nn.Linear`` modules; one that several modules share is replaced once, everywhere.  All
    other parameters become replicated DTensors and stay where they are, so that optimizers and
    ``torch.nn.utils.clip_grad_norm_`` see one kind of parameter; see :mod:`tpkernels.nn.replicated` for what that means
    for code that reads them.  Their gradients must be equal on all ranks, as they are where every rank computes the
    same from the same data; modules that work on a part of the sequence need ``Replicate(sequence_parallel=True)``.

    Every rank must hold equal weights.  Make the optimizer after this call: parameters are new objects.

    Raises:
        ValueError: a pattern matches no module, a column or row is no ``nn.Linear``, two patterns give one module
            different styles, a cut that DTensor cannot express, tied weights, or a model that is parallel already.
            Nothing was changed.
    """
    tp = tp_mesh(mesh)
    _check_plain(model)
    styles = _match(model, {pattern: _style(pattern, style) for pattern, style in plan.items()})
    swaps = {name: style for name, style in styles.items() if not isinstance(style, Replicate)}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, style in swaps.items():
        _check_swap(name, modules[name], style, tp)
    _check_sharing(model, modules, swaps)

    replacements = {id(modules[name]): _replace(modules[name], style, tp) for name, style in swaps.items()}
    for name in swaps:
        parent, _, attribute = name.rpartition(".")
        setattr(modules[parent], attribute, replacements[id(modules[name])])
    converted: Converted = {}
    # Outer modules last: what an inner one was told holds.
    for name in sorted(styles, key=lambda name: name.count("."), reverse=True):
        kept = styles[name]
        if isinstance(kept, Replicate):
            replicate_parameters(modules[name], tp, sequence_parallel=kept.sequence_parallel, converted=converted)
    replicate_parameters(model, tp, converted=converted)
    return model


def _style(pattern: str, style: str | Style) -> Style:
    if isinstance(style, str) and style in STYLES:
        return STYLES[style]
    if isinstance(style, Column | Row | Replicate):
        return style
    raise ValueError(
        f"plan[{pattern!r}] must be one of {list(STYLES)} or a Column, Row or Replicate object, got {style!r}"
    )


def _check_plain(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor already (placements {parameter.placements}): the model was "
                "parallelized before, and a second time would cut its shards again"
            )


def _match(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Styles by module name; shared modules appear under each of their names."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.items():
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            near = _near(pattern, names)
            raise ValueError(f"plan pattern {pattern!r} matches no module of {type(model).__name__}{near}")
        for name in matched:
            other, before = found.setdefault(name, (pattern, style))
            if before != style:
                raise ValueError(f"module {name!r} matches {other!r} with {before} and {pattern!r} with {style}")
    return {name: style for name, (_, style) in found.items()}


def _matches(name: str, pattern: str) -> bool:
    return _parts_match(name.split("."), pattern.split("."))


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])


def _near(pattern: str, names: list[str]) -> str:
    """The closest module names, one per block of the model."""
    near = difflib.get_close_matches(pattern.replace("*", "0"), names, n=3, cutoff=0.5)
    if not near:
        near = [name for name in names if name.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
    if near:
        return f"; near: {', '.join(near)}"
    return f"; it has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "; it has no submodules"


def _check_swap(name: str, module: nn.Module, style: Style, tp: DeviceMesh) -> None:
    """Everything that building the replacement could refuse."""
    kind = type(style).__name__.lower()
    if not isinstance(module, nn.Linear):
        raise ValueError(f"module {name!r} is a {type(module).__name__}; {kind} styles are for nn.Linear")
    if type(module) is not nn.Linear:
        raise ValueError(
            f"module {name!r} is a {type(module).__name__}, a subclass of nn.Linear whose own behaviour would be lost"
        )
    hooks = [hook for hook in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks") if getattr(module, hook)]
    if hooks or getattr(module, "parametrizations", None):
        raise ValueError(f"module {name!r} has hooks or parametrizations ({hooks}), which a swap would lose")
    assert isinstance(style, Column | Row)
    op = "matmul_reduce_scatter" if style.sequence_parallel else "matmul_all_reduce"
    if isinstance(style, Column):
        check_unit(f"{name}: out_features", module.out_features, style.unit, tp.size())
        op = "all_gather_matmul" if style.sequence_parallel else op
    else:
        check_unit(f"{name}: in_features", module.in_features, style.unit, tp.size())
    dispatch.check_name(op, style.implementation)


def _check_sharing(model: nn.Module, modules: Mapping[str, nn.Module], swaps: Mapping[str, Style]) -> None:
    """A shared module is swapped under all its names or none; its parameters belong to nothing else."""
    styles: dict[int, tuple[str, Style]] = {}
    for name, style in swaps.items():
        other, before = styles.setdefault(id(modules[name]), (name, style))
        if before != style:
            raise ValueError(f"{other!r} and {name!r} are one module, but the plan gives {before} and {style}")
    for name, module in modules.items():
        if id(module) in styles and name not in swaps:
            raise ValueError(f"{styles[id(module)][0]!r} and {name!r} are one module: the plan must name both")
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    for name in swaps:
        for attribute, parameter in modules[name].named_parameters(recurse=False):
            if len(owners[id(parameter)]) > 1:
                others = [n for n, m in modules.items() if id(parameter) in map(id, m._parameters.values())]
                raise ValueError(
                    f"{name}.{attribute} is tied to that of {', '.join(n for n in others if n != name)}: a swap would "
                    f"untie it; leave {name!r} out of the plan, or give it a weight of its own first"
                )


def _replace(linear: nn.Module, style: Style, tp: DeviceMesh) -> nn.Module:
    assert isinstance(linear, nn.Linear)
    if isinstance(style, Column):
        return ColumnParallelLinear.from_linear(linear, tp, **asdict(style))
    assert isinstance(style, Row)
    return RowParallelLinear.from_linear(linear, tp, **asdict(style))
