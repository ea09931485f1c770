"""The modules that a plan can cut: which ones they are, their sizes, and how another module takes their place.

They are ``nn.Linear``; the ``Conv1D`` of Hugging Face's GPT-2, a linear whose weight is transposed; ``nn.Embedding``;
and ``nn.MultiheadAttention`` for its heads.  A module is recognised by what it does, not by its type.  An instance of a
subclass counts if it overrides no more of torch's class than :data:`HARMLESS`, holds the same parameters and no
further modules, and a call runs torch's own ``forward``.  A ``forward`` of the subclass counts in two cases
(:mod:`tpkernels.planning.modules.own_code`): it is code around ``super().forward(x)``, which then runs around the
parallel layer, with its buffers; or it computes what torch's does.  So does a class that :func:`register_layer` was
told of.  A class that is none of torch's counts if its code multiplies by its own weight, and does no more
(:mod:`tpkernels.planning.modules.own_layers`); that code goes on around the parallel layer.  An ``nn.Linear`` whose
class was given another ``forward`` does not count.  Modules with hooks, parametrizations or a ``forward`` of the
instance stay as they are, because a swap would lose these.

A swapped layer is an instance of the parallel class.  It keeps the plain attributes of the old layer, and the methods
and class attributes that a subclass of torch's added.  If the parallel layer already has an attribute of that name, the
layer is not swapped; if it has a method of that name (``reset_parameters``, ``extra_repr``), the parallel layer's wins.
The swapped layer is no longer an instance of the old class (``isinstance``), and ``super()`` in a method that was kept
raises where the class has no ``forward`` of its own.

The ``out_proj`` of torch's attention (``NonDynamicallyQuantizableLinear``) is not cut by itself, because its owner
reads its weight instead of calling it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.copied_heads import CopiedHeadsLinear
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.multihead import ParallelMultiheadAttention
from tpkernels.nn.own_call import around_own_calls
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.nn.row import RowParallelLinear
from tpkernels.planning.modules.own_code import calls_super, computes_as_torch, rebased
from tpkernels.planning.modules.own_layers import OwnLayer, own_layer

__all__ = [
    "Layer",
    "is_attention",
    "kind_of",
    "as_torchs",
    "layer_of",
    "own_call",
    "own_base",
    "register_layer",
    "take_place",
    "unswappable",
]

HARMLESS = frozenset(
    ("__annotations__", "__class_getitem__", "__constants__", "__dict__", "__doc__", "__init__", "__init_subclass__")
) | frozenset(
    ("__module__", "__new__", "__repr__", "__subclasshook__", "__weakref__", "_get_name", "_version", "extra_repr")
) | frozenset(("reset_parameters", "_reset_parameters", "__annotate__", "__annotate_func__",
               "__firstlineno__", "__static_attributes__"))  # fmt: skip
"""What a subclass may override: nothing that a call, a conversion or a checkpoint goes through."""

_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: kind.forward for kind in (nn.Linear, nn.Embedding, nn.MultiheadAttention)
}
"""torch's own, from before anybody could replace them in its classes."""
_TEMPLATES: dict[type[nn.Module], nn.Module] = {kind: kind(1, 1, device="meta") for kind in _FORWARDS}
"""What torch's ``__init__`` makes; from before anybody could trace, who would leave fake tensors in a later one."""
_KINDS: dict[str, type[nn.Module]] = {"linear": nn.Linear, "embedding": nn.Embedding}
_REGISTERED: dict[type[nn.Module], type[nn.Module]] = {}
"""Classes that :func:`register_layer` was told of; as many as the program names."""
_CALLS = {name: getattr(nn.Module, name) for name in ("__call__", "_call_impl", "_wrapped_call_impl")}
_OURS = (
    ColumnParallelLinear, RowParallelLinear, PackedColumnParallelLinear, CopiedHeadsLinear, VocabParallelEmbedding,
    FeatureParallelEmbedding, ParallelMultiheadAttention,
)  # fmt: skip
_OPTIONS = ("activation", "gather_output", "implementation", "save_gathered", "sequence_dim", "sequence_parallel",
            "split_input", "transposed", "unit")  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """``kind``: "linear", "conv1d" (weight ``[in, out]``) or "embedding" (rows are ``in_features``)."""

    kind: str
    in_features: int
    out_features: int


def layer_of(module: nn.Module) -> Layer | None:
    """Sizes of a module that can be cut, or None."""
    base = _base_of(module)
    if base in _KINDS.values() and (type(module) in _REGISTERED or own_call(module) is not None):
        rows, columns = module.weight.shape  # type: ignore[misc]
        return Layer("linear", columns, rows) if base is nn.Linear else Layer("embedding", rows, columns)
    if base is nn.Linear and type(module) is not NonDynamicallyQuantizableLinear:
        linear = cast(nn.Linear, module)
        return Layer("linear", linear.in_features, linear.out_features)
    if base is nn.Embedding:
        table = cast(nn.Embedding, module)
        whole = table.max_norm is not None or table.sparse or table.scale_grad_by_freq
        return None if whole else Layer("embedding", table.num_embeddings, table.embedding_dim)
    if base is not None and base.__name__ == "Conv1D":
        rows, columns = module.weight.shape  # type: ignore[misc]
        return Layer("conv1d", rows, columns)
    return None


