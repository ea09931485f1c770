"""The graph of a recording: what flows from layer to layer, through tensors that can have a gradient.

It owns :class:`Graph`, between what every run does and the recording of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpkernels.planning.runs.events import Source
from tpkernels.planning.runs.session import BLANK, Node, Session
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.tensors import can_require_grad, storage_of

__all__ = ["Graph", "Node"]


class Graph(Session):
    """The nodes of one run."""

    def __init__(self, shadow: Shadow, attributes: Mapping[tuple[str, str], int]) -> None:
        super().__init__(shadow, attributes)
        self.nodes: list[Node] = []
        self.filled: set[tuple[int, int]] = set()
        """Edges to tensors that have the shape of others from what is written to views of them (``y[:, t] = ...``)."""
        self._to_opaque: list[int] = []
        self._node_of: dict[int, int] = {}
        self._noise: set[int] = set()
        self._blank: dict[int, tuple[int, int]] = {}
        """Tensors that have the shape of others and none of their numbers, by their storages: each, and its node."""

    def node_of(self, tensor: Tensor) -> int | None:
        return self._node_of.get(id(tensor))

    def is_input(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one that the model was called with."""
        node = self._node_of.get(id(tensor))
        return node is not None and self.nodes[node].is_input

    def _link(self, tensors: list[Tensor], outputs: list[Tensor], random: bool) -> None:
        """Add the op to the graph; noise is the result of random ops that no activation went into."""
        noisy = any(storage_of(tensor) in self._noise for tensor in tensors)
        inputs = [self._node_of[id(tensor)] for tensor in tensors if id(tensor) in self._node_of]
        if inputs:
            severed = not any(map(can_require_grad, outputs))
            self.nodes.append(Node(inputs, random=random or noisy, severed=severed))
            for output in outputs:
                self._node_of[id(output)] = len(self.nodes) - 1
        if noisy or random:
            self._noise |= {storage_of(output) for output in outputs if id(output) not in self._node_of}

    def _note_blank(self, func: Any, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Nothing comes from the tensor whose shape another one has (a mask of ``x.new_ones(...)``), unless code writes
        to that: what it writes belongs with the tensor."""
        if func.overloadpacket in BLANK and (node := self._node_of.get(id(outputs[0]))) is not None:
            self.nodes[node].severed = True
            self._blank[storage_of(outputs[0])] = id(outputs[0]), node
        elif func._schema.is_mutable:
            for storage in {storage_of(tensor) for tensor in tensors} & self._blank.keys():
                blank, node = self._blank[storage]
                self.nodes[node].severed = False
                if not any(id(output) == blank for output in outputs):
                    given = [tensor for tensor in tensors if storage_of(tensor) != storage]
                    sources = {self._node_of[id(x)] for x in given if id(x) in self._node_of}
                    fresh = sorted(sources.difference(self.nodes[node].inputs))
                    self.nodes[node].inputs += fresh
                    self.filled |= {(node, source) for source in fresh}

    def _link_opaque(self, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        self._to_opaque += [self._node_of[id(tensor)] for tensor in tensors if id(tensor) in self._node_of]
        if outputs:
            self.nodes.append(Node([], opaque=True))
            self._node_of |= {id(output): len(self.nodes) - 1 for output in outputs}

    def layers_behind(self, source: Source) -> frozenset[str]:
        """The layers whose outputs a tensor of this run was made of; none if the model's inputs went in, too."""
        todo = [node for tensor, node in self._node_of.items() if self.made.get(tensor) == source]
        seen, found = set(todo), set[str]()
        while todo:
            number = todo.pop()
            node = self.nodes[number]
            if node.severed:
                continue
            if node.is_input or node.opaque:
                return frozenset()
            if node.layer is not None:
                found.add(node.layer)
                continue
            fresh = [index for index in node.inputs if index not in seen and (number, index) not in self.filled]
            seen.update(fresh)
            todo += fresh
        return frozenset(found)
