"""Parallel modules against `nn.Linear` and a decoder of one process: values, and the gradient of every parameter.

Linear layers and the feed-forward block are judged with the bound of the ops, step by step.  A whole decoder has none:
there the rounding of the unsharded model itself is the measure.  Its own error is the largest difference between it and
its fp64 copy, for each gradient; sharded, it adds the same numbers in another order, and may be `FACTOR` times as far
away.  fp64 is measured by the error of fp32, in units of fp64.  A shard in the wrong place, a doubled bias, a gradient
that was not summed are off by thousands of such errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tpkernels as tpk
from tpkernels.measure.gpt import GPT, ParallelGPT, Sizes
from tpkernels.partition import chunk_sizes, offsets
from tpkernels.selftest.compare import Subject, Trial, implementations_of
from tpkernels.selftest.ops import Place, Problem, problems
from tpkernels.testing.expected import (
    expected_all_gather_matmul,
    expected_bias_gradient,
    expected_input_gradient,
    expected_matmul_all_reduce,
    expected_weight_gradient,
)
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.payload import payload

__all__ = ["module_subjects"]

FACTOR = 4.0
ACTIVATION = "gelu"


def module_subjects(place: Place, mesh: DeviceMesh) -> list[Subject]:
    names = implementations_of("all_gather_matmul")
    found = []
    for parallel in (True, False):
        how = ", sequence parallel" if parallel else ""
        for kind, trial in (("ColumnParallelLinear", _column), ("RowParallelLinear", _row), ("ParallelMLP", _mlp)):
            found.append(Subject(kind + how, names, _trials(trial, place, mesh, parallel)))
        found.append(Subject("GPT of parts" + how, names, _decoders(_from_parts, place, mesh, parallel)))
        found.append(Subject("GPT, parallelize" + how, [], _decoders(_from_plan, place, mesh, parallel)))
    return found


def _trials(
    trial: Callable[[Problem, DeviceMesh, bool], Trial], place: Place, mesh: DeviceMesh, parallel: bool
) -> Callable[[], Iterator[Trial]]:
    return lambda: (trial(problem, mesh, parallel) for problem in problems(place) if not problem.integers)


# --- linear layers and the feed-forward block -------------------------------------------------------------------------


class _Layer:
    """A linear's operands, in full and as its ranks have them (`dim` is what is cut), and its results by name."""

    def __init__(self, problem: Problem, name: str, n: int, k: int, dim: int) -> None:
        self.weight, self.bias = problem.make(f"w{name}", 0, n, k), problem.make(f"b{name}", 0, n)
        sizes = chunk_sizes((n, k)[dim], problem.place.world_size)
        self.ws, self.dim = self.weight.split(sizes, dim), dim
        self.bs = self.bias.split(sizes) if dim == 0 else [self.bias] * len(sizes)

    def linear(self, device: torch.device) -> nn.Linear:
        made = nn.Linear(self.weight.shape[1], self.weight.shape[0], device=device, dtype=self.weight.dtype)
        with torch.no_grad():
            made.weight.copy_(self.weight)
            made.bias.copy_(self.bias)
        return made


def _run(
    problem: Problem, x: Tensor, dy: Tensor, make: Callable[[str], nn.Module], parallel: bool
) -> Callable[[str], dict[str, Tensor]]:
    def run(implementation: str) -> dict[str, Tensor]:
        module = make(implementation)
        leaf = x.to(problem.place.device, copy=True).requires_grad_()
        y = module(leaf, shard_sizes=problem.rows) if parallel else module(leaf)
        y.backward(dy.to(problem.place.device))
        results = {"y": y.detach()} if leaf.grad is None else {"y": y.detach(), "dx": leaf.grad}
        return results | {f"d{name}": _local(p.grad) for name, p in module.named_parameters() if p.grad is not None}

    return run


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _column(problem: Problem, mesh: DeviceMesh, parallel: bool) -> Trial:
    rank, dtype, m, k = problem.place.rank, problem.dtype, problem.m, problem.k
    layer = _Layer(problem, "", problem.n, k, 0)
    x = problem.make("x", 0, m, k)
    dys = [problem.make("dy", r, m, w.shape[0]) for r, w in enumerate(layer.ws)]
    dx = expected_input_gradient(dys, layer.ws, dtype=dtype)
    expected = {
        "y": expected_all_gather_matmul(x, layer.ws[rank], dtype=dtype, bias=layer.bs[rank]),
        "dx": problem.mine(dx) if parallel else dx,
        "dweight": expected_weight_gradient(dys[rank], x, dtype=dtype),
        "dbias": expected_bias_gradient(dys[rank], dtype=dtype),
    }

    def make(implementation: str) -> nn.Module:
        return tpk.nn.ColumnParallelLinear.from_linear(
            layer.linear(problem.place.device), mesh, sequence_parallel=parallel, implementation=implementation
        )

    return Trial(problem.where, _run(problem, _mine(problem, x, parallel), dys[rank], make, parallel), expected)


