"""``make_plan`` for Keras models: what the engine of :mod:`tpkernels.planning` proves, and a rule for what is left.

It owns how proofs become the plan's cuts of variables.  Whatever is not proven keeps whole tensors going in and coming
out: a layer that contracts by more than :data:`EXPANSION` takes its part of the input and is summed, every other one is
cut by what it makes and gathered; a table is cut by its rows.
"""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut, even_cut
from tpkernels.integrations.keras.plan import KerasPlan, LayerPlan, Numbers
from tpkernels.integrations.keras.shadow import MODES_RUN, Equation, KerasShadow
from tpkernels.integrations.keras.tables import table_cuts, why_table_stays_whole
from tpkernels.integrations.keras.traffic import Traffic
from tpkernels.planning.proofs.decision import Decision, decide
from tpkernels.planning.proofs.hypotheses import Proof
from tpkernels.planning.runs.events import Event
from tpkernels.planning.runs.example_calls import Example
from tpkernels.planning.runs.example_inputs import Observation
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.trace import Recording
from tpkernels.planning.splits import as_array_split, share

__all__ = ["EXPANSION", "check_built", "example_of", "make_plan"]

EXPANSION = 1.5
BATCH, LENGTH = 3, 7
"""Sizes that a model is unlikely to have: equal numbers could hide which dimension is which."""


def make_plan(model: Any, n: int, *, example_inputs: Any = None) -> KerasPlan:
    """Find out how a built Keras model can be cut over ``n`` ranks; nothing is touched.

    Args:
        example_inputs: tensors in the structure that the model is called with; only shapes and dtypes are used.
            Functional and Sequential models need none.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(8)])
        >>> [layer.style for layer in tpk.keras.make_plan(model, 2).layers]
        ['column', 'row']

    Raises:
        ValueError: the model is not built; ``n`` is less than 1, or more than can be cut; the model cannot be traced.
    """
    backend.check_backend("torch")
    check_count("n", n)
    check_built(model)
    with as_array_split():
        return _Planner(model, n, example_of(model) if example_inputs is None else example_inputs).plan()


