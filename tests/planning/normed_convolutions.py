"""Small models of convolutions in pairs whose weights torch's weight norm makes, and some that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CUT", "WHOLE", "inputs", "made", "normed"]

weight_norm: Any = nn.utils.parametrizations.weight_norm


def normed(taken: int, given: int, size: int = 3, dim: int | None = 0, **options: Any) -> nn.Module:
    made: nn.Module = weight_norm(nn.Conv1d(taken, given, size, padding=size // 2, **options), dim=dim)
    return made


class Joined(nn.Module):
    """The second one takes what two of the first ones give, and what it sums is cut for the third."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second, self.third = normed(3, 5), normed(10, width, bias=False), normed(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(torch.cat((self.first(x), self.first(-x)), 1)).relu())
        return y


class Weighed(nn.Module):
    """One channel of the first convolution weighs all others, and every rank has it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.first, self.second = 6, normed(3, 7), normed(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, x = self.first(x).split([1, self.width], 1)
        y: Tensor = self.second(x * weight.sigmoid())
        return y


class GatedStream(nn.Module):
    """Halves of what the second gives are gates, and what comes of them is added to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.last = normed(3, 8), normed(8, 16), normed(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y: Tensor = self.last(x + nn.functional.glu(self.inner(x), 1))
        return y


class Waves(nn.Module):
    """A WaveNet as in VITS: its code takes gates apart, and what goes on from what is skipped, by one number, of which
    it makes a tensor.

    ``gates``: how it reads that: "number"; "float": of a tensor of another kind; "times": it multiplies by it as well;
    "literal": it has a number of its own; "given": it asks a module for so many.
    """

    def __init__(self, gates: str = "number", width: int = 6, layers: int = 3) -> None:
        super().__init__()
        self.width, self.gates = width, gates
        self.first, self.last = nn.Conv1d(3, width, 1), nn.Conv1d(width, 4, 1)
        self.ins = nn.ModuleList(normed(width, 2 * width, 5) for _ in range(layers))
        self.outs = nn.ModuleList(normed(width, width * (1 + (i < layers - 1)), 1) for i in range(layers))
        self.table = nn.Embedding(width + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[:, :1] > -9).to(x.dtype)
        x = self.first(x) * mask
        skipped = torch.zeros_like(x)
        widths = torch.Tensor([self.width]) if self.gates == "float" else torch.IntTensor([self.width])
        for number, (inner, out) in enumerate(zip(self.ins, self.outs, strict=True)):
            y = inner(x) + torch.zeros_like(inner(x))
            width = 6 if self.gates == "literal" else int(widths[0])
            y = y[:, :width].tanh() * y[:, width:].sigmoid()
            if self.gates == "times":
                y = y * widths[0]
            if self.gates == "given":
                y = y * self.table(widths)
            y = out(y)
            if number < len(self.ins) - 1:
                x = (x + y[:, : self.width]) * mask
                skipped = skipped + y[:, self.width :]
            else:
                skipped = skipped + y
        z: Tensor = self.last(skipped * mask)
        return z


class Read(nn.Module):
    """Something uses the second one's weight, or what makes it, past the call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.what = normed(3, 8), normed(8, 4), what

    def forward(self, x: Tensor) -> Tensor:
        second: Any = self.second
        y: Tensor = second(self.first(x).relu())
        read: Tensor = second.weight if self.what == "weight" else second.parametrizations.weight.original1
        return y * read.mean()


def hooked() -> nn.Module:
    model = nn.Sequential(normed(3, 8), nn.ReLU(), normed(8, 4))
    model[2].register_forward_pre_hook(lambda module, args: None)
    return model


def transposed() -> nn.Module:
    """Norms of input channels: of all ranks' parts for the first, of a rank's own for the second."""
    return nn.Sequential(weight_norm(nn.ConvTranspose1d(3, 7, 3, stride=2)), nn.ReLU(),
                         weight_norm(nn.ConvTranspose1d(7, 2, 2, bias=False)))  # fmt: skip


def decoder() -> nn.Module:
    """The second gives more than it takes, and gathers; the third scatters what it sums."""
    return nn.Sequential(normed(3, 5), nn.ReLU(), normed(5, 9), nn.ReLU(), normed(9, 5), nn.ReLU(), normed(5, 4))


CUT: dict[str, Callable[[], nn.Module]] = {
    "two": lambda: nn.Sequential(normed(3, 7), nn.ReLU(), normed(7, 4)),
    "beside a plain one": lambda: nn.Sequential(nn.Conv1d(3, 7, 1), nn.ReLU(), normed(7, 4)),
    "of places": lambda: nn.Sequential(normed(3, 7, dim=2), nn.ReLU(), normed(7, 4, dim=2)),
    "transposed": transposed, "halves": lambda: nn.Sequential(normed(3, 10), nn.GLU(1), normed(5, 4)),
    "halves of places": lambda: nn.Sequential(normed(3, 10, dim=2), nn.GLU(1), normed(5, 4, bias=False)),
    "joined": Joined, "decoder": decoder, "weighed": Weighed, "gated stream": GatedStream, "waves": Waves,
}  # fmt: skip
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "weight is read": lambda: Read("weight"), "v is read": lambda: Read("v"), "hooked": hooked,
    "one norm": lambda: nn.Sequential(normed(3, 7, dim=None), nn.ReLU(), normed(7, 4, dim=None), nn.Conv1d(4, 9, 1)),
    "float": lambda: Waves("float"), "times": lambda: Waves("times"), "literal": lambda: Waves("literal"),
    "given": lambda: Waves("given"),
}  # fmt: skip


def made(name: str) -> nn.Module:
    """In fp64, with norms that are not those of the weights."""
    torch.manual_seed(3)
    model = {**CUT, **WHOLE}[name]().double()
    for key, parameter in model.named_parameters():
        if key.endswith("original0"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def inputs() -> Tensor:
    return torch.randn(2, 3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
