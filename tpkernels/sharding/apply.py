"""``parallelize``: swap the layers of an existing model for tensor-parallel ones, as a plan says.

It owns all checks before anything is touched, and the swap in place.  A layer stays the same object and changes its
class, so that every reference to it, also in lists and dicts of the model, refers to the parallel layer.

It assumes that every rank holds the same model, and compares the values (``init_weights``).

It refuses patterns that match nothing, styles that do not fit, weights tied to something outside the plan, a plan for
another model or number of ranks, and a second pass over the same model.  After an error the model is as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpkernels import dispatch
from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.errors import FallbackPlanWarning
from tpkernels.gemm.canonical import check_job
from tpkernels.nn.by_weight import call_by_weight
from tpkernels.nn.convolution import cut_channels, own_code
from tpkernels.nn.copied_heads import check_copies
from tpkernels.nn.cut_experts import CutExperts, call_inner, caller_of
from tpkernels.nn.gathered_arguments import gather_arguments
from tpkernels.nn.host_generators import hosts_in_step
from tpkernels.nn.multihead import ParallelMultiheadAttention, why_not_parallel
from tpkernels.nn.paired_convolution import pair_channels
from tpkernels.nn.parameters import tp_mesh
from tpkernels.nn.part_maxima import take_maxima
from tpkernels.nn.part_norm import part_norm
from tpkernels.nn.part_statistics import take_over_parts
from tpkernels.nn.replicated import replicate_parameters
from tpkernels.nn.retired import retires_parameters
from tpkernels.nn.same_weights import compared
from tpkernels.nn.sliced import check_slices, slice_parameters
from tpkernels.nn.sliced_arguments import slice_arguments
from tpkernels.nn.summed_arguments import sum_argument_gradients
from tpkernels.nn.summed_output import sum_output_gradient
from tpkernels.nn.torch_encoder import call_cut_layers
from tpkernels.nn.whole_linear import WholeLinear
from tpkernels.nn.written_states import run_with_states
from tpkernels.planning.alone.ties import tie_kind
from tpkernels.planning.alone.whole_in_out import check_experts
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.entries.shared_inputs import share_inputs
from tpkernels.planning.hints import match
from tpkernels.planning.modules.experts import Refused, check_layout
from tpkernels.planning.modules.layers import (
    Layer,
    is_attention,
    layer_of,
    own_base,
    take_place,
    unswappable,
)
from tpkernels.planning.modules.numbers import owner_of, set_number
from tpkernels.planning.planner import check_plain, make_plan
from tpkernels.planning.style_names import as_style
from tpkernels.planning.styles import (
    Channels,
    Column,
    CopiedHeads,
    Experts,
    Features,
    Heads,
    PartNorm,
    Replicate,
    Row,
    Sliced,
    Style,
    Vocabulary,
)
from tpkernels.sharding.batches import compare_batches
from tpkernels.sharding.block_masks import drop_by_blocks, refuse_draws
from tpkernels.sharding.fused_norms import fuse_norms
from tpkernels.sharding.kept_caches import keep_in_modules
from tpkernels.sharding.outputs import whole_outputs
from tpkernels.sharding.own_products import differ_between_products, multiply_parts
from tpkernels.sharding.randomness import Fork, differ_between, leave_on_errors, share_in
from tpkernels.sharding.replacements import replacements
from tpkernels.sharding.replicas import compare_models
from tpkernels.sharding.same_bits import check_plan, check_styles
from tpkernels.sharding.sequence_parallel import run_sequence_parallel
from tpkernels.sharding.style_checks import check_column, check_row, convolutions_in, makes_parts
from tpkernels.state.plain_state import speak_originals
from tpkernels.verification.verifier import Verifier

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


@retires_parameters
@compared()
def parallelize(
    model: M,
    mesh: GroupLike,
    plan: str | ShardingPlan | Mapping[str, object] = "auto",
    *,
    init_weights: str = "rank 0",
    verify: bool = False,
    example_inputs: object = None,
    fused_norm: str | bool = "auto",
    experts: str = "auto",
    same_bits: int | None = None,
) -> M:
    """Make ``model`` tensor-parallel in place, and return it.

    Args:
        mesh: a mesh with a "tp" axis (``tpk.init()``), a one-dimensional mesh, or a ProcessGroup.
        plan: "auto" for :func:`make_plan`'s, a :class:`ShardingPlan`, or module names to styles.  Names are fully
            qualified (``encoder.layer.0.output.dense``) and may be patterns: ``*`` matches within one part of the name,
            ``**`` any number of parts, ``[0-2]`` one of the characters.  Styles are "column", "row", "replicate",
            "column_gather", "row_split", "vocabulary", "features", "channels"; names of transformers' ``tp_plan``
            ("colwise", ...); styles of ``torch.distributed.tensor.parallel``; or :class:`Column`, :class:`Row`,
            :class:`Replicate`, ... objects with options.  Such a plan is carried out as it stands; what it does not
            name stays whole, and what leaves the model as a part is the caller's (see
            :func:`tpkernels.sharding.whole_outputs`).
        init_weights: what happens where ranks hold other parameters or buffers than the first rank of ``mesh``.  With
            "rank 0" they get the first rank's, with a warning, and torch's default generators of the "tp" ranks go on
            in step, so that replicas drop out the same elements.  With "same" every rank raises.
        verify: before anything is touched, run copies of the model with the plan and without, as
            :func:`tpkernels.verify` does; afterwards compare the ranks' batches at each call of the model, in training
            and otherwise, which costs one small exchange (:mod:`tpkernels.sharding.batches`).
        example_inputs: for ``plan="auto"`` and ``verify``, as for :func:`make_plan`.
        fused_norm: "auto" computes an RMS norm together with the sum over the ranks and the residual before it, where
            the plan says so (``print(plan)`` lists these norms, and why there are no more).  Norms then have one
            rounding less in bf16 and fp16 than those of models that round before they multiply with the weight.
            On a CPU calls of few rows, in which this costs more than it saves, run the norms by themselves; True
            fuses them there, too, and False nowhere.
        experts: for ``plan="auto"``, as for :func:`make_plan`.
        same_bits: the largest degree, a power of two, that gives the same bits as this one, as for
            :func:`tpkernels.init`; default: what that was given.  Ops on this group keep the promise or raise from then
            on.  The plan must be that of this degree, and norms are not fused (:mod:`tpkernels.sharding.same_bits`).

    Layers become tensor-parallel ones; one that several modules share does so once, everywhere.  All
    other parameters become replicated DTensors and stay where they are, so that optimizers and
    ``torch.nn.utils.clip_grad_norm_`` see one kind of parameter; see :mod:`tpkernels.nn.replicated` for what that means
    for code that reads them.  Their gradients must be equal on all ranks, as they are where every rank computes the
    same from the same data; modules that work on a part of the sequence need ``Replicate(sequence_parallel=True)``.

    All ranks of ``mesh`` call it: those of the axis "tp" and of axes for data parallelism ("dp...", "data...").  Make
    the optimizer after this call: parameters are new objects, and the step of one that holds the old ones raises.

    Examples:
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> mlp = tpk.parallelize(mlp, mesh["tp"], example_inputs=torch.randn(4, 8))
        >>> mlp[0].weight.to_local().shape  # half of 32
        torch.Size([16, 8])

    Raises:
        ValueError: a pattern matches no module, a style does not fit a module, two patterns give one module
            different styles, a cut that DTensor cannot express, tied weights, a plan for another model or number of
            ranks or, with ``same_bits``, not that of the largest degree, a model that is parallel already, or ranks
            whose models differ in names, shapes or dtypes, with
            ``init_weights="same"`` in values or random generators.  Nothing was changed.
        VerificationError: ``verify`` found a difference; the message names the first module.  Nothing was changed, but
            for weights that are now the first rank's.
    """
    if fused_norm not in ("auto", True, False):
        raise ValueError(f'fused_norm must be "auto", True or False, got {fused_norm!r}')
    check_experts(experts)
    tp = tp_mesh(mesh, model)
    same_bits = _blocks(tp, same_bits)
    weights = compare_models(model, mesh, init_weights, check=check_plain)
    if isinstance(plan, str):
        if plan != "auto":
            raise ValueError(f'plan must be "auto", a ShardingPlan or a mapping of names to styles, got {plan!r}')
        plan = make_plan(model, tp, example_inputs=example_inputs, experts=experts, same_bits=same_bits)
    if verify:
        weights.take_first()  # what is verified is what will run
        swap = partial(parallelize, same_bits=same_bits or None, example_inputs=example_inputs, experts=experts)
        Verifier(model, mesh, example_inputs, plan, None, None, swap).verify().check()
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(plan, ShardingPlan):
        if plan.world_size != tp.size():
            raise ValueError(f"this plan is for {plan.world_size} ranks, the mesh has {tp.size()}")
        plan.validate(model)
        if plan.fallback and tp.get_local_rank() == 0:
            advice = "pass example_inputs if it runs with other inputs than those that were tried"
            warnings.warn(f"{plan.model}: {plan.fallback}; {advice}", FallbackPlanWarning, stacklevel=2)
        if same_bits:
            check_plan(plan, model, same_bits, example_inputs, experts)
        styles, idle = plan.styles, set(plan.idle_ties)
    else:
        styles, idle = _explicit(plan, model, modules), set()
        if same_bits:
            check_styles(styles, same_bits)
    _check_heads(styles, modules, tp)
    kept = (Replicate, Channels, Heads, Experts, Sliced, PartNorm)
    swaps = {name: style for name, style in styles.items() if not isinstance(style, kept)}
    layers = {name: _check_swap(name, modules[name], style, tp) for name, style in swaps.items()}
    _check_sharing(model, modules, swaps, layers, idle)
    convolutions = convolutions_in(model, modules, styles, tp.size(), same_bits)
    for name, style in styles.items():
        if isinstance(style, Sliced):
            check_slices(modules[name], style.cuts, tp)
        if isinstance(style, Replicate) and style.distributed:
            WholeLinear.check(name, modules[name], style.sequence_parallel)
    experts_styles = {name: style for name, style in styles.items() if isinstance(style, Experts)}
    for name, experts_style in experts_styles.items():
        _check_experts(name, modules[caller_of(name, experts_style.layout)], experts_style)
    if isinstance(plan, ShardingPlan):
        hosts_in_step(plan.draws_from, resolve(tp), init_weights)
    if same_bits:
        resolve(tp).keep_same_bits(same_bits)
        fused_norm = False
    if not verify:
        weights.take_first()
    weights.report(stacklevel=4)  # past the decorators
    swapped, converted = replacements(modules, swaps, tp)
    attentions = {name: style for name, style in styles.items() if isinstance(style, Heads) and not style.inner}
    swapped += [
        (modules[name], ParallelMultiheadAttention.from_attention(_attention(modules[name]), tp))
        for name in {id(modules[name]): name for name in attentions}.values()
    ]
    shared = {id(modules[name]): (modules[name], style) for name, style in experts_styles.items()}
    made_of: dict[tuple[int, str], nn.Parameter] = {}
    mixtures = [
        (old, CutExperts.of(old, style.layout, tp, style.implementation, style.dealt, made_of))
        for old, style in shared.values()
    ]
    over_parts = {
        id(modules[name]): (modules[name], style) for name, style in styles.items() if isinstance(style, PartNorm)
    }
    norms = [(old, part_norm(old, tp, **vars(style))) for old, style in over_parts.values()]
    for old, new in swapped:
        take_place(old, new)
    for old, new in (*mixtures, *norms):
        old.__class__, old.__dict__ = type(new), new.__dict__
    for outer, inner in {modules[n.rpartition(".")[0]]: n for n, s in experts_styles.items() if s.rows}.items():
        call_inner(outer, inner.rpartition(".")[2])
    for convolution, channels in convolutions:
        if channels.paired:
            pair_channels(
                convolution, tp, inputs=channels.inputs, outputs=not channels.gather_output,
                segments=channels.segments, taken=channels.taken, gathers=channels.gather_input,
                copied=channels.copied, behind=channels.behind,
            )  # fmt: skip
        else:
            cut_channels(convolution, tp)
    call_cut_layers(model, [old for old, _ in swapped])
    # A ShardingPlan says of each module what happens to its own parameters, a mapping of all that a module holds,
    # outer modules last, because what an inner one was told holds.
    for name in sorted(styles, key=lambda name: name.count("."), reverse=True):
        style, recurse = styles[name], not isinstance(plan, ShardingPlan)
        if isinstance(style, Replicate) and (style.sequence_parallel or recurse):
            summed = style.sequence_parallel
            replicate_parameters(modules[name], tp, sequence_parallel=summed, recurse=recurse, converted=converted)
    for sliced_module, sliced in {
        id(modules[name]): (modules[name], style) for name, style in styles.items() if isinstance(style, Sliced)
    }.values():
        slice_parameters(sliced_module, sliced.cuts, tp)
    replicate_parameters(model, tp, converted=converted)
    for name in (name for name, style in styles.items() if isinstance(style, Replicate) and style.distributed):
        modules[name].__class__ = WholeLinear
    if isinstance(plan, ShardingPlan):
        for key, (_, values) in plan.attributes.items():
            name, attribute = owner_of(key, modules)
            set_number(modules[name], attribute, values[tp.get_local_rank()])
        for name, cuts in plan.cut_arguments.items():
            slice_arguments(modules[name], cuts, tp)
        for name, parts in plan.gathered_arguments.items():
            gather_arguments(modules[name], parts, tp)
        for name, arguments in plan.arguments_to_sum.items():
            sum_argument_gradients(modules[name], arguments, tp)
        call_by_weight(plan.by_weight, modules)
        take_over_parts(plan.statistics, modules, tp)
        take_maxima(plan.maxima, modules, tp)
        multiplying = multiply_parts(plan.products, styles, modules, tp)
        for name, states in plan.written_states.items():
            run_with_states(modules[name], states, tp)
        keep_in_modules(plan.kept, modules, tp)
        for feeder in {id(modules[name]): modules[name] for name, style in styles.items()
                       if isinstance(style, Column | Row | Replicate) and style.summed_gradient}.values():  # fmt: skip
            sum_output_gradient(feeder, tp)
        share_inputs(plan.shared, model, modules)
        if fused_norm:
            fuse_norms(plan.fused, modules, tp, always=fused_norm != "auto")
        forks = run_sequence_parallel(plan, modules, tp, same_bits)
        if same_bits:
            drop_by_blocks(model, modules, plan.random, tp, same_bits)
        else:
            begun: list[Fork] = []
            for opener, closer in plan.random:
                if opener in modules:
                    forks.append(differ_between(opener, closer, modules, tp, begun))
                else:
                    forks.append(differ_between_products(multiplying[opener.rpartition(".")[0]], tp, begun))
            for name in plan.whole_draws:
                share_in(modules[name], forks)
        leave_on_errors(model, forks)
        if plan.products or any(map(makes_parts, styles.values())):
            whole_outputs(model, tp, plan.cut_results)
    elif same_bits:
        refuse_draws(
            [modules[name] for name, style in styles.items() if isinstance(style, Column) and not style.gather_output],
            [modules[name] for name, style in styles.items() if isinstance(style, Row) and not style.split_input],
        )
    if verify:
        compare_batches(model, tp, plan.draws_from if isinstance(plan, ShardingPlan) else ())
    return speak_originals(model)


def _blocks(tp: DeviceMesh, same_bits: int | None) -> int:
    if same_bits is not None:
        check_job(same_bits, 1, tp.size(), tp.device_type)
    return resolve(tp).same_bits if same_bits is None else same_bits


def _check_heads(styles: Mapping[str, Style], modules: Mapping[str, nn.Module], tp: DeviceMesh) -> None:
    for name, style in styles.items():
        if isinstance(style, Heads) and not style.inner:
            why = why_not_parallel(_attention(modules[name], name), tp.size()) or unswappable(modules[name])
            if why is not None:
                raise ValueError(f"module {name!r} {why}")


def _check_experts(name: str, module: nn.Module, style: Experts) -> None:
    """Compare again: a plan may come from a file, and the class may have changed since."""
    try:
        check_layout(module, style.layout)
    except Refused as error:
        raise ValueError(f"module {name!r} cannot be cut as experts: {error}") from None
    dispatch.check_name("grouped_matmul_all_reduce", style.implementation)


def _attention(module: nn.Module, name: str = "") -> nn.MultiheadAttention:
    if not isinstance(module, nn.MultiheadAttention) or not is_attention(module):
        raise ValueError(f"module {name!r} is a {type(module).__name__}; heads styles are for nn.MultiheadAttention")
    return module


def _explicit(plan: Mapping[str, object], model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    matched = match({pattern: as_style(pattern, style) for pattern, style in plan.items()}, model)
    styles = {name: as_style(name, style, embedding=_is_table(modules[name])) for name, style in matched.items()}
    for name, style in styles.items():
        parts = isinstance(style, Row) or (isinstance(style, Column) and not style.gather_output)
        around = own_code(modules[name]) if isinstance(style, Channels) and style.paired else None
        if around is not None or (parts and own_base(modules[name]) is not None):
            raise ValueError(
                f"module {name!r} is a {type(modules[name]).__name__}, whose own code around torch's forward would "
                "meet one rank's part, which only a plan of make_plan has proven to be right"
            )
    return styles


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or getattr(layer_of(module), "kind", "") == "embedding"


def _check_swap(name: str, module: nn.Module, style: Style, tp: DeviceMesh) -> Layer:
    """Check everything that building the replacement could refuse."""
    kind = type(style).__name__.lower()
    layer = layer_of(module)
    wanted = "nn.Embedding" if isinstance(style, Vocabulary | Features) else "nn.Linear"
    if layer is None or (layer.kind == "embedding") != (wanted == "nn.Embedding"):
        if isinstance(module, nn.Linear | nn.Embedding) and isinstance(module, nn.Linear) == (wanted == "nn.Linear"):
            raise ValueError(
                f"module {name!r} is a {type(module).__name__}, a subclass or variant of {wanted} whose own behaviour "
                "would be lost"
            )
        raise ValueError(f"module {name!r} is a {type(module).__name__}; {kind} styles are for {wanted}")
    why = unswappable(module)
    if why is not None:
        raise ValueError(f"module {name!r} {why}")
    op = "all_reduce"
    if isinstance(style, Column):
        check_column(name, layer, style, tp.size())
        op = "all_gather_matmul" if style.sequence_parallel else "matmul_all_reduce"
        op = "all_gather" if style.gather_input else op
    elif isinstance(style, Row):
        check_row(name, layer, style)
        op = "matmul_reduce_scatter" if style.sequence_parallel or style.scatter_unit else "matmul_all_reduce"
    elif isinstance(style, CopiedHeads):
        check_copies(f"{name}: ", layer.out_features, style.heads, style.copies, tp.size())
        op = "all_gather_matmul" if style.sequence_parallel else "matmul_all_reduce"
    if not isinstance(style, Features | Channels | Replicate | Sliced | PartNorm):
        dispatch.check_name(op, style.implementation)
    return layer


def _check_sharing(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    swaps: Mapping[str, Style],
    layers: Mapping[str, Layer],
    idle: set[str],
) -> None:
    """Check that a shared module is swapped under all its names or none, and that tied parameters are cut alike."""
    styles: dict[int, tuple[str, Style]] = {}
    for name, style in swaps.items():
        other, before = styles.setdefault(id(modules[name]), (name, style))
        if before != style:
            raise ValueError(f"{other!r} and {name!r} are one module, but the plan gives {before} and {style}")
    for name, module in modules.items():
        if id(module) in styles and name not in swaps:
            raise ValueError(f"{styles[id(module)][0]!r} and {name!r} are one module: the plan must name both")
    owners: dict[int, dict[int, str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), {}).setdefault(id(module), name)
    for name in swaps:
        for attribute, parameter in modules[name].named_parameters(recurse=False):
            others = [other for other in owners[id(parameter)].values() if modules[other] is not modules[name]]
            mine = _tie_kind(swaps[name], layers[name])
            kinds = [_tie_kind(swaps[other], layers[other]) if other in swaps else None for other in others]
            if all(other in idle or kind == mine is not None for other, kind in zip(others, kinds, strict=True)):
                continue
            raise ValueError(
                f"{name}.{attribute} is tied to that of {', '.join(others)}: a swap would untie it; cut all of them "
                f'alike (a table by "vocabulary", a head by "column_gather"), leave {name!r} out of the plan, or give '
                "it a weight of its own first"
            )


def _tie_kind(style: Style, layer: Layer) -> int | None:
    """The kind of a layer for ties: layers of one kind can share one weight."""
    return tie_kind(style) if layer.kind != "conv1d" else None


def is_parallel(model: nn.Module) -> bool:
    """Whether ``model`` has been through :func:`parallelize`."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
