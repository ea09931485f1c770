"""Small models of convolutions that are cut in pairs, and some that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Backbone", "CUT", "WHOLE", "inputs", "made"]


class Residual(nn.Module):
    """A block of ResNet: what it adds is whole."""

    def __init__(self, *layers: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(*layers), last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x + self.layers(x)).relu()
        return y if self.last is None else self.last(y)


class Shortcut(Residual):
    """A block of ResNet that begins a stage: it adds other channels of what it takes."""

    def __init__(self, beside: nn.Module, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.beside(x) + self.layers(x)).relu()
        return y


class Dense(nn.Module):
    """A block of HGNet: a convolution takes what all before it give, and what goes in."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.stem, self.joined, self.last = conv(3, 7), conv(17, width), conv(width, 4)
        self.layers = nn.ModuleList([conv(7, 5), nn.Sequential(conv(5, 5, 1), conv(5, 5, groups=5))])

    def forward(self, x: Tensor) -> Tensor:
        given = [self.stem(x).relu()]
        for layer in self.layers:
            given.append(layer(given[-1]).relu())
        y: Tensor = self.last(self.joined(torch.cat(given, 1)).relu())
        return y


class GatedStream(nn.Module):
    """What goes into the stream is made of halves, which nobody can scatter in one piece: all are gathered before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.last = conv(3, 8), conv(8, 16), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y: Tensor = self.last(x + nn.functional.glu(self.inner(x), 1))
        return y


class Squeezed(nn.Module):
    """A block of EfficientNet: each channel is multiplied by what is made of the means of all."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = conv(4, 13, 1), nn.Conv2d(13, 13, 3, 2, padding=1, groups=13)
        self.norms = nn.ModuleList(nn.BatchNorm2d(13, momentum=0.3) for _ in range(2))
        self.reduce, self.gate, self.project = nn.Conv2d(13, 3, 1), nn.Conv2d(3, 13, 1), conv(13, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[1](self.depthwise(nn.functional.silu(self.norms[0](self.expand(x)))))
        gate = self.gate(nn.functional.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()
        y: Tensor = self.project(x * gate)
        return y


class Conformer(nn.Module):
    """The convolution module of a Conformer: halves of the first one's channels are values and their gates."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1, bias=False)
        self.depthwise, self.norm = nn.Conv1d(width, width, 3, padding=1, groups=width), norm
        self.over_features = isinstance(norm, nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(nn.functional.glu(self.expand(x), 1))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if self.over_features else self.norm(x)
        y: Tensor = self.project(nn.functional.silu(x))
        return y


class Causal(nn.Conv1d):
    """Code of its own around torch's, as in Moonshine: it pads, and gives more than a tensor."""

    mixes, reads = False, False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        y: Tensor = super().forward(nn.functional.pad(x, (self.kernel_size[0] - 1, 0)))
        if self.mixes:
            y = y - y.mean(1, keepdim=True)
        if self.reads:
            y = y * size_of(self)
        return (y if mask is None else y * mask), mask


def size_of(module: nn.Module) -> Tensor:
    found: Tensor = module.weight.abs().mean()  # type: ignore[operator]
    return found


class Streaming(nn.Module):
    """Convolutions within code of their own, the one of each channel by itself, too."""

    def __init__(self, *, halves: bool = False, mixes: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.first, self.act = Causal(3, 14 if halves else 7, 3), nn.GLU(1) if halves else nn.ReLU()
        self.depthwise, self.second = Causal(7, 7, 2, groups=7), Causal(14 if halves else 7, 4, 2)
        self.first.mixes, self.second.reads = mixes, reads

    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        x = x.flatten(2)
        mask = x[:, :1] == x[:, :1]
        x, mask_of_x = self.first(x, mask=mask)
        x, _ = self.depthwise(self.act(x))
        x = torch.cat((x, -x), 1) if self.second.in_channels == 14 else x
        y, _ = self.second(x.flip(1) if turned else x.relu(), mask_of_x)
        return y


class Snake(nn.Module):
    """The activation of neural codecs, which has a number for each channel (DAC)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(1, channels, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)
        return y


class Frozen(nn.Module):
    """A batch norm of buffers alone, as in DETR's backbones."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.weight, self.bias, self.running_mean, self.running_var
        weight, bias, mean, var = (one.reshape(1, -1, 1, 1) for one in held)
        scale = weight * (var + 1e-5).rsqrt()
        y: Tensor = x * scale + (bias - mean * scale)
        return y


class Taken(nn.Module):
    """Three parts of the channels are added: as many as there are on a rank, or literal numbers of them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, self.first, self.second = sizes, conv(3, 15), conv(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.first(x).split(self.sizes, 1) if self.sizes else self.first(x).chunk(3, 1)
        for other in others:
            first = first + other
        y: Tensor = self.second(first.relu())
        return y


class OtherGates(nn.Module):
    """Of the gates a rank has its part of each half, and so of the values: a norm of each channel has its part of both
    halves as well, and one of groups would want one piece."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.values, self.gates, self.gated, self.added = conv(3, 12), conv(3, 12), conv(12, 4), conv(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gates(x)
        first, second = gates.chunk(2, 1)
        gated = self.gated(self.norm(nn.functional.glu(torch.cat((self.values(x), gates), 1), 1)))
        y: Tensor = gated + self.added(first + second)
        return y


class Reading(nn.Module):
    """Something about the norm between is used past it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.what = conv(3, 8), conv(8, 4), what
        self.norm: nn.Module = nn.GroupNorm(8, 8, affine=False) if "both" in what else nn.BatchNorm2d(8)
        self.norm = Frozen(8) if "frozen" in what else self.norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        y: Tensor = self.second(h.relu())
        if self.what in ("norm of both", "frozen norm of both"):
            y = y + self.norm(y.repeat(1, 2, 1, 1)).mean()
        if self.what == "norm of both by name":
            y = y + self.norm(input=y.repeat(1, 2, 1, 1)).mean()
        if self.what in ("norm is read", "frozen norm is read"):
            y = y * self.norm.running_mean.mean()  # type: ignore[operator]
        if self.what == "weight is read":
            y = y * self.second.weight.mean()
        return y * h.mean() if self.what == "part leaves" else y


class Dropped(nn.Module):
    """Between two convolutions parts are dropped, and what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(3, 8), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = nn.functional.dropout(self.first(x), 0.5, self.training)
        beside = nn.functional.dropout(x.mean(), 0.5, self.training)
        y: Tensor = self.second(parts) + beside
        return y


class Turned(nn.Module):
    """Channels change places with rows, twice with a pool between."""

    def __init__(self, pool: bool) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return nn.functional.max_pool2d(x, 1).transpose(1, 2) if self.pool else x


class CalledTwice(nn.Module):
    """The second takes channels that are cut, and whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(8, 8), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 3, 1, 1)[:, :8]
        y: Tensor = self.second(self.first(x).relu()) + self.second(x)
        return y


def conv(taken: int, given: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(taken, given, size, padding=size // 2, **options)


def basic() -> nn.Module:
    middle = nn.BatchNorm2d(7, momentum=0.3)
    block = Residual(conv(5, 7, bias=False), middle, nn.ReLU(inplace=True), conv(7, 5, bias=False), nn.BatchNorm2d(5))
    return nn.Sequential(block, Residual(conv(5, 7), nn.BatchNorm2d(7, affine=False), nn.GELU(), conv(7, 5)))


def bottleneck() -> nn.Module:
    layers = [conv(14, 7, 1), nn.BatchNorm2d(7), nn.ReLU(), conv(7, 7), nn.BatchNorm2d(7), nn.ReLU()]
    return Residual(*layers, conv(7, 14, 1), nn.BatchNorm2d(14), last=nn.MaxPool2d(2))


def stream() -> nn.Module:
    """Of bottlenecks whose last convolutions are much wider than the first: it is cut, and so is what is in them."""

    def layers(last: int, norm: nn.Module) -> list[nn.Module]:
        first = conv(23, 5, 1, bias=False), nn.BatchNorm2d(5), nn.ReLU()
        return [*first, conv(5, 5), norm, nn.ReLU(), conv(5, last, 1), nn.BatchNorm2d(last)]

    blocks = Residual(*layers(23, Frozen(5))), Shortcut(conv(23, 26, 1), *layers(26, nn.BatchNorm2d(5)))
    return nn.Sequential(conv(3, 23), nn.BatchNorm2d(23), *blocks, conv(26, 3, 1))


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


class Backbone(nn.Module):
    """Of a detector: its residual stream is what it returns, as it is and as the mean over space.

    "alone": as it is; "mixed": also the mean over channels; "dropped": with dropout; "asked": beside
    what a module makes of it that needs its values.
    """

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what, self.stem, self.norm, self.asks = what, conv(3, 23), nn.BatchNorm2d(23), Asking()
        self.blocks = nn.ModuleList(
            Residual(conv(23, 5, 1), nn.ReLU(), conv(5, 5), nn.ReLU(), conv(5, 23, 1)) for _ in "12"
        )

    def forward(self, x: Tensor) -> Any:
        given, x = x, self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        if self.what == "dropped":
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.what == "asked":
            return x, self.asks(x)
        if not self.what:
            return {"maps": (x.mean((2, 3)), given.mean(), x)}
        return (x, x.mean(1)) if self.what == "mixed" else x


def grouped() -> nn.Module:
    """Whole groups on two ranks and on three."""
    between = [
        nn.GroupNorm(6, 12),
        nn.Hardswish(),
        conv(12, 24, groups=6, padding_mode="reflect"),
        nn.InstanceNorm2d(24),
    ]
    return nn.Sequential(conv(3, 12), *between, nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3), conv(24, 5))


def transposed() -> nn.Module:
    up = nn.ConvTranspose2d(3, 7, 3, stride=2, output_padding=1, padding=1)
    return nn.Sequential(up, nn.BatchNorm2d(7), nn.LeakyReLU(), nn.ConvTranspose2d(7, 2, 2, dilation=2, bias=False))


def one_dimension() -> nn.Module:
    """As audio models have them."""
    layers = [nn.Conv1d(2, 7, 5, stride=2, bias=False), nn.GroupNorm(7, 7), nn.GELU(), nn.Conv1d(7, 6, 3, dilation=2)]
    return nn.Sequential(nn.Flatten(2), *layers)


def three_dimensions() -> nn.Module:
    first = nn.Conv3d(1, 7, 2, padding="same", padding_mode="circular")
    return nn.Sequential(nn.Unflatten(1, (1, 3)), first, nn.BatchNorm3d(7), nn.SiLU(), nn.Conv3d(7, 3, 2))


def head() -> nn.Module:
    """A linear takes the means of channels."""
    return nn.Sequential(
        conv(3, 13), nn.BatchNorm2d(13), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(13, 5)
    )


def conformer() -> nn.Module:
    """Whose two blocks differ in their norm; x has rows for channels."""
    return nn.Sequential(nn.Flatten(2), Conformer(3, nn.BatchNorm1d(3)), Conformer(3, nn.GroupNorm(3, 3)))


def snake() -> nn.Module:
    blocks = [Residual(Snake(5), nn.Conv1d(5, 7, 3, padding=1), Snake(7), nn.Conv1d(7, 5, 1)) for _ in range(2)]
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 5, 1), *blocks)


def decoder() -> nn.Module:
    """Of a neural codec: what goes into each block is fewer numbers than what comes out, and all is cut."""

    def up(taken: int, given: int) -> list[nn.Module]:
        inner = [Snake(given), nn.Conv1d(given, given, 3, padding=1), Snake(given), nn.Conv1d(given, given, 1)]
        return [Snake(taken), nn.ConvTranspose1d(taken, given, 8, stride=4, padding=2), Residual(*inner)]

    return nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 9, 3, padding=1), *up(9, 8), *up(8, 7), nn.Conv1d(7, 2, 3))


def two() -> nn.Module:
    return nn.Sequential(conv(3, 7), nn.ReLU(), conv(7, 4))


def wide() -> nn.Module:
    """The sum of the second is larger than all that is sent for each by itself."""
    return nn.Sequential(conv(3, 6), nn.ReLU(), conv(6, 64))


CUT: dict[str, Callable[[], nn.Module]] = {
    "two": two, "basic": basic, "bottleneck": bottleneck, "stream": stream, "dense": Dense, "squeezed": Squeezed,
    "grouped": grouped, "decoder": decoder,
    "backbone": lambda: Backbone("alone"), "wider than dense": lambda: Dense(19),
    "gated behind another": lambda: nn.Sequential(conv(3, 11), nn.ReLU(), conv(11, 6), nn.GLU(1), conv(3, 4)),
    "transposed": transposed, "one dimension": one_dimension, "three dimensions": three_dimensions, "head": head,
    "conformer": conformer, "layer norm": lambda: nn.Sequential(nn.Flatten(2), Conformer(6, nn.LayerNorm(6))),
    "halves of both": lambda: OtherGates(nn.ReLU()),
    "halves of both, normed": lambda: OtherGates(nn.BatchNorm2d(12)),
    "frozen": lambda: nn.Sequential(conv(3, 7), Frozen(7), nn.ReLU(), conv(7, 4)),
    "snake": snake, "in three": Taken, "gated stream": GatedStream,
    "own code": Streaming, "own code of halves": lambda: Streaming(halves=True),
    "slope": lambda: nn.Sequential(conv(3, 7), nn.PReLU(), conv(7, 4)),
    "gated rows": lambda: nn.Sequential(conv(3, 7), nn.GLU(2), conv(7, 4)),
}  # fmt: skip
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "wide": wide,
    "part leaves": lambda: Reading("part leaves"),
    "norm is read": lambda: Reading("norm is read"),
    "norm of both": lambda: Reading("norm of both"),
    "norm of both by name": lambda: Reading("norm of both by name"),
    "frozen norm of both": lambda: Reading("frozen norm of both"),
    "frozen norm is read": lambda: Reading("frozen norm is read"),
    "weight is read": lambda: Reading("weight is read"),
    "norm over channels": lambda: nn.Sequential(conv(3, 8), nn.GroupNorm(1, 8), nn.ReLU(), conv(8, 4)),
    "mixed channels": lambda: nn.Sequential(conv(3, 16), nn.PixelShuffle(2), conv(4, 2)),
    "another space": lambda: nn.Sequential(conv(3, 8), Turned(pool=True), conv(8, 4)),
    "turned": lambda: nn.Sequential(conv(3, 8), Turned(pool=False), conv(8, 4)),
    "halves of groups": lambda: nn.Sequential(conv(3, 9), nn.GroupNorm(3, 9), nn.ReLU(), conv(9, 4)),
    "called twice": CalledTwice,
    "another order of gates": lambda: OtherGates(nn.GroupNorm(3, 12)),
    "halves of halves": lambda: nn.Sequential(conv(3, 12), nn.GLU(1), nn.GLU(1), conv(3, 4)),
    "literal sizes": lambda: Taken(5, 5, 5),
    "own code mixes channels": lambda: Streaming(mixes=True),
    "own code reads the weight": lambda: Streaming(reads=True),
    "dropped with the whole": Dropped,
}


def made(name: str) -> nn.Module:
    """In fp64, with norms that are not at their start."""
    torch.manual_seed(3)
    model = {**CUT, **WHOLE}[name]().double()
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.dim() == 1:
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def inputs(name: str) -> Tensor:
    channels = {"basic": 5, "bottleneck": 14, "squeezed": 4, "one dimension": 2}.get(name, 3)
    channels = 6 if name == "layer norm" else channels
    return torch.randn(2, channels, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