def register_layer(cls: type[nn.Module], kind: str) -> None:
    """Say that instances of ``cls`` compute what ``nn.Linear`` or ``nn.Embedding`` does, so that plans cut them.

    ``kind``: "linear" for ``y = x @ weight.T + bias``, "embedding" for ``y = weight[ids]``.  Instances must have a
    ``weight`` of two dimensions, perhaps a ``bias``, and no other parameters, buffers or modules; others stay whole.
    The class's own ``forward`` no longer runs in layers that are cut, and nothing compares it with torch's:
    ``parallelize(..., verify=True)`` does.  Subclasses are not registered with it.

    Examples:
        >>> class Projection(nn.Module):
        ...     def __init__(self, rows, columns):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(rows, columns))
        ...     def forward(self, x):
        ...         return x @ self.weight.T
        >>> tpk.register_layer(Projection, "linear")

    Raises:
        ValueError: another kind, no subclass of ``nn.Module``, or a class of torch's.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {list(_KINDS)}, got {kind!r}")
    given: Any = cls
    if not isinstance(given, type) or not issubclass(given, nn.Module) or given.__module__.split(".")[0] == "torch":
        raise ValueError(f"cls must be a subclass of nn.Module that is not torch's own, got {cls!r}")
    _REGISTERED[cls] = _KINDS[kind]


def own_call(module: nn.Module) -> OwnLayer | None:
    """As what a module of a class of its own computes, whose code makes one product with its own weight."""
    kind: Any = type(module)
    root: Any = nn.Module
    if isinstance(module, tuple(_FORWARDS)) or kind in _REGISTERED or kind.__name__ == "Conv1D":
        return None
    guarded = ({*dir(nn.Module), "__getattribute__"} | _names_of_ours()) - HARMLESS - {"forward"}
    if any(name in guarded for own in _own_classes(kind, root) for name in vars(own)):
        return None
    return own_layer(module)


def as_torchs(module: nn.Module) -> nn.Module:
    """``module``, or for an instance of a class that computes as torch's layer does that layer, with its parameters."""
    own = own_call(module)
    layer = layer_of(module) if type(module) in _REGISTERED or own is not None else None
    if layer is None:
        return module
    made: Any
    if layer.kind == "embedding":
        padding = None if own is None else own.padding
        made = nn.Embedding(layer.in_features, layer.out_features, padding_idx=padding, device="meta")
    else:
        made = nn.Linear(layer.in_features, layer.out_features, device="meta")
        made.register_parameter("bias", module._parameters.get("bias"))
    made.register_parameter("weight", module._parameters["weight"])
    return cast(nn.Module, made.train(module.training))


def is_attention(module: nn.Module) -> bool:
    """Whether it is torch's attention, or a subclass that computes as it does."""
    return _base_of(module) is nn.MultiheadAttention


def kind_of(module: nn.Module) -> str:
    """The class that a plan names: of a layer the one whose behaviour it has."""
    base = _base_of(module)
    return (base or type(module)).__name__


def unswappable(module: nn.Module) -> str | None:
    """What a swap would lose of ``module``, as a reason not to swap it; None if it loses nothing."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for hook in kinds if getattr(module, hook, None)]
    if hooks or getattr(module, "parametrizations", None):
        return f"has hooks or parametrizations ({hooks}), which a swap would lose"
    if "forward" in vars(module):
        return "has a forward of its own, which a swap would lose"
    taken = [name for name in _attributes(module) if name in _names_of_ours()]
    if own_call(module) is not None:  # of the others it may have those alone that the layer has as well
        known, named = vars(as_torchs(module)), vars(module).items()
        shared = [(name, value) for name, value in named if name in known and not name.startswith("_")]
        taken += [name for name, value in shared if not (type(value) is type(known[name]) and value == known[name])]
    if taken:
        return f"has attributes {taken}, names that a parallel layer uses itself"
    return None


def take_place(old: nn.Module, new: nn.Module) -> None:
    """Make ``old`` what ``new`` is, in place, so that every reference to it is one to the parallel layer."""
    classes: Any = type(new), type(old), _base_of(old) or type(old)
    base, own = own_base(old), own_call(old)
    kept, kind = _attributes(old), _with_members(*classes)
    if own is not None:
        code, layer = cast("tuple[Any, Any]", (rebased(type(old), nn.Module, type(new)), type(new)))
        kind = around_own_calls(code, layer)
        kept = {name: value for name, value in vars(old).items() if name not in new.__dict__}
    elif base is not None:
        kind = rebased(type(old), base, type(new))
    buffers = {"_buffers": old._buffers, "_non_persistent_buffers_set": old._non_persistent_buffers_set}
    old.__class__ = kind
    old.__dict__ = new.__dict__ | kept | (buffers if base is not None else {})


def _base_of(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch's, or Conv1D, whose behaviour ``module`` has."""
    kind: Any = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return cast("type[nn.Module]", kind)
    base: Any
    if kind in _REGISTERED:
        return _REGISTERED[kind] if _is_registered_like(module) else None
    for base, forward in _FORWARDS.items():
        if isinstance(module, base):
            calls = all(getattr(kind, key) is call for key, call in _CALLS.items())
            if not calls or base.forward is not forward:
                return None
            if kind.forward is forward:
                return base if _overrides_nothing(kind, base) and _holds_the_same(module, base) else None
            return base if own_base(module) is not None or _writes_out(module, base) else None
    own = own_call(module)
    return None if own is None else own.base