def check_count(name: str, count: Any) -> None:
    """Refuse what is no number of ranks."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be a number of ranks from 1, got {count!r}")


def check_built(model: Any) -> None:
    """Refuse what is no Keras model, or one without variables."""
    keras = backend.keras_module()
    if not isinstance(model, keras.Model):
        raise ValueError(f"model must be a keras.Model, got {type(model).__name__}")
    if not model.built or not model.variables:
        raise ValueError(
            f"{type(model).__name__} {model.name!r} is not built, so it has no weights to cut: call it once on data, "
            "or model.build(input_shape)"
        )


def example_of(model: Any) -> Any:
    """Inputs for a model that says what it takes.

    Raises:
        ValueError: a subclassed model does not say it.
    """
    keras = backend.keras_module()
    inputs = backend.declared_inputs(model)
    if inputs is None:
        raise ValueError(
            f"{type(model).__name__} does not say what it is called with: pass example_inputs, tensors with the shapes "
            "and dtypes of a batch"
        )

    def made(spec: Any) -> Any:
        shape = [BATCH if at == 0 else LENGTH if size is None else size for at, size in enumerate(spec.shape)]
        return torch.empty(shape, dtype=backend.torch_dtype(spec.dtype), device="meta")

    return keras.tree.map_structure(made, inputs)


class _Planner:
    def __init__(self, model: Any, world_size: int, example: Any) -> None:
        self.model, self.world_size = model, world_size
        self.shadow = KerasShadow(model)
        self.observation = _observe(self.shadow, example)
        assert self.observation.recording is not None
        self.recording: Recording = self.observation.recording
        self.traffic = Traffic(self.recording, world_size)
        leaves = torch.utils._pytree.tree_leaves(example)
        self.inputs = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in leaves)
        self.decision = Decision()

    def plan(self) -> KerasPlan:
        recording = self.recording
        excluded = self._excluded(recording)
        self.decision = decide(self.observation, self.world_size, excluded, {}, feeders=False, says_all=False)
        layers: dict[str, LayerPlan] = {}
        for group, proof in self.decision.proven.items():
            self._take_proof(group, proof, layers)
        for name in self.shadow.keras_layers:
            if name not in layers:
                found = self._alone(name, excluded.get(name))
                if found is not None:
                    layers[name] = found
        ordered = tuple(layers[name] for name in self.shadow.keras_layers if name in layers)
        if self.world_size > 1 and all(layer.style == "whole" for layer in ordered):
            why = "; ".join(f"{layer.name} {layer.reason}" for layer in ordered[:3])
            raise ValueError(
                f"nothing of {type(self.model).__name__} can be cut over {self.world_size} ranks ({why}): use fewer"
            )
        self._check_heads()
        variables = {variable.path: backend.plain_shape(variable) for variable in self.model.variables}
        return KerasPlan(
            type(self.model).__name__, self.world_size, ordered, variables, self._numbers(),
            tuple(sorted(self._noisy(recording))), tuple(sorted(self.decision.partial)),
            inputs=self.inputs,
        )  # fmt: skip

    def _excluded(self, recording: Recording) -> dict[str, str]:
        """Linear layers that cannot be cut with others, and why."""
        excluded = {}
        shared: dict[int, int] = {}
        for layer in self.shadow.keras_layers.values():
            for variable in backend.variables_of(layer):
                shared[id(variable)] = shared.get(id(variable), 0) + 1
        for name, equation in self.shadow.equations.items():
            layer = self.shadow.keras_layers[name]
            bias = layer.bias
            if bias is not None and torch.Size(backend.plain_shape(bias)).numel() != equation.out_features:
                excluded[name] = "has a bias that several of its features share"
            elif any(shared[id(variable)] > 1 for variable in backend.variables_of(layer)):
                excluded[name] = "shares a weight with another layer"
            elif name in recording.direct:
                excluded[name] = "has weights that the model uses without calling the layer"
            elif name not in recording.layer_rows:
                excluded[name] = "is not called by the example"
        return excluded

    # ------------------------------------------------------------------ proofs

    def _take_proof(self, group: Group, proof: Proof, layers: dict[str, LayerPlan]) -> None:
        rows = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in group.rows))
        columns = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in group.columns))
        each = "by features"
        if proof.heads:
            sizes = share(proof.heads, self.world_size, proof.pieces)
            each = f"{proof.heads} heads, {'/'.join(map(str, sizes))} per rank"
        for name in group.columns:
            if name in proof.copies:
                copies = proof.copies[name]
                reason = f"{copies.heads} key-value heads for {self.world_size} ranks: whole on every rank"
                layers[name] = self._layer(name, "copied", reason, {}, self._copied_ranges(name, proof))
            else:
                cuts = self._linear_cuts(name, made=True, runs=proof.segments[name], pieces=proof.pieces)
                layers[name] = self._layer(name, "column", f"{each}, up to {rows}", cuts)
        for name in group.rows:
            cuts = self._linear_cuts(name, made=False, runs=(), pieces=proof.pieces)
            layers[name] = self._layer(name, "row", f"sums what {columns} cut", cuts)

    def _copied_ranges(self, name: str, proof: Proof) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Features that each rank uses: copies of a head stand next to each other."""
        copies = proof.copies[name]
        each, start, ranges = copies.total // copies.heads, 0, []
        for count in share(copies.total, self.world_size, copies.total):
            heads = [(start + at) // each for at in range(count)]
            ranges.append(tuple((head * copies.features, (head + 1) * copies.features) for head in heads))
            start += count
        return tuple(ranges)

    def _linear_cuts(self, name: str, *, made: bool, runs: tuple[int, ...], pieces: int) -> dict[str, Cut]:
        """Cuts of the variables of a linear layer: along its first letter of what it makes, or of what it takes."""
        layer, equation = self.shadow.keras_layers[name], self.shadow.equations[name]
        letters = equation.made if made else equation.contracted
        inner = torch.Size([equation.sizes[letter] for letter in letters[1:]]).numel()
        features = equation.out_features if made else equation.in_features
        unit = max(1, (features // pieces if pieces else 1) // inner)
        sizes = [size // inner for size in runs if len(runs) > 1]
        return linear_cuts(layer, equation, self.world_size, made=made, unit=unit, runs=sizes)

    def _layer(self, name: str, style: str, reason: str, cuts: dict[str, Cut], copied: Any = ()) -> LayerPlan:
        layer = self.shadow.keras_layers[name]
        sent: int | None
        if style == "vocabulary":
            sent = self.traffic.table(name, layer)
        elif style == "whole":
            sent = self.traffic.whole(layer, self.decision.partial)
        else:
            sent = self.traffic.linear(name, layer, self.shadow.equations[name], style, cuts)
        return LayerPlan(name, layer.path or layer.name, type(layer).__name__, style, reason, cuts, copied, sent)

    # ------------------------------------------------------------------ what is left

    def _alone(self, name: str, excluded: str | None) -> LayerPlan | None:
        layer = self.shadow.keras_layers[name]
        if not backend.weights_of(layer):
            return None
        if name in self.shadow.equations:
            return self._layer(name, *self._linear_alone(name, excluded))
        cuts = table_cuts(layer, self.world_size)
        if cuts is None:
            return self._layer(name, "whole", self.shadow.reasons.get(name, "no way to cut it is known"), {})
        why = why_table_stays_whole(layer, self.world_size, self.shadow.keras_layers.values())
        return self._layer(name, "whole", why, {}) if why else self._layer(name, "vocabulary", "by its rows", cuts)

    def _linear_alone(self, name: str, excluded: str | None) -> tuple[str, str, dict[str, Cut]]:
        if excluded is not None:
            return "whole", excluded, {}
        equation = self.shadow.equations[name]
        said = [error.reason for group, error in self.decision.refused.items() if name in (*group.columns, *group.rows)]
        why = f" (not with its neighbours: {said[0]})" if said else ""
        row = equation.in_features > EXPANSION * equation.out_features
        letter = (equation.contracted if row else equation.made)[0]
        if equation.sizes[letter] < self.world_size:
            return "whole", f"has fewer parts ({equation.sizes[letter]}) than there are ranks{why}", {}
        cuts = linear_cuts(self.shadow.keras_layers[name], equation, self.world_size, made=not row)
        if row:
            return "row_split", f"contracts{why}", cuts
        expands = equation.out_features > EXPANSION * equation.in_features
        return "column_gather", f"{'expands' if expands else 'neither expands nor contracts'}{why}", cuts

    def _check_heads(self) -> None:
        """Refuse more ranks than heads, unless the model has other attention that can be cut."""
        if any(proof.heads for proof in self.decision.proven.values()):
            return
        for group, error in self.decision.refused.items():
            if 0 < error.count < self.world_size and len(group.columns) + len(group.rows) <= 8:
                raise ValueError(
                    f"{self.world_size} ranks are more than the {error.count} heads of "
                    f"{group.columns[0].rpartition('.')[0]}: use at most {error.count}"
                )

    def _numbers(self) -> tuple[Numbers, ...]:
        found: dict[tuple[str, str], Numbers] = {}
        for proof in self.decision.proven.values():
            for (name, attribute), values in proof.attributes.items():
                own = self.shadow.modules[name].named[attribute]
                whole = vars(self.shadow.keras_layers[name])[own]
                found[name, own] = Numbers(name, own, whole, tuple(values))
        return tuple(found.values())

    def _noisy(self, recording: Recording) -> set[str]:
        """The layers that draw random numbers between a column and its row."""
        starts: dict[str, list[int]] = {}
        for at, event in enumerate(recording.events):
            if event.layer:
                starts.setdefault(event.layer, []).append(at)
        noisy = set()
        for column, row in self.decision.random:
            for first in starts[column]:
                last = min((at for at in starts[row] if at > first), default=first)
                for at in range(first, last):
                    if _draws(recording.events[at]):
                        inside = [s for s in recording.scopes if s.start <= at < s.stop]
                        noisy.add(min(inside, key=lambda scope: scope.stop - scope.start).name)
        return noisy


def linear_cuts(
    layer: Any, equation: Equation, world_size: int, *, made: bool, unit: int = 1, runs: Any = ()
) -> dict[str, Cut]:
    """Cuts of the kernel, of a column layer's bias, and of the LoRA factor that has the cut dimension."""
    letter = (equation.made if made else equation.contracted)[0]
    dim = equation.kernel.index(letter)
    kernel = backend.kernel_of(layer)
    shape = backend.plain_shape(kernel)
    cuts = {kernel.path: even_cut(shape, dim, world_size, unit=unit, runs=runs)}
    if made and layer.bias is not None:
        bias = backend.plain_shape(layer.bias)
        cuts[layer.bias.path] = even_cut(bias, len(bias) - len(equation.made), world_size, unit=unit, runs=runs)
    if layer.lora_enabled:
        last = dim == len(shape) - 1
        factor, at = (layer.lora_kernel_b, 1) if last else (layer.lora_kernel_a, dim)
        cuts[factor.path] = even_cut(backend.plain_shape(factor), at, world_size, unit=unit, runs=runs)
    return cuts


def _observe(shadow: KerasShadow, example: Any) -> Observation:
    """The recorded runs of a model, in training and in evaluation.

    Raises:
        ValueError: it cannot be traced.
    """
    found = Observation.__new__(Observation)
    found.shadow, found.problem, found.note, found.examples, found.calls = shadow, "", "", [[]], {}
    found.followed = True
    found.args, found.kwargs = shadow.fake_inputs((example,), {})
    call = Example("", found.args, found.kwargs)
    failures: dict[str, str] = {}
    for mode in MODES_RUN:
        shadow.set_mode(mode)
        recording = Recording(shadow)
        try:
            recording.run(call)
        except Exception as error:  # noqa: BLE001 - the model's own code runs
            failures[str(mode)] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        found.examples[0].append((mode, recording))
        found.calls[id(recording)] = call
    if failures:
        mode_name, why = next(iter(failures.items()))
        raise ValueError(f"{type(shadow.model.keras_model).__name__} cannot be traced in {mode_name}: {why}")
    found.mode, found.recording = found.recordings[0]
    for _, other in found.recordings[1:]:
        found.recording.direct |= other.direct
    shadow.set_mode(found.mode)
    return found


def _draws(event: Event) -> bool:
    """Whether the event is a random op; Keras's attention kernels drop nothing."""
    overloads = getattr(event.packet, "overloads", None)
    if overloads is None or "scaled_dot_product" in str(event.packet):
        return False
    return torch.Tag.nondeterministic_seeded in getattr(event.packet, overloads()[0]).tags
