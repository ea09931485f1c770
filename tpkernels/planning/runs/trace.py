"""One run of a model on fake tensors: which ops run, on which shapes, and what flows from layer to layer.

It owns the :class:`Recording` of one run of a :class:`~tpkernels.planning.runs.shadow.Shadow`.

It assumes that outside of opaque modules the model's Python code does not depend on the values of tensors, but for
integers that the inputs give (:mod:`tpkernels.planning.runs.known_values`) and conditions, of which it takes one path
(:mod:`tpkernels.planning.runs.conditions`).  A run that needs another value fails, and
says so (:mod:`tpkernels.planning.runs.opaque_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from tpkernels.nn.host_generators import host_states
from tpkernels.nn.parameter_products import Product
from tpkernels.nn.part_maxima import Extreme
from tpkernels.nn.part_statistics import Statistic
from tpkernels.nn.sliced_arguments import named_arguments
from tpkernels.planning.modules.channel_modules import ChannelCall
from tpkernels.planning.modules.part_norms import NormCall, numbers_in
from tpkernels.planning.runs.conditions import Path, Rest
from tpkernels.planning.runs.events import (
    TRANSPARENT,
    Event,
    Mixture,
    NotOpaque,
    Opaque,
    Shape,
    Source,
    as_given,
    as_shapes,
    canonical,
    constant_of,
    is_random,
)
from tpkernels.planning.runs.example_calls import Example
from tpkernels.planning.runs.function_calls import MaximumCall, ProductCall, StatisticCall
from tpkernels.planning.runs.graph import Graph, Node
from tpkernels.planning.runs.op_arguments import memory_of
from tpkernels.planning.runs.rests import passes
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.runs.shared_conditions import Turns
from tpkernels.planning.runs.tensors import can_require_grad, storage_of, tensors_in, written_by

__all__ = ["Recording"]


class Recording(Graph):
    """The events, scopes and graph of one run.

    Args:
        widths: output features of layers that are not what the model's are (key-value heads once per rank).
        after: the call before this one, whose changes of modules this one finds.
        paths: that calls of modules take which branch on a condition, in turns.
        turns: answers to conditions that all ranks answer alike; by default the modules that ask are said to branch.
    """

    def __init__(
        self,
        shadow: Shadow,
        attributes: Mapping[tuple[str, str], int] = {},
        widths: Mapping[str, int] = {},
        after: Recording | None = None,
        paths: tuple[Path, ...] = ((),),
        turns: Turns | None = None,
    ) -> None:
        super().__init__(shadow, attributes)
        self.paths, self.turns = paths, turns
        self.decided_at: list[int] = []
        """Of the conditions that were answered by turns: the event that came next."""
        self.settled: frozenset[int] = frozenset()
        """The numbers of those to which only one answer leads to a run,"""
        self.others: list[Recording] = []
        """and of the same call the recordings on all other paths, and with other answers."""
        self.rest_at: dict[int, Rest] = {}
        """By event: what a branching module ran."""
        self.widths, self.after = dict(widths), after
        if after is not None:
            self._begin_after(after)
        self.events: list[Event] = []
        self.scopes: list[Scope] = []
        self.direct: set[str] = set()
        """Layers, and torch's attention modules, whose parameters the model uses without calling them."""
        self.by_weight: dict[str, set[str]] = {}
        """By module: the layers by whose weights its code multiplies, which are calls of these layers here."""
        self._originals_read: set[str] = set()
        self._originals_called: set[str] = set()
        self.outputs: list[int] = []
        self.returned: list[tuple[int, int]] = []
        """Of what a call of the model itself returns: the node of each tensor, and its bytes,"""
        self.into_opaque: list[int] = []
        """and nodes that opaque modules take."""
        self.results: set[Source] = set()
        """Tensors among what the model returns."""
        self.layer_rows: dict[str, int] = {}
        """Rows of each layer's input, over all calls."""
        self.gradient_rows: dict[str, int] = {}
        """Those of them of which somebody wants the gradient."""
        self.slots: dict[str, int] = {}
        """Rows of each module of experts: one for each expert of each token."""
        self.layer_inputs: dict[str, list[int]] = {}
        self.norm_calls: dict[int, NormCall] = {}
        """Of modules that may be norms, by the event that each begins with."""
        self.statistics: dict[int, StatisticCall] = {}
        """Of sums, means and spreads over the last dimension, in the same way,"""
        self.maxima: dict[int, MaximumCall] = {}
        """of largest elements of tensors,"""
        self.product_calls: dict[int, ProductCall] = {}
        """and of products with parameters that are no layer's."""
        self.channel_calls: dict[int, ChannelCall] = {}
        """Of modules that can be cut by channels, in the same way,"""
        self.called_otherwise: set[str] = set()
        """and those of them that are called with more than a tensor, or inside of an opaque module."""
        self.convolution_inputs: dict[str, list[int]] = {}
        self.layer_reads: dict[str, list[tuple[int, int]]] = {}
        """Of each call of a layer: which tensor it read, and the node that had last written it."""
        self.states_written: dict[str, frozenset[str]] = {}
        """By module: what stands in lists among its arguments, and is written to in a call of it."""
        self._listed: list[tuple[str, dict[int, str]]] = []
        """Of the calls that are running: what they might write to, by storage."""
        self.callers: dict[str, str] = {}
        """Of opaque modules: the module that called each, "" for the model."""
        self.last_opaque = ""
        self.called_quietly: set[str] = set()
        self.called_within: dict[str, set[str]] = {}
        """Of layers inside of opaque modules: the modules there that are around every call, and take one tensor."""
        self.rows_unknown: set[str] = set()
        """Layers inside of opaque modules, whose rows depend on values."""
        self._written: dict[int, list[tuple[int, Source]]] = {}
        """Of tensors that ops write to (counters of batch norms): after which event each has which source, in order."""
        self._open: list[Scope] = []

    def also(self, other: Recording) -> None:
        """What another example runs is run by an example, too: its layers that this one does not call."""
        self.rows_unknown |= other.rows_unknown - self.layer_rows.keys()
        for mine, others in (
            (self.layer_rows, other.layer_rows), (self.gradient_rows, other.gradient_rows), (self.slots, other.slots)
        ):  # fmt: skip
            for name, count in others.items():
                mine.setdefault(name, count)

    def _begin_after(self, other: Recording) -> None:
        """Find in the modules what ``other`` has left there; its tensors have their origins and names of their own."""
        self.begins, self.origins = other.state_after(), dict(other.origins)
        self.values.take(other.values)
        self.alike = other.alike.copy()
        for tensor, source in other.made.items():
            self.made[tensor] = (id(self), -1 - source[1], source[2]) if isinstance(source, tuple) else source

    def run(self, call: Example) -> None:
        """Run the model on fake inputs."""
        for leaf in tree_leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and can_require_grad(leaf):
                self.nodes.append(Node([], is_input=True))
                self._node_of[id(leaf)] = len(self.nodes) - 1
                self.set_origin(leaf, None)
            self.kept.append(leaf)
        self.alike.add([leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)])
        with self.shadow.running(self):
            out = call.run(self.shadow.model)
        self.kept.append(out)
        self.results = {self.source(tensor) for tensor in tensors_in(out)}
        returned = {id(t): (self._node_of[id(t)], t.nbytes) for t in tensors_in(out) if id(t) in self._node_of}
        self.outputs = [node for node, _ in returned.values()] + self._to_opaque
        self.returned, self.into_opaque = [] if call.method else list(returned.values()), self._to_opaque

    def run_scope(self, scope: Scope, recording: Recording) -> Scope:
        """Run one module on the arguments that another recording saw; the scope of that call here."""
        self.origins, self.made = dict(recording.origins), recording.made_before(scope.start)
        self.values.take(recording.values)
        self.alike, self.turns, self.decided_before = recording.alike.copy(), recording.turns, scope.decided
        self.begins, self.dice = recording.state_after(scope.changes), recording.dice
        self.host_begins = scope.host or recording.host_began
        with self.shadow.running(self):
            args, kwargs = self.shadow.copied((scope.args, scope.kwargs))
            self.kept.append(self.shadow.modules[scope.name](*args, **kwargs))
        return next(found for found in reversed(self.scopes) if found.name == scope.name)

    def op(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self._note_readers(tensors)
        # Before it runs: ``unsqueeze_`` changes the shape of what it is given.
        whole, named = as_shapes(args), {key: as_shapes(value) for key, value in kwargs.items()}
        named |= memory_of(canonical(func), tensors)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._link(tensors, outputs, is_random(func, args))
        self._note_blank(func, tensors, outputs)
        self.pass_origins(func, tensors, outputs)
        packet = canonical(func)
        if packet in TRANSPARENT:
            self.made[id(out)] = self.source(tensors[0])
            return out
        shapes, sources = [Shape(t.shape) for t in outputs], self.sources_of(packet, tensors)
        event = Event(packet, whole, named, shapes, sources=sources, constant=constant_of(func, tensors))
        for output in outputs if func._schema.is_mutable else ():
            if any(output is tensor for tensor in tensors):
                self._written.setdefault(id(output), [(-1, self.source(output))])
        self._note_states(written_by(func, args, kwargs) if func._schema.is_mutable and self._listed else [])
        self._add(event, outputs)
        return out

    def _note_readers(self, tensors: list[Tensor]) -> None:
        """Note code that reads parameters past the modules that own them."""
        shadow = self.shadow
        self.direct |= {shadow.owners[id(tensor)] for tensor in tensors if id(tensor) in shadow.owners}
        attentions = {shadow.attentions[id(tensor)] for tensor in tensors if id(tensor) in shadow.attentions}
        quiet = {name for name, _ in self.quiet_calls if isinstance(shadow.modules[name], _ConvNd)}
        within = {scope.name for scope in self._open} - shadow.around | {shadow.convolving}
        self.direct |= attentions - within - quiet
        self._originals_read |= {shadow.originals[id(tensor)] for tensor in tensors if id(tensor) in shadow.originals}

    def _add(self, event: Event, outputs: list[Tensor]) -> None:
        self.events.append(event)
        number = len(self.events) - 1
        for place, output in enumerate(outputs):
            self.made[id(output)] = (id(self), number, place)
            if id(output) in self._written:
                self._written[id(output)].append((number, self.made[id(output)]))

    def _note_states(self, written: list[Tensor]) -> None:
        for name, listed in self._listed:
            found = {listed[storage_of(tensor)] for tensor in written if storage_of(tensor) in listed}
            if found:
                self.states_written[name] = self.states_written.get(name, frozenset()) | found

    def made_before(self, event: int) -> dict[int, Source]:
        """What had made each tensor when ``event`` began."""
        before = {
            tensor: [source for number, source in sources if number < event][-1]
            for tensor, sources in self._written.items()
        }
        return self.made | before

    def layer_called(self, name: str, x: Tensor) -> Tensor:
        layer, features = self.shadow.layers[name], self.widths.get(name)
        width = layer.out_features if features is None else features
        shape = (*x.shape, width) if layer.kind == "embedding" else (*x.shape[:-1], width)
        if layer.kind != "embedding" and x.shape[-1] != layer.in_features:
            raise ValueError(f"{name} takes {layer.in_features} features, got {tuple(x.shape)}")
        out = self.new_output(x, shape, self.layer_dtype(name, x))
        inputs = [self._node_of[id(x)]] if id(x) in self._node_of else []
        self.nodes.append(Node(inputs, layer=name))
        self._node_of[id(out)] = len(self.nodes) - 1
        self.layer_inputs.setdefault(name, []).extend(inputs)
        self.layer_reads.setdefault(name, []).append((id(x), self._node_of.get(id(x), -1)))
        rows = x.numel() if layer.kind == "embedding" else x.numel() // max(1, x.shape[-1])
        self.layer_rows[name] = self.layer_rows.get(name, 0) + rows
        self.gradient_rows[name] = self.gradient_rows.get(name, 0) + (rows if x in self.requiring else 0)
        event = Event(None, [Shape(x.shape)], {}, [Shape(shape)], layer=name, sources=(self.source(x),))
        self._add(event, [out])
        return out

    def norm_called(self, name: str, forward: Any, *given: Tensor) -> Any:
        x, start, sources = given[0], len(self.events), tuple(map(self.source, given))
        y = forward(*given)
        if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype:
            numbers = tuple(numbers_in(self.events[start:]))
            call = NormCall(name, len(self.events), sources, self.source(y), tuple(y.shape), numbers)
            self.norm_calls[start] = call
        return y

    def statistic_taken(self, statistic: Statistic, run: Callable[[], Tensor]) -> Tensor:
        start, source = len(self.events), self.source(statistic.x)
        y = run()
        if self.quiet is None:
            where = self.innermost, len(self.events), source, self.source(y)
            self.statistics[start] = StatisticCall(statistic, *where, tuple(y.shape))
        return y

    def maximum_taken(self, taken: Extreme, run: Callable[[], Tensor]) -> Tensor:
        start, nodes, source, y = len(self.events), len(self.nodes), self.source(taken.x), run()
        if self.quiet is None:
            where = self.innermost, len(self.events), source, self.source(y)
            trained = taken.x not in self.detached
            self.maxima[start] = MaximumCall(*where, y.dtype, taken.smallest, trained)
            if not trained:  # a range that is noted
                for node in self.nodes[nodes:]:
                    node.severed = True
        return y

    def product_taken(self, product: Product, run: Callable[[], Tensor]) -> Tensor:
        start, source, y = len(self.events), self.source(product.x), run()
        name = self.shadow.names.get(id(product.weight))
        if name is not None and self.quiet is None and id(product.weight) not in self.shadow.owners:
            where, x = (len(self.events), source, self.source(y)), product.x
            self.product_calls[start] = ProductCall(product, name, *where, tuple(y.shape), y.dtype, x in self.requiring)
        return y

    def channels_called(self, name: str, forward: Any, x: Tensor) -> Tensor:
        start, source = len(self.events), self.source(x)
        inputs = [self._node_of[id(x)]] if id(x) in self._node_of else []
        y: Tensor = forward(x)
        shapes = tuple(x.shape), tuple(y.shape)
        self.channel_calls[start] = ChannelCall(name, len(self.events), source, self.source(y), *shapes, y.dtype)
        if name in self.shadow.convolutions or name in self.shadow.grouped:
            self.convolution_inputs.setdefault(name, []).extend(inputs)
            behind = [self._node_of[id(y)]] if id(y) in self._node_of else []
            self.nodes.append(Node(behind, convolution=name))
            self._node_of[id(y)] = len(self.nodes) - 1
        return y

    def channels_called_otherwise(self, name: str) -> None:
        if self.rest is not None:
            raise NotOpaque(self.rest.module, f"calls {name} after a condition")
        self.called_otherwise.add(name)

    def before_decision(self, number: int, tensors: list[Tensor]) -> None:
        self.decided_at.append(len(self.events))

    def before_opaque(self, name: str, args: Any, kwargs: Any) -> None:
        self.callers[name], self.last_opaque = (self._open[-2].name if len(self._open) > 1 else ""), name

    def after_opaque(self, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._link_opaque(tensors, outputs)
        shapes, dtypes = [Shape(output.shape) for output in outputs], [output.dtype for output in outputs]
        sources = tuple(map(self.source, tensors))
        self._add(Event(Opaque(name), [as_given((args, kwargs))], {"dtypes": dtypes}, shapes, sources=sources), outputs)

    def rest_gives(self, rest: Rest, tensors: list[Tensor]) -> None:
        self._link_opaque(tensors, [])

    def after_rest(self, rest: Rest, given: Any, outputs: list[Tensor]) -> None:
        self._link_opaque([], outputs)
        shapes, self.rest_at[len(self.events)] = [Shape(output.shape) for output in outputs], rest
        rest.trained = [output in self.requiring for output in outputs]
        told = {"gives": given, "passes": passes(self, rest), "keeps": sorted(rest.kept)}
        self._add(Event(Opaque(rest.module), rest.asked, told, shapes, sources=rest.sources), outputs)

    def after_mixture(self, name: str, given: list[Tensor], out: Tensor, slots: int) -> None:
        x = given[0]
        inputs = [self._node_of[id(tensor)] for tensor in given if id(tensor) in self._node_of]
        self._to_opaque += inputs
        self.nodes.append(Node([], opaque=True))
        self._node_of[id(out)] = len(self.nodes) - 1
        self.layer_inputs.setdefault(name, []).extend(inputs[:1])
        self.layer_rows[name] = self.layer_rows.get(name, 0) + x.numel() // x.shape[-1]
        self.slots[name] = self.slots.get(name, 0) + slots
        shapes = [Shape(tensor.shape) for tensor in given]
        self._add(Event(Mixture(name), shapes, {}, [Shape(out.shape)], sources=tuple(map(self.source, given))), [out])

    def read_by_weight(self, name: str) -> None:
        self.by_weight.setdefault(self.innermost, set()).add(name)

    def weight_converted(self, name: str) -> None:
        self.direct.add(name)

    def mixture_read_quietly(self, name: str, given: list[Tensor]) -> None:
        self._note_readers(given)
        self.called_quietly.add(name)

    def read_quietly(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        self._note_readers(tensors)
        if self.rest is not None:
            self._link_opaque(tensors, [])

    def layer_called_quietly(self, name: str, x: Tensor) -> Tensor:
        self.called_quietly.add(name)
        around = {module for module, takes_one in self.quiet_calls if takes_one}
        self.called_within[name] = self.called_within.get(name, around) & around
        return super().layer_called_quietly(name, x)

    @property
    def result_places(self) -> set[Source]:
        """The tensors that the model returns, without the identity of the recording."""
        return {(0, *source[1:]) if isinstance(source, tuple) else source for source in self.results}

    def same(self, other: Recording) -> bool:
        """Whether the same ops ran on the same tensors."""
        mine, others = ([event.anywhere() for event in recording.events] for recording in (self, other))
        read = (self.captured, self.direct, self.by_weight), (other.captured, other.direct, other.by_weight)
        return mine == others and read[0] == read[1] and self.paths == other.paths

    @property
    def innermost(self) -> str:
        """The module that is being called; "" for the model."""
        return self._open[-1].name if self._open else ""

    def module_at(self, event: int) -> str:
        """The innermost module whose call the event is in; "" for the model."""
        around = [scope for scope in self.scopes if scope.start <= event < scope.stop]
        return max(around, key=lambda scope: (scope.start, -scope.stop)).name if around else ""

    def entered(self, name: str, args: Any, kwargs: Any) -> None:
        trained = any(isinstance(one, Tensor) and one in self.requiring for one in tree_leaves((args, kwargs)))
        if any(isinstance(one, list | tuple) for one in (*args, *kwargs.values())):
            named = named_arguments(self.shadow.modules[name], args, kwargs)
            listed = {storage_of(one): key for key, one in named.items() if "[" in key and isinstance(one, Tensor)}
            self._listed.append((name, listed))
        args, kwargs = self.shadow.copied((args, kwargs))
        decided = self.decided_before + len(self.decisions)
        host = None if (now := host_states()) == self.host_began else now
        nodes, changes = (len(self.nodes), 0), len(self.changes)
        scope = Scope(name, args, kwargs, len(self.events), -1, trained, host, nodes, changes=changes, decided=decided)
        self._open.append(scope)
        self.kept.append((args, kwargs))

    def left(self, name: str, output: Any = None) -> None:
        while self._listed and self._listed[-1][0] not in self.inside:
            self._listed.pop()
        while self._open:
            scope = self._open.pop()
            if scope.name == name:
                scope.stop, scope.nodes = len(self.events), (scope.nodes[0], len(self.nodes))
                self.scopes.append(scope)
                return

    def original_called(self, name: str) -> None:
        self._originals_called.add(name)

    @property
    def captured(self) -> list[str]:
        """Parameters of the model itself that code used which keeps them outside of their modules."""
        return sorted(name for name in self._originals_read if name.rpartition(".")[0] not in self._originals_called)
