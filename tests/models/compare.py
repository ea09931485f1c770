"""Compares a parallelized model with the plain one: output, loss, every gradient, every parameter, bytes held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels as tpk
from tests.models import zoo
from tests.nn.reference import part_of, tp_mesh
from tpkernels.nn.cut_experts import CutExperts
from tpkernels.nn.paired_convolution import takes_channels
from tpkernels.nn.parallel_linear import ParallelLinear

LIMIT = {False: 1e-11, True: 1e-6}
"""Relative to the largest value, for models that compute in fp64 throughout, and for those with fp32 inside."""


def differs(actual: Tensor, expected: Tensor, limit: float) -> str | None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not actual.numel():
        return None
    difference = float((actual.detach() - expected.detach()).abs().max())
    allowed = limit * (1 + float(expected.detach().abs().max()))
    return None if difference <= allowed else f"differs by {difference:.2e}, at most {allowed:.2e} expected"


def parts_of(model: nn.Module, name: str) -> list[DTensor]:
    """The parameters that a plain model's parameter has become: one, or several of a packed layer."""
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    if name in parameters:
        return [parameters[name]]
    owner, _, key = name.rpartition(".")
    found = []
    while f"{owner}.part{len(found)}.{key}" in parameters:
        found.append(parameters[f"{owner}.part{len(found)}.{key}"])
    if not found and key.startswith("in_proj_"):  # torch's attention
        key = key.removeprefix("in_proj_")
        names = [f"{owner}.{part}.{key}" for part in ("query", "key", "value")]
        found = [parameters[part] for part in names if part in parameters]
    return found or [parameters[f"{owner}.{part}"] for part in _packed(model, name)[1]]


def _packed(model: nn.Module, name: str) -> tuple[int, tuple[str, ...]]:
    """Along which dimension which parameters of experts, or of a convolution that takes parts of several segments, make
    up the plain model's."""
    owner, _, key = name.rpartition(".")
    module: Any = model.get_submodule(owner)
    told = module.packed_parameters() if isinstance(module, CutExperts) or takes_channels(module) else {}
    return told.get(key, (0, ()))


Piece = tuple[DTensor, Callable[[Tensor], Tensor]]


def pieces_of(model: nn.Module, name: str, whole: Tensor) -> list[Piece]:
    """What a plain model's parameter ``whole`` has become, each with what cuts this rank's piece out of a whole."""
    found = parts_of(model, name)
    dim, start = 0, 0
    if len(found) > 1 and whole.dim() > 2:
        dim = _packed(model, name)[0]
    elif len(found) > 1 and whole.dim() > 1:
        dim = 0 if found[0].shape[-1] == whole.shape[1] else 1
    pieces: list[Piece] = []
    places = sum(part.numel() for part in found) > whole.numel() and len(found) > 1  # for more heads than there are
    segments = getattr(model.get_submodule(name.rpartition(".")[0]), "segments", None)
    for number, part in enumerate(found):
        count = part.numel() // (whole.numel() // whole.shape[dim]) if len(found) > 1 else 0
        if places:
            count = segments[number] if segments else whole.shape[dim] // len(found)

        def cut(tensor: Tensor, part: DTensor = part, start: int = start, count: int = count) -> Tensor:
            tensor = tensor.detach()
            tensor = tensor.narrow(dim, start, count) if len(found) > 1 else tensor
            if part.numel() > tensor.numel():
                return _with_places(tensor, part)
            return part_of(tensor.reshape(part.shape), part)  # heads may be a dimension of their own

        pieces.append((part, cut))
        start += count
    return pieces


def _with_places(whole: Tensor, part: DTensor) -> Tensor:
    """This rank's heads as ``numpy.array_split`` deals them out, and zeros in places that are left over."""
    (placement,) = part.placements
    dim, world = placement.dim, part.device_mesh.size()
    heads = whole.unflatten(dim, (-1, part.shape[dim + 1])).tensor_split(world, dim)[part.device_mesh.get_local_rank()]
    padded = heads.new_zeros(part.to_local().shape)
    padded.narrow(dim, 0, heads.shape[dim]).copy_(heads)
    return padded


