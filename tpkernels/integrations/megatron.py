"""Megatron-Core: our ops in its tensor-parallel linear layers, its output layer and its loss.

::

    spec = tpk_megatron.layer_spec(get_gpt_layer_local_spec())
    model = tpk_megatron.convert_output(GPTModel(config, spec, ...))

:class:`ColumnParallelLinear` and :class:`RowParallelLinear` are subclasses of Megatron's: the same constructor,
parameters, initial weights, attributes and ``sharded_state_dict``, and ``(output, bias)`` from ``forward``; only the
GEMM and its transfer are ours.  A row's bias is added behind the reduction, as there, so that its gradient is each
rank's own where sequence parallelism makes Megatron sum it.  With ``gradient_accumulation_fusion`` the GEMM of the
weight's gradient adds to ``main_grad`` (:mod:`tpkernels.ops.main_grad`), without the CUDA extension that Megatron needs
for it.

What runs no op of ours is named in one line of rank 0 with the reason, or refused with ``strict=True``: experts, and
the layers of Transformer Engine.  A layer of ours refuses options that it would have to ignore.

All that this touches of Megatron is listed in :data:`NAMES` and :data:`ATTRIBUTES`; the first that is not there is
named.  Bits: with two ranks in fp32 losses and gradients are those of stock Megatron, the loss of a cut vocabulary
included, which does Megatron's own arithmetic.  (:func:`tpkernels.nn.vocab_parallel_cross_entropy` asks the ranks once
where that has to ask twice, and rounds otherwise.)
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import agreement
from tpkernels.comm.groups import resolve
from tpkernels.nn.cross_entropy import check_target, checked_labels
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.collectives import all_gather, shard
from tpkernels.ops.copy_matmul import copy_matmul
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.packages import needed

with needed("megatron", "tpkernels.integrations.megatron"):
    from megatron.core import __version__, parallel_state, tensor_parallel

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "convert_output",
    "first_missing",
    "layer_spec",
    "vocab_parallel_cross_entropy",
]

T = TypeVar("T")

NAMES: dict[str, tuple[str, ...]] = {
    "megatron.core.tensor_parallel": ("ColumnParallelLinear", "RowParallelLinear"),
    "megatron.core.parallel_state": ("get_tensor_model_parallel_group",),
    "megatron.core.transformer.spec_utils": ("ModuleSpec.submodules",),
}
"""Module, and names in it."""
COMMON = (
    "bias",
    "config",
    "explicit_expert_comm",
    "gradient_accumulation_fusion",
    "sequence_parallel",
    "skip_bias_add",
)
ATTRIBUTES = {
    "ColumnParallelLinear": (*COMMON, "disable_grad_reduce", "gather_output", "tp_group", "weight"),
    "RowParallelLinear": (*COMMON, "input_is_parallel", "tp_group", "weight"),
}
"""Of a layer that Megatron has made."""
ARGUMENTS = {
    "ColumnParallelLinear": ["self", "input_", "weight", "runtime_gather_output"],
    "RowParallelLinear": ["self", "input_"],
}
"""Of its ``forward``."""
IGNORED = -100
"""The label of a token without a loss."""


@lru_cache(maxsize=1)
def first_missing() -> str | None:
    """The first name that the installed Megatron-Core does not have, as a sentence; None where it has all."""
    here = f"megatron-core {__version__}"
    for module, names in NAMES.items():
        found: Any = importlib.import_module(module)
        for name in names:
            value = found
            for part in name.split("."):
                fields = getattr(value, "__dataclass_fields__", {})
                if not hasattr(value, part) and part not in fields:
                    return f"{here} has no {module}.{name}"
                value = getattr(value, part, None)
    for name, expected in ARGUMENTS.items():
        arguments = list(inspect.signature(getattr(tensor_parallel, name).forward).parameters)
        if arguments != expected:
            return f"forward() of {here}'s {name} takes {arguments}, not {expected}"
    return None


def _check(layer: object, kind: str) -> None:
    missing = first_missing()
    if missing is None:
        absent = next((name for name in ATTRIBUTES[kind] if not hasattr(layer, name)), None)
        missing = None if absent is None else f"megatron-core {__version__}'s {kind} has no attribute {absent}"
    if missing is not None:
        raise ValueError(f"{missing}, which tpkernels.integrations.megatron needs")


@contextmanager
def _without_their_kernel(config: Any) -> Iterator[None]:
    """Megatron's constructor refuses the fusion where its CUDA extension is missing; ours needs none."""
    fused = config.gradient_accumulation_fusion
    config.gradient_accumulation_fusion = False
    try:
        yield
    finally:
        config.gradient_accumulation_fusion = fused


