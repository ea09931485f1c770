"""Our ops behind the names of transformers' styles: ``tp_plan="auto"`` and ``DistributedConfig(tp_size=N)`` run them.

::

    import tpkernels.integrations.transformers as tpk_transformers

    tpk_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, tp_plan="auto")

transformers cuts and loads the parameters as it always does.  A layer keeps its class, its names and its parameters;
its ``forward`` becomes that of one of our layers on the very same parameters.  Query, key and value run as one op, as
do gate and up.

Owns what runs behind each name, and the account of it (:class:`Registration`).  A module that keeps transformers'
``forward`` although it communicates is named in one line, with the reason; with ``strict=True`` it raises.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tpkernels.integrations.transformers import private_names
from tpkernels.integrations.transformers.adapters import check_half, is_adapter, let_adapters_merge
from tpkernels.integrations.transformers.experts import experts_forward
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.embedding import VocabParallelEmbedding
from tpkernels.nn.feature_embedding import FeatureParallelEmbedding
from tpkernels.nn.row import RowParallelLinear
from tpkernels.nn.shared_input import SharedInput
from tpkernels.planning.modules.experts import KnownExperts, Refused

__all__ = ["Registration", "register"]

OURS = {
    "colwise": "column",
    "packed_colwise": "column",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "rowwise": "row",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "features",
    "moe_tp_experts": "experts",
}
"""What runs behind which of transformers' names."""
SENDS_NOTHING = frozenset(
    {"replicate", "local_params", "moe_identity_expert", "replicated_with_grad_allreduce", "sequence_parallel"}
)
"""Names with no op to replace: the gradients of the last two are the parameters' own business."""
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""Layers of one parent that read the same tensor."""

_active: list[Registration] = []


class Registration:
    """What :func:`register` did, and what came of it; ``remove()`` or the end of a ``with`` block undoes it.

    Models that were loaded before keep what they have.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.used: dict[str, str] = {}
        """The modules that run our ops, by name, and which."""
        self.not_used: dict[str, str] = {}
        """Those that do not, and why; layers that differ in a number only are one."""
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._together: dict[tuple[str, str, int], list[tuple[str, ColumnParallelLinear]]] = {}
        self._keys: list[str] = []
        self._experts: dict[Any, KnownExperts | Refused] = {}

    def remove(self) -> None:
        """Give transformers its own styles back."""
        registry = private_names.styles()
        for key in self._keys:
            del registry[key]
        self._keys = []
        if self in _active:
            _active.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.remove()

    # ------------------------------------------------------------------ for the styles

    def note_name(self, module: nn.Module, parameter: str) -> None:
        """transformers tells the name of a module with each of its parameters, before it asks for its forward."""
        self._names[module] = parameter.rpartition(".")[0]

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, f"a {type(module).__name__} without parameters of its own")

    def take(self, module: nn.Module, what: str, mesh: DeviceMesh) -> bool:
        """Let ``module`` run our layer; False where it cannot."""
        if what == "experts":
            return self._take_experts(module, mesh)
        why = _why_not(module, what)
        if why is not None:
            self.leave(module, why)
            return False
        name = self.name_of(module)
        if is_adapter(name):
            check_half(name, module, mesh)
        layer = _layer(module, what)
        module.forward = _Forward(layer, mesh, what)
        self.used[name] = f"{type(layer).__name__} ({what})"
        if is_adapter(name):
            let_adapters_merge()
        if what == "column":
            self._join(name, cast(ColumnParallelLinear, layer))
        return True

    def _take_experts(self, module: nn.Module, mesh: DeviceMesh) -> bool:
        found = experts_forward(module, mesh, self._experts)
        if isinstance(found, str):
            self.leave(module, found)
            return False
        module.forward = found
        self.used[self.name_of(module)] = "grouped ops (experts)"
        return True

    def leave(self, module: nn.Module, why: str) -> None:
        """``module`` keeps transformers' forward: say so."""
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", self.name_of(module))
        if self.strict:
            raise ValueError(f"{pattern} does not run an op of tpkernels: {why}")
        if pattern not in self.not_used:
            self.not_used[pattern] = why
            if not dist.is_initialized() or dist.get_rank() == 0:
                warnings.warn(f"{pattern} does not run an op of tpkernels: {why}", stacklevel=2)

    def _join(self, name: str, layer: ColumnParallelLinear) -> None:
        """Query, key and value of one block become one op as soon as the last of them is here."""
        parent, _, leaf = name.rpartition(".")
        names = next((names for names in TOGETHER if leaf in names), None)
        if names is None or not parent:
            return
        waiting = self._together.setdefault((parent, names[0], layer.in_features), [])
        waiting[:] = [(other, one) for other, one in waiting if other != name]  # of a model that was loaded before
        waiting.append((name, layer))
        if len(waiting) == len(names):
            del self._together[parent, names[0], layer.in_features]
            group = SharedInput([one for one, _ in waiting], [one for _, one in waiting])
            for _, one in waiting:
                one.shared = group


