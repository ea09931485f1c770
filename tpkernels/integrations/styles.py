"""Our layers as ``ParallelStyle`` s, for the plans of torch's ``parallelize_module``.

::

    from torch.distributed.tensor.parallel import parallelize_module
    from tpkernels.integrations.styles import ColumnParallel, Replicated, RowParallel

    parallelize_module(model, mesh["tp"], {"up": ColumnParallel(), "down": RowParallel(), "": Replicated()})

Owns how a style of a plan becomes a layer of :mod:`tpkernels.nn`, in place, and how its inputs and outputs pass between
plain tensors and DTensors.  ``input_layouts`` says what a plain tensor is that the module is called with: the whole
(``Replicate()``), or this rank's part (``Shard(dim)``).  A DTensor must have that layout, because to change it would be
a transfer that hides behind no GEMM.  ``output_layouts`` says what the module returns, and ``use_local_output`` whether
that is a plain tensor, this rank's own, or a DTensor.

Assumes that ``parallelize_module`` works through its plan in order: ``"": Replicated()`` comes last.  Weights that are
tied stay tied where both modules are cut alike.

Refuses layouts that no layer of ours has, modules whose behaviour a swap would lose, weights tied to something that is
cut otherwise, and a source rank other than the first.  What was replaced before an error stays replaced, as with
torch's styles.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.parameters import tp_mesh
from tpkernels.nn.replicated import Converted, replicate_parameters
from tpkernels.nn.retired import retires_parameters
from tpkernels.nn.row import RowParallelLinear
from tpkernels.nn.same_weights import compared, init_weights
from tpkernels.ops import all_gather, shard
from tpkernels.partition import chunk_sizes
from tpkernels.planning.modules.layers import layer_of, own_base, take_place, unswappable
from tpkernels.sharding.randomness import Fork

__all__ = ["ColumnParallel", "Replicated", "RowParallel", "SequenceParallel", "VocabParallel"]

_BECAME = "_tpkernels_became"
"""On a plain parameter that a style has replaced: what it became, for modules that are tied to it."""


class _Style(ParallelStyle):
    """What the styles share: layouts, the comparison of weights, hooks that pass DTensors in and out."""

    input_layouts: Placement
    output_layouts: Placement

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        super().__init__()
        for what, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if not isinstance(layout, Placement):
                raise ValueError(f"{type(self).__name__}: {what} must be Replicate() or Shard(dim), got {layout!r}")
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        text = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{type(self).__name__}({text}, use_local_output={self.use_local_output})"

    def _refuse(self, why: str) -> ValueError:
        return ValueError(
            f"{type(self).__name__} from {self.input_layouts} to {self.output_layouts} has no counterpart: {why}"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = tp_mesh(device_mesh, module)
        source = self.src_data_rank
        if source not in (0, None):
            raise ValueError(
                f"src_data_rank must be 0, for the weights of the mesh's first rank, or None, for each rank's own, got "
                f"{source}"
            )
        with compared() if source is None else init_weights("rank 0"):
            self._replace(module, mesh)
        self._install(module, mesh)
        return module

    def _install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        module.register_forward_pre_hook(lambda m, args, kwargs: self._enter(m, args, kwargs, mesh), with_kwargs=True)
        if not self.use_local_output:
            module.register_forward_hook(
                lambda m, args, kwargs, y: self._leave(m, args, kwargs, y, mesh), with_kwargs=True
            )

    def _replace(self, module: nn.Module, mesh: DeviceMesh) -> None:
        raise NotImplementedError

    def _enter(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        """The arguments of the layer, which takes plain tensors."""
        x, *rest = args
        if isinstance(x, DTensor):
            return (self._plain(module, x), *rest), kwargs
        return None

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor, mesh: DeviceMesh) -> DTensor:
        raise NotImplementedError

    def _plain(self, module: nn.Module, x: DTensor) -> Tensor:
        expected = _at(self.input_layouts, x.dim())
        if tuple(x.placements) != (expected,):
            raise ValueError(
                f"{type(self).__name__} of a {type(module).__name__} takes {expected}, and was called with a DTensor "
                f"of {tuple(x.placements)}: say so with input_layouts=, or redistribute it first"
            )
        return x.to_local()


class _LayerStyle(_Style):
    """A style that replaces a layer."""

    def _replace(self, module: nn.Module, mesh: DeviceMesh) -> None:
        layer, kind = layer_of(module), type(self).__name__
        if layer is None or own_base(module) is not None:  # code around torch's, which nobody has proven on parts
            raise ValueError(
                f"{kind} is for nn.Linear and nn.Embedding, and classes that compute as these do, not for "
                f"{type(module).__name__}"
            )
        why = unswappable(module)
        if why is not None:
            raise ValueError(f"{kind}: the {type(module).__name__} {why}")
        _swap(module, self._layer(module, mesh, table=layer.kind == "embedding"))

    def _layer(self, module: nn.Module, mesh: DeviceMesh, table: bool) -> nn.Module:
        raise NotImplementedError


class ColumnParallel(_LayerStyle):
    """``ColwiseParallel``, by :class:`tpkernels.nn.ColumnParallelLinear`; of a table its features.

    Args:
        input_layouts: ``Replicate()``, or ``Shard(dim)`` of the sequence, which the op gathers.
        output_layouts: ``Shard(-1)``, or ``Replicate()``: the layer gathers its columns.
        use_local_output: return plain tensors.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        implementation: str = "auto",
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)
        self.implementation = implementation
        if not (self.input_layouts.is_replicate() or _sequence(self.input_layouts) is not None):
            raise self._refuse("a column layer takes all features of x, or this rank's part of the sequence")
        if not (self.output_layouts.is_replicate() or self.output_layouts == Shard(-1)):
            raise self._refuse("a column layer returns Shard(-1), its own columns, or Replicate(), all of them")

    def _layer(self, module: nn.Module, mesh: DeviceMesh, table: bool) -> nn.Module:
        gathers, dim = self.output_layouts.is_replicate(), _sequence(self.input_layouts)
        if table:
            if dim is not None:
                raise self._refuse("a table takes whole sequences of ids")
            return FeatureParallelEmbedding.from_embedding(cast(nn.Embedding, module), mesh, gather_output=gathers)
        return ColumnParallelLinear.from_linear(
            module,
            mesh,
            sequence_parallel=dim is not None,
            sequence_dim=-2 if dim is None else dim,
            gather_output=gathers,
            implementation=self.implementation,
        )

    def _enter(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        x, dim = args[0], _sequence(self.input_layouts)
        found = super()._enter(module, args, kwargs, mesh)
        if found is None or dim is None:
            return found
        return found[0], {**kwargs, "shard_sizes": chunk_sizes(x.shape[dim], mesh.size())}

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor, mesh: DeviceMesh) -> DTensor:
        features = module.embedding_dim if isinstance(module, FeatureParallelEmbedding) else module.out_features
        return _whole(y, self.output_layouts, mesh, y.dim() - 1, cast(int, features))


