"""What a plan says about one module."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tpkernels.nn.cut_experts import ExpertsLayout
from tpkernels.nn.sliced import Cuts
from tpkernels.partition import copied_places
from tpkernels.planning.splits import held

__all__ = [
    "Channels",
    "Column",
    "CopiedHeads",
    "Experts",
    "Features",
    "Heads",
    "PartNorm",
    "Replicate",
    "Row",
    "Sliced",
    "Style",
    "Vocabulary",
]


@dataclass(frozen=True)
class Column:
    """Replace a linear by a :class:`tpkernels.nn.ColumnParallelLinear`; the fields are its arguments.

    With ``segments`` (the sizes of query, key and value, say) by a
    :class:`tpkernels.nn.PackedColumnParallelLinear`; ``units`` are then what ``unit`` is otherwise, one per segment.
    The last ``copied`` segments stay whole on every rank: the one key and value that all queries share; with others
    ``behind`` them, what all heads of a state space read.  Where each is ``copied_heads`` heads, a rank computes those
    that its queries need: its part of ``copies`` heads.  With ``gather_input`` the layer takes this rank's features,
    and gathers them: it begins a pair beside which a stream goes on in parts.
    """

    sequence_parallel: bool = False
    sequence_dim: int = -2
    gather_output: bool = False
    save_gathered: bool = False
    unit: int = 1
    segments: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    copied: int = 0
    behind: int = 0
    copied_heads: int = 1
    copies: int = 0
    implementation: str = "auto"
    sum_input_gradient: bool = True
    """Not where a layer before it has ``summed_gradient``, and sums for all that it gives to."""
    summed_gradient: bool = False
    """The gradient of what the layer gives is summed over the ranks, which work on parts of what is made of it."""
    gather_input: bool = False

    def __post_init__(self) -> None:
        others = self.sequence_parallel or self.gather_output or self.save_gathered or self.segments
        if self.gather_input and (others or self.summed_gradient or not self.sum_input_gradient):
            raise ValueError(
                "gather_input is of a column that takes this rank's features, and gives this rank's features of what "
                "it computes of all: sequence_parallel, gather_output, save_gathered, segments, summed_gradient and "
                "sum_input_gradient=False are of other columns"
            )

    def local_features(self, total: int, world_size: int) -> tuple[int, ...]:
        """Of the ``total`` output features, those that each rank has memory for."""
        sizes = self.segments or (total,)
        units = self.units or (self.unit,) * len(sizes)
        places = copied_places(len(sizes), self.copied, self.behind)
        copies = sum(size for size, copied in zip(sizes, places, strict=True) if copied)
        cut = [pair for pair, copied in zip(zip(sizes, units, strict=True), places, strict=True) if not copied]
        shares = _shares(tuple(size for size, _ in cut), tuple(unit for _, unit in cut), world_size)
        return tuple(share + copies for share in shares)


@dataclass(frozen=True)
class Row:
    """Replace a linear by a :class:`tpkernels.nn.RowParallelLinear`; the fields are its arguments.

    With ``scatter_unit`` it is a column as well: it gives this rank's features of the sum.  With ``segments`` by a
    :class:`tpkernels.nn.PackedRowParallelLinear`, which takes this rank's part of each: where code concatenates what is
    cut.
    """

    sequence_parallel: bool = False
    sequence_dim: int = -2
    split_input: bool = False
    unit: int = 1
    implementation: str = "auto"
    summed_gradient: bool = False
    scatter_unit: int = 0
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.segments and (self.split_input or self.unit != 1):
            raise ValueError(
                "segments are of a row that takes this rank's part of each: they go with neither split_input nor unit"
            )
        if self.scatter_unit and (self.sequence_parallel or self.summed_gradient or self.split_input):
            raise ValueError(
                "scatter_unit is of a row that takes this rank's features, and gives this rank's features of the sum: "
                "sequence_parallel, split_input and summed_gradient are of other rows"
            )

    def local_features(self, total: int, world_size: int) -> tuple[int, ...]:
        """Of the ``total`` input features, those of each rank."""
        sizes = self.segments or (total,)
        return _shares(sizes, (self.unit,) * len(sizes), world_size)


@dataclass(frozen=True)
class CopiedHeads:
    """Replace a key or value projection whose heads do not divide by a :class:`tpkernels.nn.CopiedHeadsLinear`."""

    heads: int
    copies: int
    sequence_parallel: bool = False
    sequence_dim: int = -2
    implementation: str = "auto"


@dataclass(frozen=True)
class Vocabulary:
    """Replace an ``nn.Embedding`` by a :class:`tpkernels.nn.VocabParallelEmbedding`."""

    implementation: str = "auto"


@dataclass(frozen=True)
class Features:
    """Replace an ``nn.Embedding`` by a :class:`tpkernels.nn.FeatureParallelEmbedding`."""

    gather_output: bool = False


@dataclass(frozen=True)
class Channels:
    """Cut a convolution of torch's in place by its output channels, and gather these: whole tensors go in and come out.

    Each rank computes its channels, from all input channels or, with groups, from those of its groups.  Of a pair that
    the data flow proves the first one does not gather, and the second one takes this rank's input channels, and is
    summed.  One that is the second of a pair and the first of another does both: ranks scatter the sum, or, with
    ``gather_input``, gather what they take, and each computes its output channels of it.  With ``segments`` (the two
    halves of what a gated linear unit takes) the first one gives this rank's part of each; but all of the last
    ``copied`` ones, which have ``behind`` others behind them, as a :class:`Column` does.  So does one that does both,
    if it gathers.  The second one takes this rank's part of each segment ``taken``, where code concatenates what is
    cut.
    """

    gather_output: bool = True
    inputs: bool = False
    segments: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    gather_input: bool = False
    copied: int = 0
    behind: int = 0

    def __post_init__(self) -> None:
        if self.gather_input and (self.gather_output or not self.inputs):
            raise ValueError("an input is gathered by a convolution that takes and gives this rank's channels")
        if self.taken and not self.inputs:
            raise ValueError("segments are taken by a convolution that takes this rank's channels: inputs=True")
        if self.segments and ((self.inputs and not self.gather_input) or self.gather_output):
            raise ValueError(
                "segments are of a convolution that takes whole tensors and gives this rank's channels, "
                "or gathers what it takes"
            )
        if self.copied or self.behind:
            copied_places(len(self.segments), self.copied, self.behind)

    def local_features(self, total: int, world_size: int) -> tuple[int, ...]:
        """Of the ``total`` channels in the dimension of a weight that is cut, those that each rank has memory for."""
        sizes = self.segments or (() if self.gather_input else self.taken) or (total,)
        places = copied_places(len(sizes), self.copied, self.behind)
        cut = tuple(size for size, whole in zip(sizes, places, strict=True) if not whole)
        return tuple(share + sum(sizes) - sum(cut) for share in _shares(cut, (1,) * len(cut), world_size))

    @property
    def paired(self) -> bool:
        """Whether it takes, or gives, this rank's channels."""
        return self.inputs or not self.gather_output


