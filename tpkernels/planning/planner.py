"""``make_plan``: decide what to do with every module of a model.

It owns how the sources combine: overrides and the data flow decide, while plan files and ``tp_plan`` are printed beside
them; the layers that are left are cut by themselves (:mod:`tpkernels.planning.alone.single_layers`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.gemm.canonical import check_blocks
from tpkernels.nn.parameters import tp_mesh
from tpkernels.planning.alone.convolutions import convolution_choices
from tpkernels.planning.alone.kept_layers import kept_layers
from tpkernels.planning.alone.single_layers import by_rule, sums_its_gradient
from tpkernels.planning.alone.ties import cut_idle, idle_twins, tied_modules, untie
from tpkernels.planning.alone.whole_in_out import READ, attention_choices, check_experts, experts_choices
from tpkernels.planning.entries.fused_norms import find_fused_norms
from tpkernels.planning.entries.plan import NO_DATA_FLOW, STRATEGIES, ShardingPlan
from tpkernels.planning.entries.plan_entries import Chosen, make_entries
from tpkernels.planning.entries.shared_inputs import find_shared
from tpkernels.planning.hints import Hints, hints_for, override_styles
from tpkernels.planning.modules.layers import Layer, layer_of, own_base
from tpkernels.planning.modules.source_reads import maybe_read
from tpkernels.planning.proofs.asked_roles import asked_in_other_pieces, roles_asked_for
from tpkernels.planning.proofs.decision import OWN_CODE, Decision, decide
from tpkernels.planning.proofs.head_counts import refuse_more_ranks_than_heads
from tpkernels.planning.proofs.hypotheses import Attributes, Slice
from tpkernels.planning.proofs.inner_blocks import find_inner_blocks
from tpkernels.planning.proofs.own_products import told
from tpkernels.planning.proofs.pair_choices import numbers_by_channel, pair_choices, refuse_by_hand, seen_elsewhere
from tpkernels.planning.proofs.pairs_beside import beside_streams
from tpkernels.planning.proofs.search_gathered import gathered_arguments, summed_arguments, taken_bytes
from tpkernels.planning.proofs.tied_groups import tied_layers
from tpkernels.planning.proofs.weights_in_parts import shown_in_another_shape
from tpkernels.planning.proofs.why_alone import Neighbours
from tpkernels.planning.replays.replay import Role
from tpkernels.planning.replays.sequence_flow import Stream, follow
from tpkernels.planning.runs.example_inputs import Observation, observe
from tpkernels.planning.runs.row_counts import (
    bytes_of_products,
    bytes_of_statistics,
    count_rows,
    elements_in,
    untrained_in,
)
from tpkernels.planning.runs.trace_leaks import nothing_left
from tpkernels.planning.runs.weight_reads import called_by_weight
from tpkernels.planning.splits import degrees, for_degrees
from tpkernels.planning.styles import Column, CopiedHeads, Features, PartNorm, Replicate, Row, Sliced, Style

__all__ = ["check_plain", "make_plan"]


def make_plan(
    model: nn.Module,
    mesh: GroupLike | int,
    *,
    strategy: str = "auto",
    sequence_parallel: bool = False,
    overrides: Mapping[str, object] | None = None,
    example_inputs: object = None,
    experts: str = "auto",
    same_bits: int | None = None,
) -> ShardingPlan:
    """Find out how ``model`` can be cut over the ranks of ``mesh``; nothing is touched.

    Args:
        mesh: a mesh with a "tp" axis, a one-dimensional mesh, a ProcessGroup, or a number of ranks.  With one of the
            first three the plan also says which implementation runs, which makes the call collective.
        strategy: "auto", or "rules" to do without tracing: every linear by itself, whole in and out.
        sequence_parallel: let the residual stream of a decoder's or encoder's blocks travel cut along the sequence.
        overrides: patterns of module names to styles; ``*`` also stands for leading parts (``*.lm_head``).  They win
            over everything else.  Values as in the plan of :func:`parallelize`.
        example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments that the model runs with; of its
            values only integers count, where code asks for them (sizes of images).  A list of tuples and dicts is
            several calls, for all of which the plan holds.  Models of transformers, and some others, need none.
        experts: of mixtures: "auto" cuts their features where the module is recognised (print the plan to see which);
            "features" raises where one is not, and so does "experts", which deals whole experts out.
        same_bits: the largest number of ranks that is to give the same bits: what is cut, and where, is the same for
            every number that divides it.  Default: the mesh's, if a mesh or a group is given.

    Examples:
        >>> tpk.make_plan(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), 4).bytes_per_rank  # of four ranks
        (576, 576, 576, 576)

    Raises:
        ValueError: nothing to cut, more ranks than heads, a model that is parallel already; overrides that match
            nothing, contradict each other, or would leave a part where a whole tensor is needed.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    check_experts(experts)
    group: DeviceMesh | None = None
    if isinstance(mesh, int):
        if isinstance(mesh, bool) or mesh < 1:
            raise ValueError(f"mesh must be a mesh, a group or a number of ranks from 1, got {mesh!r}")
        world_size = mesh
    else:
        group = tp_mesh(mesh, model)
        world_size = group.size()
    check_plain(model)
    forced = override_styles(overrides or {}, model)
    if same_bits is None:
        same_bits = 0 if group is None else resolve(group).same_bits
    elif same_bits:
        check_blocks(same_bits, world_size)
    with for_degrees(same_bits):
        if strategy == "rules":
            return _Planner(model, world_size, forced, None).plan(group, sequence_parallel, experts)
        with nothing_left() as watch:
            planner = _Planner(model, world_size, forced, observe(model, example_inputs, watch))
            try:
                return planner.plan(group, sequence_parallel, experts)
            finally:
                del planner  # the trace has to be gone


