"""Dropout on parts: ranks draw the same random numbers for shared tensors, and different ones for their parts.

Between a column layer and the row layer that ends its group, the default generator runs on a seed of this rank's, drawn
from what all ranks share.  After it, the shared stream continues where it was, however many numbers each rank drew.
Modules in between that draw for whole tensors do so from the shared stream (:func:`share_in`).
The seed is drawn anew in every pass, so activation checkpointing, which sets the generator back, draws it again.

A forward pass that raises in between also returns to the shared stream (:func:`leave_on_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.parameters import mesh_of
from tpkernels.nn.random import _mix

__all__ = ["Fork", "differ_between", "leave_on_errors", "share_in"]

SEEDS = 2**62


class Fork:
    """Keeps the shared stream while this rank's own one runs.

    ``running``: those of one model that have begun, in that order.  One may begin within another, and end behind it:
    the last to end returns to what the first one found.
    """

    def __init__(self, running: list[Fork] | None = None) -> None:
        self._running: list[Fork] = [] if running is None else running
        self.shared: Tensor | None = None
        self.own: Tensor | None = None
        """This rank's stream, while the shared one runs within."""
        self.device = torch.device("cpu")
        # Not as decorators: these would import torch's compiler together with tpkernels, two seconds of every process.
        for name in ("enter", "leave", "pause", "resume"):
            setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def enter(self, device: torch.device, rank: int) -> None:
        """Switch to this rank's stream."""
        seed = _mix(int(torch.randint(SEEDS, ())), rank)  # from the CPU's generator, which all ranks have seeded alike
        self.forget()
        self._running.append(self)
        self.device = device
        if device.type == "cuda":
            self.shared = torch.cuda.get_rng_state(device)
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            self.shared = torch.get_rng_state()
            torch.default_generator.manual_seed(seed)

    def leave(self) -> None:
        """Switch back to the shared stream."""
        if self.shared is None:
            return
        within = self._running[self._running.index(self) + 1 :]
        if within:  # its stream goes on, and the shared one is what this one found
            within[0].shared = self.shared
        elif self.device.type == "cuda":
            torch.cuda.set_rng_state(self.shared, self.device)
        else:
            torch.set_rng_state(self.shared)
        self.forget()

    def forget(self) -> None:
        """Do not switch back any more: checkpointing sets the generator back itself when it stops in the middle."""
        self.shared = self.own = None
        if self in self._running:
            self._running.remove(self)

    def pause(self) -> None:
        """Switch to the shared stream for a while; :meth:`resume` continues this rank's."""
        self.own = self._swap(self.shared)

    def resume(self) -> None:
        """Switch to this rank's stream again; the shared one has moved on."""
        self.shared, self.own = self._swap(self.own), None

    def _swap(self, state: Tensor | None) -> Tensor:
        assert state is not None
        if self.device.type == "cuda":
            before = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(state, self.device)
        else:
            before = torch.get_rng_state()
            torch.set_rng_state(state)
        return before


def differ_between(
    opener: str, closer: str, modules: Mapping[str, nn.Module], mesh: DeviceMesh, begun: list[Fork] | None = None
) -> Fork:
    """Let each rank draw its own random numbers from the end of ``opener`` to the start of ``closer``, in training.

    ``opener`` may be called again in between, within one call of the module around both.  Otherwise it begins anew:
    activation checkpointing may have stopped before ``closer``, and set the generator back.  ``begun`` is one list for
    all such pairs of a model, which may interleave.
    """
    fork, running = Fork(begun), False
    if mesh.size() == 1:
        return fork

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal running
        running = True
        fork.forget()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal running
        running = False

    def opened(module: nn.Module, args: Any, output: Any) -> None:
        if module.training and not (running and fork.shared is not None):
            given = output if isinstance(output, Tensor) else args[0]  # code of a layer's own may give more
            fork.enter(given.device, _mesh(module, mesh).get_local_rank())

    def closing(module: nn.Module, args: Any) -> None:
        if module.training:
            fork.leave()

    around = _around(opener, closer, modules)
    around.register_forward_pre_hook(begin)
    around.register_forward_hook(end, always_call=True)
    modules[opener].register_forward_hook(opened)
    modules[closer].register_forward_pre_hook(closing)
    return fork


def _around(opener: str, closer: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The innermost module that holds both and is called."""
    name = opener
    while name and (not closer.startswith(f"{name}.") or isinstance(modules[name], nn.ModuleList | nn.ModuleDict)):
        name = name.rpartition(".")[0]
    return modules[name]


def share_in(module: nn.Module, forks: Sequence[Fork]) -> None:
    """Let ``module`` draw the random numbers that all ranks share, wherever it is called; it calls no layer itself."""
    paused: list[Fork | None] = []

    def before(module: nn.Module, args: Any) -> None:
        outermost = next((fork for fork in forks if fork.shared is not None and fork.own is None), None)
        if outermost is not None:
            outermost.pause()
        paused.append(outermost)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        fork = paused.pop()
        if fork is not None:
            fork.resume()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def leave_on_errors(model: nn.Module, forks: Sequence[Fork]) -> None:
    """A forward pass of ``model`` that raises ends with the shared stream, from which its next pass draws its seeds."""
    if not forks:
        return

    def start(module: nn.Module, args: Any) -> None:
        for fork in forks:
            fork.forget()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        for fork in reversed(forks):
            fork.leave()

    model.register_forward_pre_hook(start)
    model.register_forward_hook(end, always_call=True)


def _mesh(module: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    weight = next(module.parameters(), None)
    return mesh if weight is None else mesh_of(weight)