def _why_not(layer: Any) -> str | None:
    """What a layer is told to do that ours does not."""
    config = layer.config
    if layer.explicit_expert_comm:
        return "it is of an expert, whose tokens are exchanged elsewhere (explicit_expert_comm)"
    if getattr(layer, "disable_grad_reduce", False):
        return "disable_grad_reduce leaves the gradient of its input unsummed"
    if (
        getattr(config, "defer_embedding_wgrad_compute", False)
        and getattr(layer, "grad_output_buffer", None) is not None
    ):
        return "its weight gradient is computed later (defer_embedding_wgrad_compute)"
    if getattr(config, "cpu_offloading", False):
        return "its activations are offloaded (cpu_offloading)"
    return None


class _Linear:
    """What the two layers have beside Megatron's own class, whose attributes these are."""

    KIND: str
    weight: Any
    bias: Tensor | None
    config: Any
    tp_group: dist.ProcessGroup | None
    gradient_accumulation_fusion: bool
    sequence_parallel: bool
    skip_bias_add: bool
    gather_output: bool
    input_is_parallel: bool
    input_size: int
    output_size_per_partition: int

    # The constructor is Megatron's, whichever version is installed.
    def __init__(self, input_size: int, output_size: int, *, config: Any, **given: Any) -> None:
        with _without_their_kernel(config):
            super().__init__(input_size, output_size, config=config, **given)  # type: ignore[call-arg]
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        _check(self, self.KIND)
        self.check()

    def check(self) -> None:
        """Refuse what ours cannot be told to do, which Megatron may tell a layer later, too.

        Raises:
            ValueError: an option that would be ignored.
        """
        why = _why_not(self)
        if why is not None:
            raise ValueError(f"{self} runs no op of tpkernels: {why}")

    def _weight(self, weight: Tensor) -> Tensor:
        """An op adds to the ``main_grad`` of a parameter, which a view does not have: Megatron adds to it itself."""
        return weight if self.gradient_accumulation_fusion else weight.view_as(weight)


class ColumnParallelLinear(_Linear, tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's layer with ``all_gather_matmul`` (sequence parallelism) or ``copy_matmul`` in it."""

    KIND = "ColumnParallelLinear"

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        given = self.weight if weight is None else weight
        wrong = given is None or given.shape != (self.output_size_per_partition, self.input_size)
        if self.tp_group is None or wrong:  # there is no process group; Megatron says what is wrong
            found: tuple[Tensor, Tensor | None] = super().forward(input_, weight, runtime_gather_output)
            return found
        self.check()
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel:
            y = all_gather_matmul(input_, self._weight(given), self.tp_group, gather_dim=0, bias=bias)
        else:
            y = copy_matmul(input_, self._weight(given), self.tp_group, bias=bias)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = all_gather(y, self.tp_group, dim=-1, replicated_grad=True)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_Linear, tensor_parallel.RowParallelLinear):  # type: ignore[misc]
    """Megatron's layer with ``matmul_reduce_scatter`` (sequence parallelism) or ``matmul_all_reduce`` in it."""

    KIND = "RowParallelLinear"

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.tp_group is None:  # there is no process group
            found: tuple[Tensor, Tensor | None] = super().forward(input_)
            return found
        self.check()
        x = input_ if self.input_is_parallel else shard(input_, self.tp_group, dim=-1)
        if self.sequence_parallel:
            y = matmul_reduce_scatter(x, self._weight(self.weight), self.tp_group, scatter_dim=0)
        else:
            y = matmul_all_reduce(x, self._weight(self.weight), self.tp_group)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