def compare_tensors(model: nn.Module, plain: nn.Module, limit: float, *, gradients: bool = True) -> list[str]:
    """What is wrong with the values or gradients on this rank."""
    wrong = []
    for name, expected in plain.named_parameters(remove_duplicate=False):
        pieces = pieces_of(model, name, expected)
        if not pieces:
            wrong.append(f"{name} is gone")
        for part, cut in pieces:
            problem = differs(part.to_local(), cut(expected), limit)
            if problem:
                wrong.append(f"{name}: {problem}")
            if not gradients or expected.grad is None:
                continue
            if part.grad is None:
                wrong.append(f"{name} has no gradient")
                continue
            problem = differs(part.grad.to_local(), cut(expected.grad), limit)  # type: ignore[attr-defined]
            if problem:
                wrong.append(f"gradient of {name}: {problem}")
    return wrong


def held_bytes(model: nn.Module) -> int:
    local = [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


TOGETHER = 16
"""One model of so many is planned by every rank for itself on the mesh; of the others each rank plans its share."""


def planned(count: int, mesh: DeviceMesh, plan: Callable[[int, Any], Any]) -> Callable[[int], Any]:
    """What ``plan(index, world size or mesh)`` gives for each of ``count`` models: planning is most of their cost.

    The result is asked for one model after the other, by all ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {index: plan(index, world) for index in range(count) if index % world == rank and index % TOGETHER}
    shared: list[Any] = [None] * world
    dist.all_gather_object(shared, mine)
    known = {index: made for some in shared for index, made in some.items()}
    return lambda index: known[index] if index in known else plan(index, mesh)


def compare_model(name: str, plan: tpk.ShardingPlan) -> dict[str, Any]:
    """Parallelize, run forward and backward; what is wrong, and what the plan says."""
    plain, model, given = zoo.build(name), zoo.build(name), zoo.inputs(name)
    tpk.parallelize(model, tp_mesh(), plan, fused_norm=True)
    limit = LIMIT[zoo.is_single(name)]
    wrong = []
    y, expected = zoo.output(model(**given)), zoo.output(plain(**given))
    problem = differs(y, expected, limit)
    if problem:
        wrong.append(f"output: {problem}")
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    losses = [(out * weights).sum() for out in (y, expected)]
    for loss in losses:
        loss.backward()
    wrong += compare_tensors(model, plain, limit)
    rank = dist.get_rank()
    if held_bytes(model) != plan.bytes_per_rank[rank]:
        wrong.append(f"holds {held_bytes(model)} bytes, the plan says {plan.bytes_per_rank[rank]}")
    if tpk.ShardingPlan.from_json(plan.to_json()) != plan:
        wrong.append("the plan changes on its way through JSON")
    return {
        "wrong": wrong,
        "styles": {entry.path: type(entry.style).__name__ for entry in plan.entries},
        "sequence": plan.sequence_blocks,
        "whole": plan.whole_blocks,
        "notes": plan.notes,
        "full": plan.full_bytes,
        "replicated": plan.replicated_bytes,
        "held": plan.bytes_per_rank,
        "free": sum(map(free_bytes, model.modules())),
    }


def free_bytes(module: nn.Module) -> int:
    """Of places for more heads than there are, over all ranks."""
    if not isinstance(module, ParallelLinear) or not module.has_free_places:
        return 0
    held = [getattr(module, name).to_local() for name in module.parameters_by_unit()]
    places, units = held[0].shape[module.parameters_by_unit()["weight"]], sum(module.units_held())
    total = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return total // places * (places * dist.get_world_size() - units)


def compare_models(cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Many models in one call of the ranks."""

    def plan(index: int, where: Any) -> tpk.ShardingPlan:
        name, options = cases[index]
        return tpk.make_plan(zoo.build(name), where, **options)

    plan_of = planned(len(cases), tp_mesh(), plan)
    return [compare_model(name, plan_of(index)) for index, (name, _) in enumerate(cases)]


class NothingTravelsUnplanned(TorchDispatchMode):
    """Fails where DTensor communicates by itself, with torch's functional collectives, which no plan lists."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor's turn: what it makes of this comes here next
        assert func.namespace != "_c10d_functional", f"{func} of {[a.shape for a in args if isinstance(a, Tensor)]}"
        return func(*args, **(kwargs or {}))
