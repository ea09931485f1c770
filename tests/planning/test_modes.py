"""What a model's code asks about its run: ``self.training``, gradients enabled, ``requires_grad`` of a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.shadow import MODES, Mode

pytestmark = pytest.mark.cpu

X = torch.randn(2, 3, 8)
HEARD: list[dict[str, bool]] = []
"""What the code of :class:`Asking` heard, in one dictionary for each of its runs."""


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("ones", torch.ones(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        ones: Tensor = self.ones  # type: ignore[assignment]
        heard = {"enabled": torch.is_grad_enabled(), "input": x.requires_grad, "weight": self.up.weight.requires_grad}
        x = self.frozen(x)
        heard |= {"frozen weight": self.frozen.weight.requires_grad, "of a frozen layer": x.requires_grad}
        h = self.up(x)
        heard |= {"of a layer": h.requires_grad, "of an op": (h * 2).requires_grad, "a view": h[0].requires_grad}
        cut = h.detach()
        heard |= {"detached": cut.requires_grad, "of the detached": (cut * 2).requires_grad}
        heard |= {"a view of the detached": cut[0].requires_grad, "a buffer": ones.requires_grad}
        heard |= {"an index": h.argmax(-1).requires_grad}
        with torch.no_grad():
            inside = h * 2
        heard |= {"without gradients": inside.requires_grad, "of that and another": (inside + h).requires_grad}
        filled = torch.zeros(2, 3, 16)
        filled[:, 0] = h[:, 0]
        heard |= {"written to": filled.requires_grad}
        written = torch.zeros(2, 3, 16)
        with torch.no_grad():
            written[:, 0] = h[:, 0]
        heard |= {"written to without gradients": written.requires_grad}
        y: Tensor = checkpoint(lambda z: z * ones, h, use_reentrant=False)  # type: ignore[assignment]
        heard |= {"checkpointed": y.requires_grad}
        HEARD.append(heard)
        return self.down(y + filled + written)


def test_a_run_on_fake_tensors_hears_what_a_real_one_does() -> None:
    real: list[dict[str, bool]] = []
    for mode in MODES:
        HEARD.clear()
        with torch.set_grad_enabled(mode.gradients):
            Asking().train(mode.training)(X)
        real += HEARD
    HEARD.clear()
    observation = Observation(Asking(), X)
    assert observation.recording is not None, observation.problem
    assert real == HEARD


class Branching(nn.Module):
    """Doubles where ``asks`` is false."""

    def __init__(self, asks: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.asks, self.up, self.down = asks, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y: Tensor = self.down(h.relu() if self.asks(self, h) else h * 2)
        return y


@pytest.mark.parametrize(
    ("asks", "modes"),
    [
        (lambda module, h: True, MODES[:2]),
        (lambda module, h: module.training, MODES[:2]),
        (lambda module, h: torch.is_grad_enabled(), MODES),
        (lambda module, h: h.requires_grad, MODES),
        (lambda module, h: h.detach().requires_grad, MODES[:2]),
        (lambda module, h: module.training and torch.is_grad_enabled(), MODES[:3]),
    ],
    ids=["nothing", "training", "enabled", "requires", "detached", "both"],
)
def test_a_run_without_gradients_is_recorded_where_it_is_another(asks: object, modes: tuple[Mode, ...]) -> None:
    observation = Observation(Branching(asks), X)  # type: ignore[arg-type]
    assert [mode for mode, _ in observation.recordings] == list(modes)