OURS: dict[type, type[_Linear]] = {
    tensor_parallel.ColumnParallelLinear: ColumnParallelLinear,
    tensor_parallel.RowParallelLinear: RowParallelLinear,
}


def layer_spec(spec: T, *, strict: bool = False) -> T:
    """A copy of ``spec``, whose layers are ours where they were Megatron's.

    Args:
        spec: a ``ModuleSpec`` or submodules of one, such as what ``get_gpt_layer_local_spec()`` gives.
        strict: what would run no op of ours raises; otherwise one line names it.

    Raises:
        ValueError: there is no layer of Megatron's in it, or, with ``strict``, one that stays as it is; the installed
            Megatron has other names (the first is named).
    """
    missing = first_missing()
    if missing is not None:
        raise ValueError(f"{missing}, which tpkernels.integrations.megatron needs")
    ours = copy.deepcopy(spec)
    left: dict[str, str] = {}
    if not _swap(ours, "", left):
        raise ValueError(f"the spec has no ColumnParallelLinear and no RowParallelLinear of Megatron's{_named(left)}")
    if left and strict:
        raise ValueError(f"some layers run no op of tpkernels{_named(left)}")
    if left and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(f"some layers run no op of tpkernels{_named(left)}", stacklevel=2)
    return ours


def _named(left: dict[str, str]) -> str:
    return "".join(f"; {name}: {why}" for name, why in left.items())


def _swap(spec: Any, path: str, left: dict[str, str]) -> int:
    """Swap the layers below ``spec`` in place, and return how many; ``left`` gets those that stay, with the reason."""
    count = 0
    for field in dataclasses.fields(spec):
        value, name = getattr(spec, field.name), f"{path}.{field.name}".removeprefix(".").removeprefix("submodules.")
        if isinstance(value, type):
            if value in OURS:
                if "experts" in name:
                    left[name] = "experts exchange their tokens themselves"
                    continue
                setattr(spec, field.name, OURS[value])
                count += 1
            elif "Linear" in value.__name__ and value not in OURS.values():
                left[name] = f"{value.__name__} has a GEMM and a transfer of its own"
        elif dataclasses.is_dataclass(value):
            count += _swap(value, name, left)
        elif isinstance(value, list):
            entries = [entry for entry in value if dataclasses.is_dataclass(entry)]
            count += sum(_swap(entry, f"{name}.{index}", left) for index, entry in enumerate(entries))
    return count


def convert_output(model: Any, *, strict: bool = False) -> Any:
    """Make output layer and loss of a ``GPTModel`` ours, in place, where they are Megatron's; returns the model.

    A model without an output layer, such as a stage of a pipeline, stays as it is.

    Args:
        strict: a loss or layer that stays Megatron's raises; otherwise one line names it.

    Raises:
        ValueError: with ``strict``, something stays; the layer has an option that ours does not.
    """
    layer, left = getattr(model, "output_layer", None), {}
    if layer is None:
        return model
    if type(layer) is tensor_parallel.ColumnParallelLinear:
        why = _why_not(layer)
        if why is None:
            _check(layer, "ColumnParallelLinear")
            layer.__class__ = ColumnParallelLinear
        else:
            left["output_layer"] = why
    elif not isinstance(layer, ColumnParallelLinear):
        left["output_layer"] = f"it is a {type(layer).__name__}"
    if model.config.cross_entropy_loss_fusion:
        left["the loss"] = "cross_entropy_loss_fusion asks for Megatron's"
    else:
        model.compute_language_model_loss = _loss
    if left and strict:
        raise ValueError(f"some of the output runs no op of tpkernels{_named(left)}")
    if left and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(f"some of the output runs no op of tpkernels{_named(left)}", stacklevel=2)
    return model