def _row(problem: Problem, mesh: DeviceMesh, parallel: bool) -> Trial:
    rank, dtype, m, n = problem.place.rank, problem.dtype, problem.m, problem.n
    layer = _Layer(problem, "", n, problem.k, 1)
    xs = [problem.make("x", r, m, w.shape[1]) for r, w in enumerate(layer.ws)]
    dy = problem.make("dy", 0, m, n)
    y = expected_matmul_all_reduce(xs, layer.ws, dtype=dtype, bias=layer.bias)
    expected = {
        "y": problem.mine(y) if parallel else y,
        "dx": Bounded.sum_of_products([dy], [layer.ws[rank].T], dtype=dtype).rounded(dtype),
        "dweight": expected_weight_gradient(dy, xs[rank], dtype=dtype),
        "dbias": expected_bias_gradient(dy, dtype=dtype),
    }

    def make(implementation: str) -> nn.Module:
        return tpk.nn.RowParallelLinear.from_linear(
            layer.linear(problem.place.device), mesh, sequence_parallel=parallel, implementation=implementation
        )

    return Trial(problem.where, _run(problem, xs[rank], _mine(problem, dy, parallel), make, parallel), expected)


def _mlp(problem: Problem, mesh: DeviceMesh, parallel: bool) -> Trial:
    """Every step of the block has its own bound, which the next one takes up."""
    rank, dtype, m, k = problem.place.rank, problem.dtype, problem.m, problem.k
    up, down = _Layer(problem, "up", 2 * problem.n, k, 0), _Layer(problem, "down", k, 2 * problem.n, 1)
    x, dy = problem.make("x", 0, m, k), problem.make("dy", 0, m, k)
    hidden, dzs = [], []
    for w, b, w_down in zip(up.ws, up.bs, down.ws, strict=True):
        hidden.append(expected_all_gather_matmul(x, w, dtype=dtype, bias=b, activation=ACTIVATION))
        dh = Bounded.sum_of_products([dy], [w_down.T], dtype=dtype).rounded(dtype)
        z = Bounded.sum_of_products([x], [w], bias=b, dtype=dtype)
        dzs.append(z.activation_gradient(ACTIVATION, dh, dtype=dtype).rounded(dtype))
    y = expected_matmul_all_reduce(hidden, down.ws, dtype=dtype, bias=down.bias)
    dx = expected_input_gradient(dzs, up.ws, dtype=dtype)
    expected = {
        "y": problem.mine(y) if parallel else y,
        "dx": problem.mine(dx) if parallel else dx,
        "dup.weight": expected_weight_gradient(dzs[rank], x, dtype=dtype),
        "dup.bias": expected_bias_gradient(dzs[rank], dtype=dtype),
        "ddown.weight": expected_weight_gradient(dy, hidden[rank], dtype=dtype),
        "ddown.bias": expected_bias_gradient(dy, dtype=dtype),
    }

    def make(implementation: str) -> nn.Module:
        linears = up.linear(problem.place.device), down.linear(problem.place.device)
        return tpk.nn.ParallelMLP.from_linears(
            *linears, mesh, activation=ACTIVATION, sequence_parallel=parallel, implementation=implementation
        )

    own_x, own_dy = _mine(problem, x, parallel), _mine(problem, dy, parallel)
    return Trial(problem.where, _run(problem, own_x, own_dy, make, parallel), expected)


