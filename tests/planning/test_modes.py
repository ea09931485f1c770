"""What a model's code asks about its run: ``self.training``, gradients enabled, ``requires_grad`` of a tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.shadow import MODES, Mode
from tpkernels.planning.styles import Column, Row
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.cpu

X = torch.randn(2, 3, 8)
LENGTHS = torch.tensor([[1, 2, 1], [3, 1, 2]])
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


class Spoken(nn.Module):
    """Repeats each row as often as the labels say in training, and as it predicts in evaluation (FastSpeech 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.lengths = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = x + self.down(self.up(x).relu())
        lengths = labels if self.training else self.lengths(h).squeeze(-1).exp().long()
        if lengths.sum() == 0:
            lengths = lengths + 1
        repeated = x.new_zeros(len(x), int(lengths.sum(1).max()), 8)
        for i, (one, times) in enumerate(zip(h, lengths, strict=True)):
            rows = torch.repeat_interleave(one, times, dim=0)
            repeated[i, : len(rows)] = rows
        return repeated


class Speaking(nn.Module):
    """``picks`` what it returns by a mask that the labels give."""

    def __init__(self, picks: bool = False) -> None:
        super().__init__()
        self.spoken, self.up, self.down, self.picks = Spoken(), nn.Linear(8, 16), nn.Linear(16, 8), picks

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.spoken(x, labels)).relu())
        if self.picks and self.training:
            lost = torch.arange(y.shape[1]) < labels.sum(1, keepdim=True)
            y = y.masked_select(lost.unsqueeze(-1)) - labels.new_ones(int(8 * labels.sum()))
        return y


@pytest.mark.parametrize("picks", [False, True])
def test_a_mode_that_cannot_be_traced_leaves_another_as_it_is(picks: bool) -> None:
    plan = tpk.make_plan(Speaking(picks), 2, example_inputs=(X, LENGTHS))
    for pair in ("spoken.", ""):
        assert plan[f"{pair}up"].style == Column() and plan[f"{pair}down"].style == Row()
    assert len(plan.notes) == 1 and plan.notes[0].startswith("proven for training alone: in evaluation it cannot be")


def values() -> list[str]:
    torch.manual_seed(0)
    plain = Speaking(picks=True).double()
    model = tpk.parallelize(copy.deepcopy(plain), tp_mesh(), example_inputs=(X.double(), LENGTHS))
    found = []
    for training, lengths in ((True, LENGTHS), (False, LENGTHS), (True, torch.tensor([[2, 2, 5], [1, 0, 2]]))):
        x, outputs = torch.randn(2, 3, 8, dtype=torch.float64), []
        for net in (model, plain):
            net.zero_grad()
            outputs.append(net.train(training)(x, lengths))
            outputs[-1].square().sum().backward()
        found += [f"output: {why}" for why in [differs(outputs[0], outputs[1], 1e-11)] if why]
        found += compare_tensors(model, plain, 1e-11)
    return found


@pytest.mark.gloo
@pytest.mark.slow("2 s: trains on two ranks; that it is cut is asked without training")
def test_what_is_proven_for_training_alone_is_right_in_evaluation_as_well(ranks: Pools) -> None:
    assert ranks(2).run(values, timeout=LIMIT_S) == [[], []]