def register(*, strict: bool = False) -> Registration:
    """Put our ops behind transformers' style names, for models that are loaded from now on.

    Args:
        strict: a module that communicates without an op of ours raises ``ValueError`` while the model is loaded;
            otherwise one line names it, with the reason.

    Raises:
        ValueError: this transformers has other private names (the first is named), or they are ours already.
    """
    registry = private_names.styles()
    if _active:
        raise ValueError("the styles of transformers are ours already: call remove() of what register() returned first")
    registration = Registration(strict)
    for key in list(registry):
        if key in SENDS_NOTHING:
            continue
        registry[key] = _style(registry[key], key, registration)
        registration._keys.append(key)
    _active.append(registration)
    return registration


def _style(theirs: Any, key: str, registration: Registration) -> Any:
    """A style like ``theirs`` that installs our forward, or accounts for its own."""
    base: type[Any] = type(theirs)
    what = OURS.get(key)

    def validate_param(self: Any, module: nn.Module, param: str, mesh: Any, parameter_name: Any = None) -> None:
        base.validate_param(self, module, param, mesh, parameter_name=parameter_name)
        if parameter_name is not None:
            registration.note_name(module, str(parameter_name))

    def install_forward(self: Any, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if key == "packed_colwise" and getattr(module, "bias", None) is not None:
            raise ValueError(
                f"{registration.name_of(module)} has a bias, which transformers' style 'packed_colwise' cuts otherwise "
                "than the weight: its numbers would be wrong; use another plan, or prepare()"
            )
        if what is None:
            registration.leave(module, f"style {key!r} has no counterpart among our layers")
        elif registration.take(module, what, mesh):
            return module
        found: nn.Module = base.install_forward(self, module, mesh)
        return found

    ours: Any = type(base.__name__, (base,), {"validate_param": validate_param, "install_forward": install_forward})
    style = ours.__new__(ours)
    style.__dict__.update(theirs.__dict__)
    return style


def _why_not(module: nn.Module, what: str) -> str | None:
    table = what in ("vocabulary", "features")
    plain = nn.Embedding if table else nn.Linear
    forward: object = vars(module).get("forward", type(module).forward)
    if forward is not plain.forward:
        return f"it is a {type(module).__name__} with a forward of its own"
    if private_names.wants_local_tensors(module) or hasattr(module, "parametrizations"):
        return "it is quantized or parametrized, and computes by itself"
    if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq):
        return "its table has options that look at all rows (sparse, scale_grad_by_freq)"
    return None


def _layer(module: Any, what: str) -> nn.Module:
    """One of our layers on the very parameters of ``module``, whatever they become."""
    if what == "vocabulary":
        options = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type")
        fields: Mapping[str, Any] = {name: getattr(module, name) for name in options}
        return _around(VocabParallelEmbedding, module, {**fields, **_WHOLE})
    if what == "features":
        fields = {name: getattr(module, name) for name in ("num_embeddings", "embedding_dim", "padding_idx")}
        return _around(FeatureParallelEmbedding, module, {**fields, "gather_output": True})
    fields = {"in_features": module.in_features, "out_features": module.out_features, "unit": 1, **_WHOLE}
    if what.startswith("row"):
        return _around(RowParallelLinear, module, {**fields, "split_input": what == "row_split"})
    more = {"activation": None, "save_gathered": False, "gather_output": what == "column_gather"}
    return _around(ColumnParallelLinear, module, {**fields, **more})


_WHOLE = {"sequence_parallel": False, "sequence_dim": -2, "implementation": "auto"}


def _around(kind: type[nn.Module], module: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.__dict__.update(fields)
    layer.__dict__["_parameters"] = module._parameters  # the dictionary itself
    return layer


class _Forward:
    """The ``forward`` of a module that runs one of our layers."""

    def __init__(self, layer: nn.Module, mesh: DeviceMesh, what: str) -> None:
        self.layer, self.mesh, self.what = layer, mesh, what

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = self._plain(x)
        y: Tensor = self.layer(x)
        return y

    def _plain(self, x: DTensor) -> Tensor:
        """The layout that the layer takes, and gives the gradient of."""
        wanted: Placement = Shard(x.dim() - 1) if self.what == "row" else Replicate()
        if any(isinstance(placement, Partial) for placement in x.placements) or x.placements != (wanted,):
            x = x.redistribute(placements=[wanted])
        return x.to_local()