def _loss(labels: Tensor, logits: Tensor) -> Tensor:
    """The loss of each token, ``[batch, sequence]``, from logits ``[sequence, batch, columns of this rank]``."""
    return vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


class _TokenLosses(torch.autograd.Function):
    """Megatron's loss of each token, one operation of torch's after the other, so that two ranks have its bits::

        m = max_r max_v l_v,    Z = sum_r sum_v exp(l_v - m),    t = sum_r (l_target - m where this rank has it, else 0)
        loss = log Z - t,    dl_v = dloss (exp(l_v - m) / Z - [v = target])

    in fp32, as there.  The ranks exchange m with their labels, and then Z with t.  Megatron writes over fp32 logits and
    keeps the softmax for the backward pass; this leaves them alone and computes it once more.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
        columns, labels = logits.shape[-1], target.reshape(-1)
        shifted = logits.float().contiguous()
        largest = shifted.max(-1)[0]
        everyone = _of_ranks([largest.view(-1), labels.float()], group)
        ignored = labels == IGNORED
        labels = checked_labels(everyone[:, 1], labels, ignored, columns * group.size(), group.rank())
        largest = everyone[:, 0].amax(0).view_as(largest)
        shifted = shifted - largest.unsqueeze(-1)
        column = labels.long() - group.rank() * columns
        own = (column >= 0) & (column < columns)
        index = column.clamp(0, columns - 1)
        predicted = shifted.view(-1, columns).gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~own, 0)
        z = shifted.exp_().sum(-1)
        z, predicted = reduce(torch.add, _of_ranks([z.view(-1), predicted], group))  # in the order of the ranks
        losses: Tensor = (z.log() - predicted).masked_fill(ignored, 0)
        ctx.save_for_backward(logits, largest, z.view_as(largest), index, own, ignored)
        return losses.view_as(target)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:
        logits, largest, z, index, own, ignored = ctx.saved_tensors
        dl = (logits.float().contiguous() - largest.unsqueeze(-1)).exp_().div_(z.unsqueeze(-1))
        rows = dl.view(-1, dl.shape[-1])
        rows[torch.arange(len(rows), device=rows.device), index] -= own.float()
        dl.mul_(grads.masked_fill(ignored.view_as(grads), 0).unsqueeze(-1))
        return dl.to(logits.dtype), None, None


def _of_ranks(numbers: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Those of all ranks, ``[ranks, numbers, tokens]``."""
    return all_gather(torch.stack(numbers).unsqueeze(0), group)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Megatron's function of this name, with the bits of Megatron's on two ranks.

    =========================  ======================  ===============================================================
    argument                   shape                   notes
    =========================  ======================  ===============================================================
    ``vocab_parallel_logits``  ``[s, b, V / ranks]``   this rank's columns; any floating dtype; stays as it is
    ``target``                 ``[s, b]``              int64 or int32, equal on all ranks
    result                     ``[s, b]``              fp32, equal on all ranks
    =========================  ======================  ===============================================================

    A label of -100 has no loss and no gradient; Megatron's has one, which its loss mask then drops.

    Raises:
        ValueError: ``label_smoothing`` is not 0: Megatron's spreads over the columns of each rank alone, so that ranks
            would have different losses; labels that are neither -100 nor within the vocabulary, or that differ between
            ranks (on every rank).
        GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.
    """
    if label_smoothing != 0:
        raise ValueError(
            f"label_smoothing ({label_smoothing}) must be 0: Megatron's depends on the number of ranks. Call "
            "tpkernels.nn.vocab_parallel_cross_entropy(..., label_smoothing=...), which does not"
        )
    group = parallel_state.get_tensor_model_parallel_group()
    try:
        check_target(target, vocab_parallel_logits.shape[:-1], "vocab_parallel_logits")
    except ValueError as error:
        if group.size() > 1:
            agreement.refuse(resolve(group), "vocab_parallel_cross_entropy", str(error))
        raise
    losses: Tensor = _TokenLosses.apply(vocab_parallel_logits, target, group)  # type: ignore[no-untyped-call]
    return losses