class RowParallel(_LayerStyle):
    """``RowwiseParallel``, by :class:`tpkernels.nn.RowParallelLinear`; of a table its vocabulary.

    Args:
        input_layouts: ``Shard(-1)``, or ``Replicate()``: each rank takes its features; of a table ``Replicate()``.
        output_layouts: ``Replicate()``, or ``Shard(dim)`` of the sequence, by a reduce-scatter.
        use_local_output: return plain tensors.
        implementation: "auto" or a name listed by :func:`tpkernels.explain`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        implementation: str = "auto",
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)
        self.implementation = implementation
        if not (self.input_layouts.is_replicate() or self.input_layouts == Shard(-1)):
            raise self._refuse("a row layer takes Shard(-1), this rank's features, or Replicate(), all of them")
        if not (self.output_layouts.is_replicate() or _sequence(self.output_layouts) is not None):
            raise self._refuse("a row layer returns Replicate(), or this rank's part of the sequence")

    def _layer(self, module: nn.Module, mesh: DeviceMesh, table: bool) -> nn.Module:
        dim = _sequence(self.output_layouts)
        options: dict[str, Any] = {
            "sequence_parallel": dim is not None,
            "sequence_dim": -2 if dim is None else dim,
            "implementation": self.implementation,
        }
        if table:
            if not self.input_layouts.is_replicate():
                raise self._refuse("every rank looks up all ids, so a table takes Replicate()")
            return VocabParallelEmbedding.from_embedding(cast(nn.Embedding, module), mesh, **options)
        return RowParallelLinear.from_linear(module, mesh, split_input=self.input_layouts.is_replicate(), **options)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        found = super()._enter(module, args, kwargs, mesh)
        dim = _sequence(self.output_layouts)
        if dim is None:
            return found
        sizes = chunk_sizes(_length(module, args[0], dim), mesh.size())  # as Shard cuts, which is not the ops' default
        return (args if found is None else found[0]), {**kwargs, "shard_sizes": sizes}

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor, mesh: DeviceMesh) -> DTensor:
        dim = _sequence(self.output_layouts)
        if dim is None:
            return _whole(y, Replicate(), mesh, 0, y.shape[0])
        return _whole(y, self.output_layouts, mesh, dim % y.dim(), sum(kwargs["shard_sizes"]))


class VocabParallel(RowParallel):
    """``RowwiseParallel`` of a table, whose vocabulary is cut, by :class:`tpkernels.nn.VocabParallelEmbedding`.

    Every rank has all ids: ``input_layouts`` is ``Replicate()``.  The rest is as in :class:`RowParallel`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        implementation: str = "auto",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts or Replicate(),
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            implementation=implementation,
        )
        if not self.input_layouts.is_replicate():
            raise self._refuse("every rank looks up all ids")

    def _layer(self, module: nn.Module, mesh: DeviceMesh, table: bool) -> nn.Module:
        if not table:
            raise ValueError(f"VocabParallel is for nn.Embedding, not for {type(module).__name__}")
        return super()._layer(module, mesh, table)


