"""The experts of a model's own class, cut in place: same calls, same state, this rank's slice of each, or some whole.

It owns how a module that holds all experts in 3-dimensional parameters becomes a parallel one: which layout it has
(:class:`ExpertsLayout`), how its parameters are cut, and a forward that takes the arguments of the old one::

    z = x[token] @ first[e]^T + b            a row per token and expert; e: the expert
    y = sum over a token's rows of routing weight * behind(gate(z) @ last[e]^T + c)

A module that has one matrix per expert, and takes rows in the order of their experts, gives ``x @ first[e]^T`` of each
row, gathered over the ranks: what is before and behind it is code of the model's, on whole rows.

It assumes that the layout is right.  :mod:`tpkernels.planning.modules.experts` compares it with the module's own
forward. :class:`~tpkernels.nn.ParallelExperts` is for models that are written with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpkernels.comm.same_bits import same_bits_of
from tpkernels.nn.dealt_experts import DealtWeights, run_dealt
from tpkernels.nn.parameters import as_parameter, local, mesh_of, replicate_parameter, shard_parameter
from tpkernels.ops import Routing, all_gather, copy_grouped_matmul, grouped_matmul_all_reduce
from tpkernels.ops.contract import GATED, activation_forward, gate_forward
from tpkernels.partition import chunk_sizes

__all__ = [
    "CutExperts",
    "ExpertsLayout",
    "arguments_of",
    "call_inner",
    "called_with",
    "caller_of",
    "experts_output",
    "gated",
    "held_parts",
    "identity_weights",
    "matrices_of",
    "routed",
    "sorted_rows",
]


@dataclass(frozen=True)
class ExpertsLayout:
    """What a module of experts computes, and from which parameters; biases are called ``{name}_bias``."""

    first: str = "gate_up_proj"
    """``[E, F, H]``; ``[E, 2 * F, H]`` with "halves" and "pairs"."""
    second: str = ""
    """With "separate": the parameter of up, and ``first`` is that of the gate."""
    last: str = "down_proj"
    """``[E, H, F]``."""
    gate: str = "halves"
    """"halves": the gate's features before those of up; "pairs": one of each in turn; "separate"; "" for no gate."""
    transposed: bool = False
    """The last two dimensions are the other way round."""
    activation: str = "swiglu"
    """One of the ops'; or the module's own: ".name" of one tensor, "name()" of what ``first`` gives."""
    call: str = "routed"
    """"routed": called with tokens, and with the experts and weights of each; "blocks": with as many rows for each
    expert, in the order of the experts; "all": with tokens of any dimensions, and a weight of each for every expert;
    "sorted", with ``first`` alone: with rows in that order, and a list of how many
    each expert has."""
    behind: str = ""
    """A module of the experts' own, such as a norm, that takes each row which ``last`` gives; whole on every rank."""
    identity: bool = False
    """Experts beyond those of ``last`` give what they take, whatever ``first`` has for them."""
    rows: int = 0
    """How many rows of two-dimensional matrices ``[E * F, H]``, ``last`` among them, are one expert's.  The module
    around the one that has them is called, with sequences; whole experts are dealt out."""

    @property
    def firsts(self) -> tuple[str, ...]:
        return (self.first, self.second) if self.second else (self.first,)

    @property
    def gates_in_op(self) -> bool:
        """Whether the op that multiplies also gates; else code of the module does."""
        return self.gate in ("halves", "separate") and self.activation in GATED

    @property
    def is_plain(self) -> bool:
        """Whether the tokens of a call meet experts, and nothing but these, and become weighted sums."""
        return self.call in ("routed", "blocks") and not (self.behind or self.identity or self.rows)

    @property
    def features(self) -> int:
        """The dimension of the features of ``first`` that is cut."""
        return 2 if self.transposed else 1