@dataclass(frozen=True)
class Heads:
    """Replace an ``nn.MultiheadAttention`` by a :class:`tpkernels.nn.ParallelMultiheadAttention`.

    ``inner``: this is the output projection of one, which goes with it; ``unit``: features of a head.
    """

    inner: bool = False
    unit: int = 1
    implementation: str = "auto"

    def local_features(self, total: int, world_size: int) -> tuple[int, ...]:
        """Of the ``total`` features of query, key and value, or of the output projection, those that each rank has
        memory for."""
        sizes = (total,) if self.inner else (total // 3,) * 3
        return _shares(sizes, (self.unit,) * len(sizes), world_size)


@dataclass(frozen=True)
class Experts:
    """Cut a module that holds all experts of a mixture in place: by their features, or ``dealt`` out over the ranks.

    The fields are those of :class:`tpkernels.nn.cut_experts.ExpertsLayout`, which names the parameters and says what is
    computed from them; ``parallelize`` compares them with what the module computes.
    """

    first: str = "gate_up_proj"
    second: str = ""
    last: str = "down_proj"
    gate: str = "halves"
    transposed: bool = False
    activation: str = "swiglu"
    call: str = "routed"
    behind: str = ""
    identity: bool = False
    rows: int = 0
    implementation: str = "auto"
    dealt: bool = False

    def __post_init__(self) -> None:
        if self.dealt and self.call == "sorted":
            raise ValueError(f"experts with one matrix each, {self.first!r}, are cut by features, not dealt out")
        if self.rows and not self.dealt:
            raise ValueError("experts in the rows of two-dimensional matrices are dealt out: dealt=True")
        if self.dealt and self.identity:
            raise ValueError("experts beside others that have no matrices are cut by features, not dealt out")

    @property
    def layout(self) -> ExpertsLayout:
        return ExpertsLayout(**{f.name: getattr(self, f.name) for f in fields(ExpertsLayout)})


@dataclass(frozen=True)
class Replicate:
    """Keep a module of any kind whole on every rank, with everything in it; what a plan does not name is treated so.

    With ``sequence_parallel`` it works on this rank's part of the sequence, or of the heads, and the gradients of its
    parameters are summed over the group.  With ``distributed`` the weight of an ``nn.Linear`` reads as the replicated
    DTensor that it is, so that code around the model can multiply it with one that is cut (:class:`WholeLinear`).
    """

    sequence_parallel: bool = False
    summed_gradient: bool = False
    distributed: bool = False


@dataclass(frozen=True)
class Sliced:
    """Keep the module's code, and cut some of its parameters (sinks, a bias per head) with the heads that they meet.

    ``parameters``: names and dimensions; the others stay whole.  ``runs``: those of them that are packed, and their
    sizes; they are kept whole, and the module's code sees this rank's part of each run, but all of the last ``copied``
    runs that have ``behind`` others behind them.  ``segments``: of a batch norm, whose parameters and running means are
    cut by this rank's part of each of these segments of its channels.
    """

    parameters: tuple[tuple[str, int], ...]
    runs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    copied: int = 0
    behind: int = 0
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.segments and self.runs:
            raise ValueError("segments are of a batch norm, whose parameters have no runs")

    def local_features(self, total: int, world_size: int) -> tuple[int, ...]:
        """Of the ``total`` elements of a parameter's dimension that is cut, those of each rank."""
        sizes = self.segments or (total,)
        return _shares(sizes, (1,) * len(sizes), world_size)

    @property
    def cuts(self) -> Cuts:
        return Cuts(dict(self.parameters), dict(self.runs), self.copied, self.behind, self.segments)


@dataclass(frozen=True)
class PartNorm:
    """Replace an RMS norm over features that are cut by a :class:`tpkernels.nn.PartRMSNorm`, with its fields; a layer
    norm, which is ``centred``, by a :class:`tpkernels.nn.PartLayerNorm`, and a global ``response`` norm by a
    :class:`tpkernels.nn.PartResponseNorm`.  ``channels_first``: its features are dimension 1, of
    ``[N, features, ...]``."""

    epsilon: float
    gate: str = ""
    centred: bool = False
    response: bool = False
    channels_first: bool = False


Style = Column | Row | CopiedHeads | Vocabulary | Features | Channels | Heads | Experts | Sliced | PartNorm | Replicate


def _shares(sizes: tuple[int, ...], units: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    cuts = [held(size, world_size, unit) for size, unit in zip(sizes, units, strict=True)]
    return tuple(map(sum, zip(*cuts, strict=True)))