def _mine(problem: Problem, whole: Tensor, parallel: bool) -> Tensor:
    """This rank's rows where the sequence is cut."""
    rank = problem.place.rank
    return whole.narrow(0, offsets(problem.rows)[rank], problem.rows[rank]) if parallel else whole


# --- a decoder --------------------------------------------------------------------------------------------------------


def _from_parts(plain: GPT, mesh: DeviceMesh, parallel: bool, implementation: str) -> nn.Module:
    return ParallelGPT.from_plain(plain, mesh, sequence_parallel=parallel, implementation=implementation)


def _from_plan(plain: GPT, mesh: DeviceMesh, parallel: bool, implementation: str) -> nn.Module:
    model = copy.deepcopy(plain)
    return tpk.parallelize(model, mesh, tpk.make_plan(model, mesh, sequence_parallel=parallel))


Make = Callable[[GPT, DeviceMesh, bool, str], nn.Module]


def _decoders(make: Make, place: Place, mesh: DeviceMesh, parallel: bool) -> Callable[[], Iterator[Trial]]:
    return lambda: (_decoder(make, place, mesh, parallel, dtype) for dtype in place.dtypes)


def _decoder(make: Make, place: Place, mesh: DeviceMesh, parallel: bool, dtype: torch.dtype) -> Trial:
    """One step of training: the loss, and the whole gradient of every parameter's part."""
    world = place.world_size
    sizes = Sizes(layers=2, width=8 * world, heads=2 * world, d_ff=13, vocabulary=29, length=4 * world + 3, batch=2)
    tokens, labels = (
        (payload((sizes.batch, sizes.length), torch.float64, name=name).abs() * 1e3).long() % sizes.vocabulary
        for name in ("tokens", "labels")
    )
    reference = _seeded(sizes).to(dtype).double()  # weights that are numbers of the dtype
    low = torch.float32 if dtype == torch.float64 else dtype
    exact = _step(reference, tokens, labels)
    rounded = _step(copy.deepcopy(reference).to(low), tokens, labels)
    scale = torch.finfo(dtype).eps / torch.finfo(low).eps
    limits = {
        name: FACTOR * scale * (float((rounded[name].double() - value).abs().max()) + _ulp(value, low))
        for name, value in exact.items()
    }

    def run(implementation: str) -> dict[str, Tensor]:
        plain = copy.deepcopy(reference).to(place.device, dtype)
        plain.zero_grad()
        model = make(plain, mesh, parallel, implementation)
        return _step(model, tokens.to(place.device), labels.to(place.device))

    skeleton = make(copy.deepcopy(reference), mesh, parallel, "auto")
    parts = {f"d{name}": _part(parameter, exact[f"d{name}"]) for name, parameter in skeleton.named_parameters()}
    bounds = {}
    for name, value in (exact | parts).items():
        bounds[name] = Bounded(value.double(), torch.full_like(value, limits[name], dtype=torch.float64))
    return Trial(f"{str(dtype).removeprefix('torch.')}, {sizes.length} tokens", run, bounds)


def _ulp(value: Tensor, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * float(value.abs().max())


def _seeded(sizes: Sizes) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(sizes)


def _step(model: nn.Module, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss and this rank's part of every gradient."""
    loss = model(tokens, labels)
    loss.backward()
    gradients: dict[str, Any] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | {f"d{name}": _local(grad) for name, grad in gradients.items()}


def _part(parameter: Tensor, whole: Tensor) -> Tensor:
    """What this rank has of a whole gradient."""
    if not isinstance(parameter, DTensor):
        return whole
    (placement,), mesh = parameter.placements, parameter.device_mesh
    whole = whole.view(parameter.shape)  # attention has a dimension for its heads
    if not isinstance(placement, Shard):
        return whole
    sizes, rank = chunk_sizes(whole.shape[placement.dim], mesh.size()), mesh.get_local_rank()
    return whole.narrow(placement.dim, offsets(sizes)[rank], sizes[rank])
