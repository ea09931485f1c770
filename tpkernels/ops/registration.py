"""Registration of ops in ``torch.ops.tpkernels``: schemas, kernels, shapes under compile, gradients, autocast.

What an op takes is said once, by its kernel's annotations.  A parameter whose type is a NamedTuple stands for that
many arguments of the op, one per field; the kernel and the fake are given the tuple.

Ops are functional (no input is written, no output shares memory with an input), take local tensors and a group's name,
and are opaque to the compiler, which therefore needs the fake kernel for shapes.  Under autocast the ops with a GEMM
follow the rule of ``F.linear`` (floating-point tensors other than float64 are cast to the autocast dtype, eager and
compiled alike); collectives, gradients and calls on fp8 operands keep the dtypes that they are given.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tpkernels.gemm import fp8
from tpkernels.ops.plain_calls import is_plain

__all__ = ["call", "call_backward", "define", "wants_grad"]

_LIBRARY = torch.library.Library("tpkernels", "DEF")
_KERNELS: dict[str, Callable[..., Any]] = {}
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def define(
    name: str,
    schema: str | None = None,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., tuple[Any, ...]] | None = None,
    setup_context: Callable[..., None] | None = None,
    autocast: bool | int = False,
) -> None:
    """Define ``torch.ops.tpkernels.<name>``; without ``backward`` a gradient through the op raises.

    ``schema``: where the kernel's annotations do not say it all.
    ``kernel``: its keyword-only parameters are none of the op's (see :func:`call_backward`).
    ``backward``: returns the gradients of the first arguments; the others have none.
    ``autocast``: cast the arguments inside an autocast region, as a linear layer does; a number: so many of them.
    """
    arguments = _arguments(kernel)
    _KERNELS[name] = kernel
    _LIBRARY.define(f"{name}{schema or _schema(kernel, arguments)}", tags=(torch.Tag.needs_exact_strides,))
    qualified = f"tpkernels::{name}"
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _without_tangents(name, arguments.packed(kernel)), key)
    torch.library.register_fake(qualified, arguments.packed(fake), lib=_LIBRARY)
    if backward is None:
        torch.library.register_autograd(qualified, _no_double_backward(name), lib=_LIBRARY)
    else:
        padded = arguments.padded(backward)
        torch.library.register_autograd(qualified, padded, setup_context=setup_context, lib=_LIBRARY)
    for device, key in _AUTOCAST_KEYS.items():
        _LIBRARY.impl(name, _autocast_kernel(name, device, key, autocast), key)


class _Arguments(NamedTuple):
    """The arguments of an op, and which of them its kernel is given as one NamedTuple."""

    fields: list[inspect.Parameter]
    tuples: list[tuple[slice, type[Any]]]
    """The last one first: to pack it moves none of those before it."""

    def packed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which takes NamedTuples, for the op's arguments."""
        if not self.tuples:
            return function

        def packed(*flat: Any) -> Any:
            args = list(flat)
            for place, kind in self.tuples:
                args[place] = (tuple.__new__(kind, args[place]),)
            return function(*args)

        return packed

    def padded(self, backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        # torch wants lists for lists; those that have no gradient are empty where autograd records the op.
        nothing: list[Any] = [[] if field.annotation == list[Tensor] else None for field in self.fields]

        def padded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = backward(ctx, *grads)
            return (*found, *nothing[len(found) :])

        return padded


def _arguments(kernel: Callable[..., Any]) -> _Arguments:
    fields: list[inspect.Parameter] = []
    tuples: list[tuple[slice, type[Any]]] = []
    hints = typing.get_type_hints(kernel)
    for one in inspect.signature(kernel).parameters.values():
        kind = hints[one.name]
        if one.kind is one.KEYWORD_ONLY:
            continue
        if not hasattr(kind, "_fields"):
            fields.append(one.replace(annotation=kind))
            continue
        tuples.insert(0, (slice(len(fields), len(fields) + len(kind._fields)), kind))
        fields += [one.replace(name=name, annotation=of) for name, of in typing.get_type_hints(kind).items()]
    return _Arguments(fields, tuples)


def _schema(kernel: Callable[..., Any], arguments: _Arguments) -> str:
    """As torch infers it, except that a number is no size: only lists of numbers may have symbols in them."""
    returned = typing.get_type_hints(kernel)["return"]
    if returned == list[Tensor | None]:  # None: this gradient went to a sink, and the kernel was called directly
        returned = list[Tensor]

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(arguments.fields, return_annotation=returned)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=()).replace("SymInt ", "int ")


def call(name: str, *args: Any) -> Any:
    """``torch.ops.tpkernels.<name>``, or its kernel where that is the same (:mod:`tpkernels.ops.plain_calls`).

    ``args``: those of the kernel, NamedTuples among them.
    """
    flat: list[Any] = []
    tensors: list[Tensor] = []
    for arg in args:
        for one in arg if isinstance(arg, tuple) else (arg,):
            flat.append(one)
            if isinstance(one, Tensor):
                tensors.append(one)
            elif isinstance(one, list) and one and isinstance(one[0], Tensor):
                tensors += one
    if not is_plain(*tensors):
        _refuse_tangents(name, tensors)  # here as well: torch.func hides them from the kernel
        return getattr(torch.ops.tpkernels, name)(*flat)
    return _KERNELS[name](*args)


def call_backward(name: str, sinks: Sequence[Any], *args: Any) -> Any:
    """``torch.ops.tpkernels.<name>``; its kernel if weight gradients go to ``sinks``, as no schema can say."""
    if any(sinks):
        args = tuple(one.resolve_neg() if isinstance(one, Tensor) else one for one in args)
        return _KERNELS[name](*args, sinks=sinks)
    flat = [one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,))]
    return getattr(torch.ops.tpkernels, name)(*flat)


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records an op on these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _without_tangents(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, [one for arg in args for one in (arg if isinstance(arg, list) else [arg])])
        return kernel(*args)

    return checked


def _refuse_tangents(name: str, values: Sequence[Any]) -> None:
    """Forward-mode derivatives would be zero, because torch drops the tangents of an op that has no rule for them.

    Raises:
        RuntimeError: a tensor has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(
                f"tpkernels::{name} has no forward-mode derivative: use reverse mode, or F.linear and torch's own "
                "functional collectives for what you differentiate forward"
            )


def _autocast_kernel(name: str, device: str, key: str, casts: bool | int) -> Callable[..., Any]:
    """Leaves autocast before the kernel runs, whose own GEMMs must not be cast once more."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any) -> Any:
        if casts and args[0].dtype != fp8.DTYPE:
            dtype = torch.get_autocast_dtype(device)
            last = len(args) if casts is True else casts
            args = tuple(_cast(arg, dtype, device) if i < last else arg for i, arg in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return getattr(torch.ops.tpkernels, name)(*args)

    return kernel


def _cast(arg: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(arg, Tensor):
        eligible = arg.is_floating_point() and arg.dtype != torch.float64 and arg.device.type == device
        return arg.to(dtype) if eligible else arg
    if isinstance(arg, list | tuple):
        return [_cast(item, dtype, device) for item in arg]
    return arg


def _no_double_backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"tpkernels::{name} computes a gradient and has none itself: double backward through fused ops is not "
            "supported; for gradients of gradients use implementation-free torch code (F.linear and torch collectives)"
        )

    return backward