def _is_registered_like(module: nn.Module) -> bool:
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    allowed = {"weight"} if _REGISTERED[type(module)] is nn.Embedding else {"weight", "bias"}
    lazy = any(is_lazy(parameter) for parameter in own.values())
    return (
        "weight" in own and own.keys() <= allowed and not lazy and own["weight"].dim() == 2
        and not module._buffers and not module._modules
    )  # fmt: skip


def own_base(module: nn.Module) -> type[nn.Module] | None:
    """torch's class around whose ``forward``, or what computes as it does, the module's own code runs; None for every
    other module."""
    kind: Any = type(module)
    base: Any
    own = own_call(module)
    if own is not None:
        return own.base
    for base in (nn.Linear, nn.Embedding):
        if isinstance(module, base) and kind.forward is not _FORWARDS[base] and kind not in _REGISTERED:
            same = _overrides_nothing(kind, base, "forward") and _holds_the_same(module, base, buffers=True)
            return cast("type[nn.Module]", base) if same and calls_super(kind, base) else None
    return None


def _writes_out(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a ``forward`` of the class computes what torch's does, from nothing but the parameters."""
    kind: Any = type(module)
    known: Any = base
    plain = set(vars(module)) <= set(vars(_TEMPLATES[base])) | {"_compiled_call_impl", "_is_hf_initialized"}
    same = plain and _overrides_nothing(kind, known, "forward") and _holds_the_same(module, base)
    return same and computes_as_torch(kind, known, getattr(module, "bias", None) is not None)


@lru_cache(maxsize=256)
def _overrides_nothing(kind: type, base: type, *but: str) -> bool:
    made = _TEMPLATES[base]
    guarded = {*dir(base), *vars(made), *made._parameters, *made._modules, "__getattribute__", "__getattr__"} - HARMLESS
    return not any(name in guarded - set(but) for own in _own_classes(kind, base) for name in vars(own))


def _holds_the_same(module: nn.Module, base: type[nn.Module], *, buffers: bool = False) -> bool:
    if type(module) is base:
        return True
    inside = {"out_proj"} if base is nn.MultiheadAttention else set()
    same = set(module._parameters) == set(_TEMPLATES[base]._parameters) and set(module._modules) == inside
    made = not any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values())
    return same and made and (buffers or not module._buffers)


def _own_classes(kind: type, base: type) -> list[type]:
    """The classes of ``kind`` that ``base`` does not have, in the order of their right to a name, from the last."""
    return [own for own in reversed(kind.__mro__) if own not in base.__mro__]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes that the module was given beside those of its kind."""
    made = _TEMPLATES.get(_base_of(module) or type(module))
    known = {*vars(nn.Module()), "nf", "nx"} if made is None else set(vars(made))
    return {name: value for name, value in vars(module).items() if name not in known | {"_compiled_call_impl"}}


@lru_cache(maxsize=1)
def _names_of_ours() -> frozenset[str]:
    names = {name for kind in _OURS for name in (*dir(kind), *kind.__annotations__)}
    return frozenset((names | set(_OPTIONS)) - set(dir(nn.Module)))


@lru_cache(maxsize=256)
def _with_members(new: type, old: type, base: type) -> type:
    """``new`` with what a subclass of torch's layer added to its class, or ``new`` itself where that is nothing."""
    members: dict[str, Any] = {}
    for own in _own_classes(old, base):
        members |= {name: value for name, value in vars(own).items() if not name.startswith(("__", "_abc_"))}
    members = {name: value for name, value in members.items() if not hasattr(new, name)}
    if not members:
        return new
    members |= {"__module__": new.__module__, "__doc__": new.__doc__, "__qualname__": new.__qualname__}
    return type(new.__name__, (new,), members)
