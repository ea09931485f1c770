"""What a plan says about one module: cut by output features, cut by input features, or kept whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STYLES", "Column", "Replicate", "Row", "Style"]


@dataclass(frozen=True)
class Column:
    """Replace an ``nn.Linear`` by a :class:`tpkernels.nn.ColumnParallelLinear`; the fields are its arguments."""

    sequence_parallel: bool = False
    sequence_dim: int = -2
    gather_output: bool = False
    save_gathered: bool = False
    unit: int = 1
    implementation: str = "auto"


@dataclass(frozen=True)
class Row:
    """Replace an ``nn.Linear`` by a :class:`tpkernels.nn.RowParallelLinear`; the fields are its arguments."""

    sequence_parallel: bool = False
    sequence_dim: int = -2
    unit: int = 1
    implementation: str = "auto"


@dataclass(frozen=True)
class Replicate:
    """Keep a module of any kind whole on every rank, with everything in it; what a plan does not name is treated so.

    With ``sequence_parallel`` it works on this rank's part of the sequence (a norm between two sequence-parallel
    layers), and the gradients of its parameters are summed over the group.
    """

    sequence_parallel: bool = False


Style = Column | Row | Replicate

STYLES: dict[str, Style] = {"column": Column(), "row": Row(), "replicate": Replicate()}
"""Styles by the names that a plan may use instead."""