def held_parts(layout: ExpertsLayout, name: str, whole: Tensor) -> list[tuple[str, Tensor, int | None]]:
    """What a cut module holds of a parameter: names, tensors, and the dimension along which each is cut."""
    if layout.rows:
        whole = whole.unflatten(0, (-1, layout.rows))
        return [(name, whole.transpose(1, 2), 2) if name == layout.last else (name, whole, 1)]
    bias = name.endswith("_bias")
    if name.removesuffix("_bias") == layout.last:
        return [(name, whole, None if bias else 3 - layout.features)]
    dim = 1 if bias else layout.features
    if layout.gate == "halves":
        return [(f"{name}_of_{part}", half, dim) for part, half in zip(_HALVES, whole.chunk(2, dim), strict=True)]
    return [(name, whole.unflatten(dim, (-1, 2)) if layout.gate == "pairs" else whole, dim)]


_HALVES = ("gate", "up")


def matrices_of(layout: ExpertsLayout, held: Mapping[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """``[E, features, H]`` and biases ``[E, features]``: those of gate and up, or one for both in turn."""
    matrices, biases = [], []
    for first in layout.firsts:
        for part in _HALVES if layout.gate == "halves" else ("",):
            suffix = f"_of_{part}" if part else ""
            matrix, bias = cast(Tensor, held[first + suffix]), held.get(f"{first}_bias{suffix}")
            if layout.gate == "pairs":
                matrix = matrix.flatten(layout.features, layout.features + 1)
                bias = None if bias is None else bias.flatten(1)
            matrices.append(matrix.transpose(1, 2) if layout.transposed else matrix)
            biases.append(bias)
    return matrices, biases


def gated(module: nn.Module, layout: ExpertsLayout, products: Sequence[Tensor]) -> Tensor:
    """What goes into ``last``: the activation of what the matrices gave, rows by features."""
    how = layout.activation
    if how.endswith("()"):
        joined = products[0] if len(products) == 1 else torch.cat(list(products), -1)
        return cast(Tensor, getattr(module, how[:-2])(joined))
    own = getattr(module, how[1:]) if how.startswith(".") else None
    if not layout.gate:
        return cast(Tensor, own(products[0])) if own is not None else activation_forward(how or None, products[0])
    gate, up = (products[0][..., 0::2], products[0][..., 1::2]) if layout.gate == "pairs" else products
    return cast(Tensor, own(gate) * up) if own is not None else gate_forward(how, gate, up)


def arguments_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the forward's parameters ``names``."""
    return [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]


def routed(layout: ExpertsLayout, given: Sequence[Any], num_experts: int) -> tuple[Tensor, Routing] | None:
    """The tokens of a call and their routing, or None for a call that is none of this layout's."""
    if not all(isinstance(one, Tensor) for one in given) or len(given) != {"routed": 3, "all": 2}.get(layout.call, 1):
        return None
    x, *others = given
    if layout.call == "all":
        weights = others[0]
        of_tokens = x.dim() > 1 and x.numel() * num_experts == weights.numel() * x.shape[-1]
        if not of_tokens or not x.is_floating_point() or not weights.is_floating_point():
            return None
        tokens, weights = x.reshape(-1, x.shape[-1]), weights.reshape(-1, num_experts)
        return tokens, Routing(torch.arange(num_experts, device=x.device).repeat(len(tokens), 1), weights)
    if x.dim() != (3 if layout.rows else 2) or not x.is_floating_point():
        return None
    x = x.flatten(0, -2)
    if layout.call == "blocks":
        if x.shape[0] % num_experts:
            return None
        rows = torch.arange(num_experts, device=x.device).repeat_interleave(x.shape[0] // num_experts)
        return x, Routing(rows[:, None], x.new_ones(x.shape[0], 1))
    chosen = [one for one in others if not one.is_floating_point()]
    weights = [one for one in others if one.is_floating_point()]
    if len(chosen) != 1 or chosen[0].dim() != 2 or chosen[0].shape != weights[0].shape:
        return None
    return x, Routing(chosen[0].long(), weights[0])


def sorted_rows(given: Sequence[Any], num_experts: int) -> tuple[Tensor, list[int]] | None:
    """The rows of a call of a "sorted" layout, and how many each expert has, or None for another call."""
    if len(given) != 2 or not isinstance(given[0], Tensor) or not isinstance(given[1], list):
        return None
    x, sizes = given
    fits = x.dim() == 2 and x.is_floating_point() and len(sizes) == num_experts
    return (x, sizes) if fits and all(type(size) is int for size in sizes) else None


def called_with(layout: ExpertsLayout, given: Sequence[Any], num_experts: int) -> tuple[Tensor, int] | None:
    """The tokens of a call, and how many rows they make for the experts, or None for none of this layout's."""
    if layout.call == "sorted":
        rows = sorted_rows(given, num_experts)
        return None if rows is None else (rows[0], len(rows[0]))
    call = routed(layout, given, num_experts)
    return None if call is None else (call[0], call[1].experts.numel())


def experts_output(
    module: nn.Module,
    layout: ExpertsLayout,
    held: Mapping[str, Tensor | None],
    given: Sequence[Any],
    mesh: DeviceMesh,
    implementation: str = "auto",
    *,
    dealt: int | None = None,
) -> Tensor:
    """What the experts give for a call, whole on every rank, from this rank's parts of the parameters.

    Args:
        module: whose gate it is, where the layout names one of the module's own.
        held: the local tensors, by the names that :func:`held_parts` gives them.
        given: the arguments in the order of the old forward's.
        dealt: how many experts there are, where this rank has some of them, whole.

    Raises:
        ValueError: the arguments are not those of the layout.
    """
    if layout.call == "sorted":
        return _gathered(module, layout, held, given, mesh, implementation)
    last = layout.last
    down = cast(Tensor, held[last])
    found = routed(layout, given, down.shape[0] if dealt is None else dealt)
    if found is None:
        shapes = [tuple(one.shape) for one in given if isinstance(one, Tensor)]
        expected = {
            "routed": f"{'sequences' if layout.rows else 'tokens'}, experts and weights, as their own model gives them",
            "blocks": "a block of rows for each expert",
            "all": "tokens, and a weight of each for every expert",
        }[layout.call]
        raise ValueError(f"these experts take {expected}, got shapes {shapes}")
    x, routing = found
    matrices, biases = matrices_of(layout, held)
    taken = routing
    if layout.identity:
        routing = _without_identity(taken, len(down))
        matrices = [matrix[: len(down)] for matrix in matrices]
    rows = _each_by_itself(routing) if layout.behind else routing
    in_op = layout.gates_in_op
    last_matrix, last_bias = down.transpose(1, 2) if layout.transposed else down, held.get(f"{last}_bias")
    if dealt is not None:
        x = x.repeat_interleave(routing.experts.shape[1], 0) if layout.behind else x
        y = run_dealt(
            mesh, x, rows, DealtWeights(matrices, biases, last_matrix, last_bias), dealt,
            activation=layout.activation if in_op else None, own_tokens=False, implementation=implementation,
            gate=None if in_op else lambda products: gated(module, layout, products),
        )  # fmt: skip
        return _as_taken(module, layout, y, routing, given[0])
    products = copy_grouped_matmul(
        x, matrices, routing, mesh, bias=biases, activation=layout.activation if in_op else None,
        implementation=implementation,
    )  # fmt: skip
    h = cast(Tensor, products) if in_op else _gated_by_blocks(module, layout, products, mesh)
    y = grouped_matmul_all_reduce(h, last_matrix, rows, mesh, bias=last_bias, implementation=implementation)
    if layout.identity:
        y = y + (x * identity_weights(taken, len(down))).to(y.dtype)
    return _as_taken(module, layout, y, routing, given[0])


def _gated_by_blocks(module: nn.Module, layout: ExpertsLayout, products: Sequence[Tensor], mesh: DeviceMesh) -> Tensor:
    """:func:`gated`; with ``same_bits`` for one block of features after the other, so that the calls that the module's
    own code makes have the same sizes at every degree."""
    blocks = same_bits_of(mesh) // mesh.size()
    if not blocks:
        return gated(module, layout, products)
    by_block = zip(*(product.chunk(blocks, 1) for product in products), strict=True)
    return torch.cat([gated(module, layout, [part.contiguous() for part in parts]) for parts in by_block], 1)


def _gathered(
    module: nn.Module,
    layout: ExpertsLayout,
    held: Mapping[str, Tensor | None],
    given: Sequence[Any],
    mesh: DeviceMesh,
    implementation: str,
) -> Tensor:
    whole = cast(Tensor, module._parameters[layout.first])
    num_experts, features = whole.shape[0], whole.shape[layout.features]
    found = sorted_rows(given, num_experts)
    if found is None or sum(found[1]) != found[0].shape[0]:
        what = [tuple(one.shape) if isinstance(one, Tensor) else one for one in given]
        raise ValueError(f"these experts take rows, and a list of how many each of {num_experts} has, got {what}")
    x, counts = found
    (w,), _ = matrices_of(layout, held)
    parts = chunk_sizes(features, mesh.size())
    experts = torch.arange(num_experts, device=x.device)
    chosen = experts.repeat_interleave(torch.tensor(counts, device=x.device), output_size=len(x))[:, None]
    routing = Routing(chosen, torch.ones_like(chosen, dtype=x.dtype))
    y = copy_grouped_matmul(x, w, routing, mesh, implementation=implementation)
    return all_gather(y, mesh, dim=1, shard_sizes=parts, replicated_grad=True)


def identity_weights(routing: Routing, num_experts: int) -> Tensor:
    """What each token is weighted with in the sum of experts beyond ``num_experts``: ``[T, 1]``."""
    return (routing.weights * (routing.experts >= num_experts)).sum(1, keepdim=True)


def _without_identity(routing: Routing, num_experts: int) -> Routing:
    """A routing whose further experts weigh nothing; their rows are spread over the others."""
    return Routing(routing.experts % num_experts, routing.weights * (routing.experts < num_experts))


def _each_by_itself(routing: Routing) -> Routing:
    """The routing under which every row of a token and an expert is summed over the ranks, and over nothing else."""
    return Routing(routing.experts.reshape(-1, 1), torch.ones_like(routing.weights).reshape(-1, 1))


def _as_taken(module: nn.Module, layout: ExpertsLayout, y: Tensor, routing: Routing, taken: Tensor) -> Tensor:
    """Tokens like those ``taken``: ``y``, or what a module behind the experts makes of the rows ``y``, weighted."""
    if layout.behind:
        rows = getattr(module, layout.behind)(y).unflatten(0, routing.weights.shape)
        y = cast(Tensor, rows * routing.weights[..., None]).sum(1).to(y.dtype)
    return y.view(taken.shape) if layout.call == "all" or layout.rows else y


class CutExperts(nn.Module):
    """The experts of another class, of which this rank has a slice; made by :meth:`of`, an instance of both classes."""

    experts_layout: ExpertsLayout
    experts_implementation: str
    experts_dealt: bool
    """Each rank has some whole experts; else a slice of the features of each."""
    takes: tuple[str, ...]
    """Names of the parameters of the old forward."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        layout: ExpertsLayout,
        mesh: DeviceMesh,
        implementation: str = "auto",
        dealt: bool = False,
        made_of: dict[tuple[int, str], nn.Parameter] | None = None,
    ) -> CutExperts:
        """A parallel module in the place of ``module``, which stays as it is; all ranks call it.

        ``made_of``: parts that were made of parameters, by their ids and the parts' names, for modules that share them.
        """
        kind = _subclass_of(type(module))  # type: ignore[arg-type]
        made = kind.__new__(kind)
        made.__dict__ = dict(module.__dict__) | {"_parameters": {}}
        known = {} if made_of is None else made_of
        for name, whole in module._parameters.items():
            assert whole is not None
            parts: list[tuple[str, Tensor, int | None]] = [(name, whole.detach(), 0)]
            for part, tensor, dim in parts if dealt else held_parts(layout, name, whole.detach()):
                key, trained = (id(whole), part), whole.requires_grad
                if key not in known:
                    known[key] = (
                        replicate_parameter(tensor, mesh, requires_grad=trained) if dim is None
                        else shard_parameter(tensor, mesh, dim, requires_grad=trained)
                    )  # fmt: skip
                made._parameters[part] = known[key]
        made.__dict__ |= {
            "experts_layout": layout, "experts_implementation": implementation, "experts_dealt": dealt,
        }  # fmt: skip
        return made

    @classmethod
    def of_cut(cls, module: nn.Module, layout: ExpertsLayout, mesh: DeviceMesh) -> CutExperts:
        """The same, of a module whose parameters are cut by features already, each half of a packed one by itself."""
        kind = _subclass_of(type(module))  # type: ignore[arg-type]
        made = kind.__new__(kind)
        made.__dict__ = dict(module.__dict__) | {"_parameters": {}}
        for name, whole in module._parameters.items():
            assert whole is not None
            for part, tensor, dim in held_parts(layout, name, cast(Tensor, local(whole)).detach()):
                if dim is None:
                    made._parameters[part] = replicate_parameter(tensor, mesh, requires_grad=whole.requires_grad)
                    continue
                shape = list(tensor.shape)
                shape[dim] = whole.shape[dim] // (1 if part == name else len(_HALVES))
                stride = torch.empty(shape, device="meta").stride()
                cut = DTensor.from_local(
                    tensor.contiguous(), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
                )
                made._parameters[part] = as_parameter(cut, whole.requires_grad)
        made.__dict__ |= {"experts_layout": layout, "experts_implementation": "auto", "experts_dealt": False}
        return made

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the parameters live on."""
        return mesh_of(cast(Tensor, next(iter(self._parameters.values()))))

    def packed_parameters(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The parameters that were halves: along which dimension which of this module's make them up."""
        if self.experts_layout.gate != "halves" or self.experts_dealt:
            return {}
        first, bias = self.experts_layout.first, f"{self.experts_layout.first}_bias"
        names = {first: self.experts_layout.features, bias: 1}
        parts = {name: tuple(f"{name}_of_{part}" for part in _HALVES) for name in names}
        return {name: (dim, parts[name]) for name, dim in names.items() if parts[name][0] in self._parameters}

    def parameters_by_unit(self) -> dict[str, int]:
        """The parameters of pairs have a dimension for them, before this one of the original."""
        if self.experts_dealt:
            return {}
        names = {self.experts_layout.first: self.experts_layout.features, f"{self.experts_layout.first}_bias": 1}
        return {
            name: dim for name, dim in names.items() if self.experts_layout.gate == "pairs" and name in self._parameters
        }

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module gave before, whole on every rank, from the same arguments."""
        held = {name: local(parameter) for name, parameter in self._parameters.items()}
        given, num_experts = arguments_of(self.takes, args, kwargs), None
        if self.experts_dealt:  # of its experts a rank has all parts
            num_experts = len(cast(Tensor, self._parameters[self.experts_layout.last]))
            num_experts //= self.experts_layout.rows or 1
            parts = [held_parts(self.experts_layout, name, one) for name, one in held.items() if one is not None]
            held = {part: tensor for of_one in parts for part, tensor, _ in of_one}
        return experts_output(
            self, self.experts_layout, held, given, self.mesh, self.experts_implementation, dealt=num_experts
        )


def caller_of(name: str, layout: ExpertsLayout) -> str:
    """The module that is called for the experts ``name``: itself, or the one around it."""
    return name.rpartition(".")[0] if layout.rows else name


def call_inner(outer: nn.Module, name: str) -> None:
    """Let a call of ``outer`` be one of its :class:`CutExperts` ``name``."""
    made = getattr(outer, name)
    made.__dict__["takes"] = tuple(inspect.signature(type(outer).forward).parameters)[1:]
    outer.__class__ = _calling(type(outer), name)  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def _calling(kind: type[nn.Module], name: str) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return cast(Tensor, getattr(self, name)(*args, **kwargs))

    members = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return cast("type[nn.Module]", type(kind.__name__, (kind,), members))


@lru_cache(maxsize=256)
def _subclass_of(kind: type[nn.Module]) -> type[CutExperts]:
    """A class that calls as :class:`CutExperts` does, and has what else ``kind`` has, such as its gate."""
    takes = tuple(inspect.signature(kind.forward).parameters)[1:]
    members = {"takes": takes, "__module__": CutExperts.__module__, "__doc__": kind.__doc__}
    return cast("type[CutExperts]", type(kind.__name__, (CutExperts, kind), members))