class SequenceParallel(_Style):
    """A norm or a dropout on this rank's part of the sequence; gradients of its parameters are summed over the ranks.

    Args:
        sequence_dim: the dimension that is cut.
        input_layouts: ``Shard(sequence_dim)``, or ``Replicate()``: each rank takes its part.
        output_layouts: ``Shard(sequence_dim)``, or ``Replicate()``: the parts are gathered.
        use_local_output: return plain tensors; as in torch's style not by default.

    Plain parts must be of one length on all ranks; DTensors may be uneven.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        cut = Shard(sequence_dim)
        super().__init__(input_layouts or cut, output_layouts or cut, use_local_output)
        self.sequence_dim = sequence_dim
        if any(not layout.is_replicate() and layout != cut for layout in (self.input_layouts, self.output_layouts)):
            raise self._refuse(f"the module works on {cut}")

    def _replace(self, module: nn.Module, mesh: DeviceMesh) -> None:
        _replicate(module, mesh, sequence_parallel=True)
        if any(isinstance(one, nn.modules.dropout._DropoutNd) for one in module.modules()):
            _draw_differently(module, mesh)

    def _install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        dim, totals = self.sequence_dim, _Totals()

        def enter(module: nn.Module, args: Any) -> Any:
            x, *rest = args
            whole = isinstance(x, DTensor) or self.input_layouts.is_replicate()
            totals.length = x.shape[dim] if whole else x.shape[dim] * mesh.size()
            x = self._plain(module, x) if isinstance(x, DTensor) else x
            if self.input_layouts.is_replicate() and mesh.size() > 1:
                x = shard(x, mesh, dim=dim, shard_sizes=chunk_sizes(totals.length, mesh.size()))
            return (x, *rest)

        def leave(module: nn.Module, args: Any, y: Tensor) -> Tensor | None:
            layout = self.output_layouts
            if layout.is_replicate() and mesh.size() > 1:
                sizes = chunk_sizes(totals.length, mesh.size())
                y = all_gather(y, mesh, dim=dim, shard_sizes=sizes, replicated_grad=True)
            return y if self.use_local_output else _whole(y, layout, mesh, dim % y.dim(), totals.length)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


class _Totals:
    """What a hook before a call tells the one after it."""

    length = 0


class Replicated(_Style):
    """A module of any kind stays whole on every rank: its parameters, and those inside, become replicated DTensors.

    Under ``""``, as the last entry of a plan, it makes the rest of the model DTensors, so that optimizers and
    ``torch.nn.utils.clip_grad_norm_`` see one kind of parameter; torch's norm refuses a mixture.

    Args:
        input_layouts, output_layouts: ``Replicate()``, the only one there is.
        use_local_output: return plain tensors; otherwise the one tensor that the module returns becomes a DTensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Replicate(), use_local_output)
        if not (self.input_layouts.is_replicate() and self.output_layouts.is_replicate()):
            raise self._refuse("every rank has the whole of what it takes and returns")

    def _replace(self, module: nn.Module, mesh: DeviceMesh) -> None:
        _replicate(module, mesh, sequence_parallel=False)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        plain = [self._plain(module, x) if isinstance(x, DTensor) else x for x in args]
        return tuple(plain), {k: self._plain(module, x) if isinstance(x, DTensor) else x for k, x in kwargs.items()}

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor, mesh: DeviceMesh) -> DTensor:
        if not isinstance(y, Tensor):
            raise ValueError(
                f"Replicated(use_local_output=False) is for modules that return a tensor; the {type(module).__name__} "
                f"returned a {type(y).__name__}"
            )
        return _whole(y, Replicate(), mesh, 0, y.shape[0] if y.dim() else 0)