def check_plain(model: nn.Module) -> None:
    """Refuse a model that is parallel already."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            said = f"parameter {name!r} is a DTensor already (placements {parameter.placements})"
            raise ValueError(f"{said}: the model was parallelized before, a second time would cut its shards again")


class _Planner:
    def __init__(
        self, model: nn.Module, world_size: int, forced: Mapping[str, Style], observation: Observation | None
    ) -> None:
        self.model, self.world_size, self.observation = model, world_size, observation
        self.modules = dict(model.named_modules())
        names = {id(module): name for name, module in reversed(self.modules.items())}
        every = dict(model.named_modules(remove_duplicate=False))
        self.forced = {names[id(every[name])]: style for name, style in forced.items()}
        self.layers = {name: layer for name, m in self.modules.items() if (layer := layer_of(m)) is not None}
        self.twins = {} if degrees() else tied_layers(self.modules, self.layers)
        """Layers that may be cut with others although they share a parameter."""
        self.hints: Hints | None = hints_for(model)
        self.traced = observation is not None and observation.recording is not None
        self.chosen: dict[str, Chosen] = {}
        self.decision = Decision()
        self.neighbours: Neighbours | None = None
        self.attributes: Attributes = {}
        self.arguments: dict[tuple[str, str], tuple[int, int]] = {}
        self.states: dict[str, tuple[int, int]] = {}
        self.feeders: set[str] = set()
        self.by_itself: set[type[nn.Module]] = {nn.Embedding}
        """Layers with code of their own around them that may not see a part of what the layer gives or takes."""

    def plan(self, group: DeviceMesh | None, sequence_parallel: bool, experts: str) -> ShardingPlan:
        self.by_itself |= {nn.Linear} if sequence_parallel else set()
        self._check_captured()
        parts = nn.Linear in self.by_itself
        kept = kept_layers(self.model, self.layers, self.world_size, self.observation, self._tied(), parts=parts)
        for name, style in self.forced.items():
            refuse_by_hand(name, style)
            if not isinstance(style, Replicate) and self.traced and name in self._read_directly():
                raise ValueError(f"the override of {name!r} conflicts with the model: it {READ}, and must stay whole")
            self.chosen[name] = Chosen(style, "override", f"asked for{'' if self._is_seen(name) else '; not proven'}")
        if self.traced:
            self._from_data_flow(kept)
            assert self.observation is not None
            self.neighbours = Neighbours(self.observation, self.decision, pairs=not parts and not degrees())
        for name, reason in kept.items():
            self.chosen.setdefault(name, Chosen(Replicate(), "default", reason))
        read, tied = self._read_directly(), self._tied()
        blocks, inner = find_inner_blocks(self.observation, self.model, self.world_size, {*self.chosen, *tied})
        self.chosen |= blocks
        for name, layer in self.layers.items():
            if name not in self.chosen:
                self.chosen[name] = self._by_rule(name, layer)
        for name in self.feeders:
            self.chosen[name] = sums_its_gradient(self.chosen[name])
        self.chosen |= attention_choices(self.modules, self.chosen, self.world_size, read, tied)
        self.chosen |= convolution_choices(
            self.modules, self.chosen, self.world_size, read, tied, self.observation,
            self.neighbours.why_unpaired if self.neighbours is not None else lambda name: "",
        )  # fmt: skip
        if self.observation is not None:
            self.chosen |= experts_choices(
                self.model, self.observation, self.chosen, self.world_size, tied, way=experts, parts=parts
            )
        self._untie()
        self._check_something_is_cut()
        for name in sorted({parameter.rpartition(".")[0] for parameter in self.decision.partial}):
            reason = "whole, but works on parts: its gradients are summed"
            self.chosen[name] = Chosen(Replicate(sequence_parallel=True), "data flow", reason)
        stream = self._cut_sequence() if sequence_parallel else Stream([])
        firsts = [recording for _, recording in self.observation.firsts] if self.observation is not None else []
        styles = {name: chosen.style for name, chosen in self.chosen.items()}
        seen = [recording for _, recording in self.observation.recordings] if self.observation is not None else []
        plan = make_entries(
            self.model,
            self.world_size,
            self.chosen,
            attributes=self.attributes,
            arguments=self.arguments,
            random=tuple(self.decision.random),
            whole_draws=self.decision.whole_draws if self.decision.random else (),
            rows=count_rows(firsts) if firsts else None,
            slots=firsts[0].slots if firsts else {},
            elements=elements_in(firsts),
            untrained=untrained_in(firsts),
            shared=(*find_shared(firsts, styles), *inner),
            norms=find_fused_norms(self.observation, styles, stream.local),
            group=group,
            stream=stream,
            notes=(*self._notes(), *stream.notes),
            example="" if self.observation is None else self.observation.told(self.model),
        )
        decided, world = self.decision, self.world_size
        gathered, sent = gathered_arguments(decided.proven, firsts)
        summed, met = summed_arguments(decided.proven, firsts)
        products, dims = told(decided.products)
        return replace(
            plan, by_weight=called_by_weight(seen, styles), strategy="rules" if self.observation is None else "auto",
            statistic_bytes=bytes_of_statistics(firsts, decided.statistics, decided.maxima, world),
            cut_results=decided.cut_results, result_bytes=decided.result_bytes, gathered=gathered,
            gathered_bytes=sent * (world - 1) // world, maxima=decided.maxima, argument_bytes=taken_bytes(plan, firsts),
            draws_from=self._draws_from(), kept={".".join(filter(None, key)): c for key, c in decided.kept.items()},
            summed_arguments=summed, summed_bytes=2 * met * (world - 1) // world, statistics=decided.statistics,
            products=products, product_bytes=bytes_of_products(firsts, dims, world),
            states=self.states, state_bytes=sum(decided.state_bytes.values()) * (world - 1) // world,
        )  # fmt: skip

    def _draws_from(self) -> tuple[str, ...]:
        """Other generators than torch's that a run has drawn from, also one that failed."""
        shadow = self.observation.shadow if self.observation is not None else None
        return () if shadow is None else tuple(sorted(shadow.drawn_from))

    def _check_captured(self) -> None:
        """Refuse code that keeps parameters outside of modules: it would go on with the old, untrained ones."""
        recordings = self.observation.recordings if self.observation is not None else []
        captured = sorted({name for _, recording in recordings for name in recording.captured})
        if captured:
            raise ValueError(
                f"parameters {captured[:3]} are used by code that keeps them outside of their modules (in a "
                "closure, a default argument, a list): it would go on with the tensors from before; let it read them "
                "from their modules"
            )

    def _cut_sequence(self) -> Stream:
        """Let the residual travel cut along the sequence, where that is proven, and change the styles to match."""
        if self.observation is None or not self.observation.followed:
            why = self.observation.problem if self.observation is not None else 'strategy is "rules"'
            advice = "" if self.observation is not None and self.observation.needs_values else "; give example_inputs"
            raise ValueError(f"sequence_parallel needs the data flow of the model: {why}{advice}")
        if len(self.observation.examples) > 1 and not self.observation.guessed:
            raise ValueError(
                f"sequence_parallel takes one call as example_inputs, not {len(self.observation.examples)}"
            )
        roles: dict[str, str] = {}
        for group in self.decision.proven:
            roles |= dict.fromkeys(group.columns, "column") | dict.fromkeys(group.rows, "row")
            roles |= dict.fromkeys(group.scattered, "both")
        others = [name for name, layer in self.layers.items() if name not in roles and layer.kind != "embedding"]
        together = {name: self.decision.together.get(name, (name,)) for name in others}
        together |= {name: (name,) for name, m in self.modules.items() if isinstance(m, nn.MultiheadAttention)}
        assert self.observation.shadow is not None
        together |= self.observation.shadow.with_routers
        stream = follow(self.observation, roles, together)
        for name, cut in stream.layers.items():
            old = self.chosen[name]
            if cut and isinstance(old.style, Column | CopiedHeads | Row):
                self.chosen[name] = replace(old, style=replace(old.style, sequence_parallel=True))
        for local in stream.local:
            for inner, module in self.modules[local].named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    reason = "works on a part of the sequence: its gradients are summed"
                    name = ".".join(filter(None, (local, inner)))
                    self.chosen[name] = Chosen(Replicate(sequence_parallel=True), "data flow", reason)
        return stream

    def _is_seen(self, name: str) -> bool:
        """Whether the data flow shows what becomes of the module's output."""
        if self.observation is None or self.observation.recording is None:
            return False
        return name not in self.layers or name in self.observation.recording.layer_rows

    def _read_directly(self) -> Container[str]:
        """torch's attention modules whose parameters are read past them, as far as can be told."""
        if self.observation is None or self.observation.recording is None:
            return maybe_read(self.model)
        direct = self.observation.recording.direct
        return direct if self.observation.followed else direct | maybe_read(self.model).keys()

    def _notes(self) -> tuple[str, ...]:
        if self.observation is None or self.observation.followed:
            return () if self.observation is None or not self.observation.note else (self.observation.note,)
        parts = ", ".join(dict.fromkeys(call.method for call in self.observation.calls.values()))
        but = f", but those of {parts}, followed by themselves" if parts else ""
        return (f"{NO_DATA_FLOW}{self.observation.problem}; layers are taken one by one{but}",)

    def _from_data_flow(self, kept: Mapping[str, str]) -> None:
        assert self.observation is not None and self.observation.recording is not None
        excluded = {name: reason for name, reason in kept.items() if "fewer features" not in reason}
        busy = {*self.observation.recording.layer_rows, *self.forced, *excluded}
        linear = {} if nn.Linear in self.by_itself else self.twins  # these would take a part of the sequence, if called
        idle = {} if degrees() else idle_twins(self.modules, self.layers, busy, linear)
        self.twins = {name: {*names}.difference(idle.get(name, ())) for name, names in self.twins.items()}
        may_be = {n for n in self._tied() if n in self.layers or self._by_channels(n)} - {*self.twins, *idle}
        excluded |= dict.fromkeys(may_be, "has a tied weight")
        excluded |= seen_elsewhere(self.observation, self.model)
        excluded |= {name: OWN_CODE for name in self.layers if own_base(self.modules[name]) in self.by_itself}
        loose, overridden = roles_asked_for(self.forced, self.layers, self.world_size)
        excluded |= overridden
        style: Style
        hidden = [  # also where no guess of the values reaches them
            f"{name} is inside of a module that needs values of tensors"
            for name in loose if name in self.observation.recording.rows_unknown
        ]  # fmt: skip
        if not hidden:
            self.decision = self._decide(excluded, loose)
            while shown := self._not_so_after_all(loose):
                excluded |= shown
                self.decision = self._decide(excluded, loose)
        conflicts = hidden or self.decision.conflicts
        if conflicts:
            names = ", ".join(map(repr, loose))
            raise ValueError(
                f"the overrides of {names} conflict with the model: {conflicts[0]}; override the layers "
                'that belong to them as well, or use "column_gather" and "row_split", which fit everywhere'
            )
        refuse_more_ranks_than_heads(self.decision, self.world_size, self.model)
        self._choose_slices()
        assert self.observation.shadow is not None
        self.chosen |= pair_choices(self.decision, self.observation.shadow, self.world_size)
        self.attributes |= numbers_by_channel(self.decision, self.observation.shadow, self.world_size)
        for name, other in self.decision.adapters.items():
            if nn.Linear not in self.by_itself:  # one that stays whole would take a part of the sequence
                # Mergers multiply a linear layer with the other.
                half = Replicate(distributed=type(self.modules[name]) is nn.Linear)
                self.chosen.setdefault(name, Chosen(half, "data flow", f"small beside {other}, which is cut"))
        for group, proof in self.decision.proven.items():
            self.feeders |= {*group.feeders, *group.summed, *proof.feeders}
            self.arguments |= proof.arguments
            self.states |= {".".join(filter(None, key)): cut for key, cut in proof.states.items()}
            rows = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in group.rows))
            for name in (name for name in group.columns if name not in group.scattered):
                style = replace(proof.column(name), sum_input_gradient=name not in self.decision.fed)
                reason = f"{proof.each(self.world_size)}, up to {rows}"
                if self.layers[name].kind == "embedding":
                    style = Features()
                if name in proof.copies:
                    copies, sizes = proof.copies[name], proof.segments[name]
                    style, why = copies.style(sizes, proof.unit(sizes[0])), copies.reason(self.world_size)
                    reason = why if isinstance(style, CopiedHeads) else f"{reason}; {why}"
                self._choose(name, style, reason)
            columns = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in group.columns))
            for name in group.rows:
                scattered, layer = name in group.scattered, self.layers[name]
                style = proof.row(layer.in_features, layer.out_features, scattered=scattered)
                what = f", and scatters the sum, up to {rows}" if scattered else ""
                self._choose(name, style, f"sums what {columns} cut{what}")
        self.chosen |= beside_streams(self.decision.streaming, self.chosen)
        cut_idle(self.chosen, idle)

    def _decide(self, excluded: Mapping[str, str], loose: Mapping[str, Role]) -> Decision:
        assert self.observation is not None
        whole_stream = nn.Linear not in self.by_itself  # else what a feeder gives would be cut along the sequence
        return decide(
            self.observation, self.world_size, excluded, loose, feeders=whole_stream, pairs=whole_stream,
            ties=self.twins, asked=self.forced,
        )  # fmt: skip

    def _by_channels(self, name: str) -> bool:
        shadow = self.observation.shadow if self.observation is not None else None
        return shadow is not None and (name in shadow.convolutions or name in shadow.by_channel)

    def _choose_slices(self) -> None:
        """Cut parameters of modules that stay with the heads that they meet."""
        found: dict[str, dict[str, Slice]] = {}
        for proof in (self.decision.proven | self.decision.products).values():
            self.attributes |= proof.attributes
            for parameter, cut in proof.slices.items():
                owner, _, key = parameter.rpartition(".")
                found.setdefault(owner, {})[key] = cut
        for name, norm in self.decision.norms.items():
            self.chosen[name] = Chosen(PartNorm(*norm), "data flow", "over features that are cut; tried on numbers")
        for owner, cuts in found.items():
            buffers = self.modules[owner]._buffers
            packed = {key: cut for key, cut in sorted(cuts.items()) if len(cut.runs) > 1 or key in buffers}
            runs = tuple((key, cut.runs) for key, cut in packed.items())
            copies = next((cut[2:] for cut in packed.values()), ())
            style = Sliced(tuple(sorted((key, cut.dim) for key, cut in cuts.items())), runs, *copies)
            self.chosen[owner] = Chosen(style, "data flow", f"{', '.join(cuts)} cut with the heads or features met")

    def _not_so_after_all(self, loose: Mapping[str, Role]) -> dict[str, str]:
        """Layers that are proven, and that what the proof does not see speaks against."""
        assert self.observation is not None
        proven = self.decision.proven
        shown = shown_in_another_shape(self.observation, proven, self.model, self.layers)
        return shown | asked_in_other_pieces(loose, proven)

    def _choose(self, name: str, style: Style, reason: str) -> None:
        """What the data flow proves, under the name of the first source that says the same."""
        asked = self.forced.get(name)
        if asked is not None:
            if isinstance(asked, Row) != isinstance(style, Row):
                raise ValueError(f"the override of {name!r} conflicts with the data flow, where it {reason}")
            if isinstance(asked, Column) and isinstance(style, Column):
                unit = style.unit if style.unit > 1 else asked.unit
                proven = ("segments", "units", "copied", "behind", "copied_heads", "copies")
                style = replace(asked, unit=unit, **{option: getattr(style, option) for option in proven})
            elif isinstance(asked, Row):
                assert isinstance(style, Row)
                unit = style.unit if style.unit > 1 else asked.unit
                style = replace(asked, unit=unit, scatter_unit=style.scatter_unit)
            self.chosen[name] = Chosen(style, "override", f"asked for, and proven by data flow: {reason}")
        elif self.hints is not None and name in self.hints.styles:
            said = self.hints.styles[name][0]
            reason = f"{self.hints.origin} says {said}; {reason}"
            self.chosen[name] = Chosen(style, self.hints.source, reason)
        else:
            self.chosen[name] = Chosen(style, "data flow", reason)

    def _by_rule(self, name: str, layer: Layer) -> Chosen:
        said = self.hints.styles[name][0] if self.hints is not None and name in self.hints.styles else ""
        why = f" ({self.hints.origin} says {said})" if said and self.hints is not None else ""
        apart = self.neighbours.why_alone(name, table=layer.kind == "embedding") if self.neighbours else ""
        why += f" (not with its neighbours: {apart})" if apart else ""
        why += " (not called by the example)" if self.traced and not self._is_seen(name) else ""
        return by_rule(layer, why, tied=name in self._tied())

    def _tied(self) -> dict[str, list[str]]:
        return tied_modules(self.modules)

    def _untie(self) -> None:
        recording = self.observation.recording if self.observation is not None else None
        untie(self.modules, self.layers, self.chosen, None if recording is None else recording.direct)

    def _check_something_is_cut(self) -> None:
        if self.world_size > 1 and all(isinstance(c.style, Replicate) for c in self.chosen.values()):
            if any(c.source == "override" for c in self.chosen.values()):
                return
            raise ValueError(
                f"nothing to shard: {type(self.model).__name__} has no linear, embedding or convolution that can be "
                f"cut over {self.world_size} ranks{self._why_nothing()}"
            )

    def _why_nothing(self) -> str:
        reasons = [f"{name} {chosen.reason}" for name, chosen in self.chosen.items()][:3]
        return f" ({'; '.join(reasons)})" if reasons else ""