@retires_parameters
def _swap(module: nn.Module, new: nn.Module) -> nn.Module:
    """``new`` takes the place of ``module``; a parameter that another style has replaced already is that one's."""
    made: list[tuple[nn.Parameter, nn.Parameter]] = []
    for name, parameter in new.named_parameters(recurse=False):
        plain = module._parameters[name]
        assert plain is not None
        known = getattr(plain, _BECAME, None)
        if known is not None:
            if known.placements != cast(DTensor, parameter).placements:
                raise ValueError(
                    f"the {name} of this {type(module).__name__} is tied to one that has become a DTensor of "
                    f"{known.placements}: cut both alike (VocabParallel() and ColumnParallel(), say)"
                )
            new._parameters[name] = known
        made.append((plain, parameter if known is None else known))
    take_place(module, new)
    for plain, parameter in made:
        setattr(plain, _BECAME, parameter)
    return module


def _replicate(module: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    converted: Converted = {}
    for name, parameter in module.named_parameters():
        known = getattr(parameter, _BECAME, None)
        if known is not None and not known.placements[0].is_replicate():
            raise ValueError(
                f"{name} is tied to a parameter that is cut ({known.placements}), and would come apart from it: name "
                "its module in the plan, too, before this one"
            )
        if known is not None:
            converted[id(parameter)] = parameter, known
    replicate_parameters(module, mesh, sequence_parallel=sequence_parallel, converted=converted)
    for plain, parameter in converted.values():
        setattr(plain, _BECAME, parameter)


def _draw_differently(module: nn.Module, mesh: DeviceMesh) -> None:
    """In training this rank's part has random numbers of its own, and what follows has those of all ranks."""
    if mesh.size() == 1:
        return
    fork = Fork()

    def enter(module: nn.Module, args: Any) -> None:
        fork.forget()
        if module.training:
            fork.enter(args[0].device, mesh.get_local_rank())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: fork.leave(), always_call=True)


def _sequence(layout: Placement) -> int | None:
    """The dimension of a sequence that ``layout`` cuts, or None."""
    return layout.dim if isinstance(layout, Shard) and layout.dim != -1 else None


def _at(layout: Placement, dims: int) -> Placement:
    return Shard(layout.dim % dims) if isinstance(layout, Shard) else layout


def _length(module: nn.Module, x: Tensor, dim: int) -> int:
    """The whole length of ``dim`` of what a row layer returns; ids have no dimension for features."""
    return x.shape[dim + 1 if dim < 0 and isinstance(module, VocabParallelEmbedding) else dim]


def _whole(y: Tensor, layout: Placement, mesh: DeviceMesh, dim: int, length: int) -> DTensor:
    """This rank's ``y`` as a DTensor, whose ``dim`` is ``length`` long where it is cut."""
    layout = _at(layout, y.dim())
    shape = list(y.shape)
    if isinstance(layout, Shard):
        assert layout.dim == dim, (layout, dim)
        shape[dim] = length
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y.contiguous(), mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)
