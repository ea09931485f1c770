"""Seeded faults of cuts of packed heads, arguments, adapters and convolutions, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["PLANNER"]

PACKED, ADAPTERS = "tests/planning/test_packed_heads.py", "tests/planning/test_adapters.py"
UNITS, WHOLE = "tests/nn/test_linear.py -k units", "tests/state/test_checkpoint.py -k 'units or whole_state'"
PARTS = "tests/sharding/test_parts.py"
CONVOLUTION = "tests/nn/test_convolution.py"
OTHERS = "tests/planning/test_other_experts.py"
EXPERTS, BEHIND = "tests/planning/test_experts.py", "tests/models/test_experts.py -k of_another_kind"
SPACES, HEADS = "tests/planning/test_state_spaces.py", "tests/planning/test_per_head.py"
TRAINED = f"{HEADS} -k over_all_ranks"
WIDTHS = "tests/planning/test_widths.py"
MERGED = "tests/integrations/transformers/test_peft.py -k alone"

ALONE, VALUES = "tests/planning/test_why_alone.py", "tests/planning/test_known_values.py"
MODES = "tests/planning/test_modes.py"
FOLLOWED, STATE = "tests/planning/test_followed.py", "tests/planning/test_module_state.py"
PICKING = "planning/replays/picking_rules.py"
STATISTICS = "tests/planning/test_part_statistics.py"
JOINED = "tests/planning/test_joined_groups.py"
GATHERED = "tests/planning/test_gathered_arguments.py"
KEPT = "tests/planning/test_kept_parts.py"
APART = "tests/planning/test_heads_apart.py -m cpu"
CROSSED = "tests/planning/test_crossed_heads.py -m cpu"
CACHED = "tests/planning/test_heads_apart.py -m gloo -k cache"
TIED = "tests/planning/test_tied_groups.py -m cpu"
SCATTERED = "tests/planning/test_scattered_sums.py"

PLANNER = (
    Edit(
        "planning/proofs/head_counts.py", "enough or any(", "any(", "tests/planning/test_uneven_heads.py -k one_stage"
    ),
    Edit("planning/runs/shadow.py", "put(self.modules, noting.before)", "pass", f"{STATE} -k 'table or buffer'"),
    Edit(
        "planning/runs/module_state.py",
        "(_HOOKING, self._noting_hooks)",
        "((), self._noting_hooks)",
        f"{STATE} -k hooks",
    ),
    Edit(
        "planning/runs/module_state.py",
        "self._told(module, _HOOKS, lambda: remove(handle))",
        "remove(handle)",
        f"{STATE} -k hooks",
    ),
    Edit("planning/replays/op_call.py", "if CROSSED in cuts and not is_pointwise(func)", "if False", CROSSED),
    Edit("planning/replays/op_call.py", "{aten.view, aten._to_copy, aten._softmax}", "{aten.view}", CROSSED),
    Edit("planning/replays/op_call.py", "if cut is not None] == [1, 2]", "if cut is not None]", CROSSED),
    Edit("planning/replays/replay.py", "if answer not in NO_PARTS and tuple", "if tuple", CROSSED),
    Edit("planning/runs/graph.py", "self.nodes[node].severed = True", "del node", f"{ALONE} -k another_one_has"),
    Edit(
        "planning/runs/graph.py",
        "self.nodes[node].severed = False",
        "pass",
        f"{ALONE} -k another_one_has",
    ),
    Edit(
        "planning/runs/weight_reads.py",
        "self.session.refused = tensors_in(args)",
        "pass",
        f"{HEADS} -k kernel",
    ),
    Edit("planning/replays/replay.py", "self.recording.state_after(scope.changes)", "{}", f"{STATE} -k told"),
    Edit(
        "planning/replays/sequence_flow.py",
        "self._splits.pop(self._begins_with, None)",
        "self._splits.clear()",
        "tests/planning/test_collected_states.py",
    ),
    Edit("planning/replays/kept_parts.py", "vars(module) | changed", "vars(module)", f"{STATE} -k kept"),
    Edit("planning/runs/example_inputs.py", "[record(shadow, call, first)]", "[]", f"{STATE} -k second"),
    Edit("planning/runs/trace.py", "(id(self), -1 - source[1], source[2]) if", "tensor if", f"{STATE} -k recorded"),
    Edit("planning/runs/trace.py", "if number < event][-1]", "][-1]", f"{FOLLOWED} -k counter"),
    Edit("planning/replays/gradients.py", "constant and works(cuts, result)", "constant", FOLLOWED),
    Edit(
        "planning/alone/whole_in_out.py",
        "if parts or known.layout.rows",
        "if known.layout.rows",
        f"{EXPERTS} -k no_example",
    ),
    Edit(
        "planning/alone/whole_in_out.py",
        " or type(module) not in kinds:",
        " or None in kinds:",
        f"{EXPERTS} -k no_example",
    ),
    Edit(
        "planning/alone/whole_in_out.py",
        "None if reader is None else",
        "None if reader else",
        f"{EXPERTS} -k no_example",
    ),
    Edit(
        "planning/replays/replay.py",
        "if split != taken.split(last):",
        "if split is None:",
        f"{SCATTERED} -k not_scattered",
    ),
    Edit("planning/proofs/hypotheses.py", "if name in group.scattered:", "if False:", f"{SCATTERED} -k not_scattered"),
    Edit("planning/proofs/random_draws.py", "if name not in group.scattered", "if True", f"{SCATTERED} -k dropout"),
    Edit(
        "nn/row.py",
        "shard_sizes=self.scattered_sizes,",
        "shard_sizes=None,",
        f"{SCATTERED} -k 'multiples and 3'",
    ),
    Edit("planning/proofs/tied_groups.py", "if others or roles[name] is None:", "if roles[name] is None:", TIED),
    Edit("planning/proofs/tied_groups.py", "if len(proof.segments[name]) == 1 else None", "", TIED),
    Edit("planning/proofs/tied_groups.py", "groups if is_tied(name) else", "groups if False else", TIED),
    Edit("planning/alone/ties.py", "1 if style.unit == 1 and not style.segments else None", "None", TIED),
    Edit("planning/proofs/decision.py", "group in small or ", "False or ", f"{FOLLOWED} -k meets"),
    Edit(
        "planning/proofs/decision.py",
        "len(group.columns) == 1 and group.size <= SMALL_GROUP",
        "group.size == 2",
        f"{HEADS} -k indexer",
    ),
    Edit(
        "planning/proofs/asked_roles.py",
        "pieces not in (0, proof.pieces)",
        "pieces is None",
        "tests/planning/test_overrides.py",
    ),
    Edit(
        "planning/replays/replay.py",
        "told.parameters, told.states = self._whole_parameters(tensors), self.states_behind(tensors)",
        "pass",
        f"{FOLLOWED} -k meets",
    ),
    Edit(
        "planning/runs/guessed_inputs.py",
        '"input_size", "num_mel_bins", "feature_size"',
        '"num_mel_bins", "input_size", "feature_size"',
        "tests/planning/test_example_inputs.py -k unusual",
    ),
    Edit(
        "planning/runs/unusual_inputs.py",
        "layers[place].num_key_value_heads, sizes.other_length",
        "layers[0].num_key_value_heads, sizes.other_length",
        "tests/planning/test_example_inputs.py -k unusual",
    ),
    Edit("planning/runs/example_inputs.py", "if not given or (needed", "if False and (needed", f"{FOLLOWED} -k within"),
    Edit("planning/alone/kept_layers.py", "(name in unseen or not followed)", "False", f"{FOLLOWED} -k within"),
    Edit("planning/runs/session.py", "in filter(can_require_grad, outputs):", "in outputs:", f"{FOLLOWED} -k compared"),
    Edit("planning/runs/layer_groups.py", "if node.severed and not severed:", "if False:", f"{FOLLOWED} -k compared"),
    Edit(
        "planning/runs/layer_groups.py",
        "convolutions, without, severed=True)",
        "convolutions, without, severed=False)",
        f"{FOLLOWED} -k of_a_comparison",
    ),
    Edit("planning/runs/layer_groups.py", "and blocks > (not few)", "and few", f"{ALONE} -k every_block"),
    Edit("planning/runs/layer_groups.py", ".out_features >= shortest", ".out_features > 0", f"{APART} -k heads_are"),
    Edit("planning/proofs/decision.py", "name in group.tables and self.excluded", "False and self.excluded", APART),
    Edit("planning/proofs/hypotheses.py", "self._heads_taken_apart(size, scope)", "[]", f"{APART} -k heads_are"),
    Edit("planning/replays/rules.py", "len(q.segments + k.segments) > 2", "False and k", f"{APART} -k looks_so"),
    Edit(
        "sharding/local_rules.py",
        "count if split.dim == len(before) - 1 else 1",
        "1",
        "tests/planning/test_heads_apart.py -m gloo",
    ),
    Edit("sharding/local_rules.py", "count if split.dim == len(before) - 1 else 1", "count", PARTS),
    Edit(
        "nn/sliced_arguments.py",
        "if type(value) in (tuple, list):",
        "if value == ():",
        "tests/nn/test_sliced_arguments.py",
    ),
    Edit(
        "planning/modules/element_code.py",
        "return all(_alike(some(one, dim), found)",
        "return any(_alike(some(one, dim), found)",
        f"{FOLLOWED} -k pair_is_proven",
    ),
    Edit(
        "planning/replays/gradients.py",
        "result is not None and constant and",
        "result is not None and",
        f"{FOLLOWED} -k pair_is_proven",
    ),
    Edit("sharding/outputs.py", "return Split(cut.dim, cut.segments[rank])", "return None", CACHED),
    Edit("sharding/outputs.py", "if way[0] == 1] or common", "if way[0] == 9] or common", CACHED),
    Edit("planning/runs/layer_groups.py", "rows, tables=given)", "rows, given)", f"{HEADS} -k 'belongs or all_ranks'"),
    Edit(PICKING, "call.rank_of() == split.dim:", "call.rank_of() < 0:", f"{HEADS} -k looks_so"),
    Edit(PICKING, "numbers != split and", "False and", f"{HEADS} -k looks_so"),
    Edit(
        "planning/replays/replay.py",
        "return len(self._open_groups) == 1 and",
        "return True or",
        f"{HEADS} -k drawn_alike",
    ),
    Edit(
        "planning/proofs/replay_checks.py",
        "if degrees() or not says_all else",
        "if False else",
        f"{HEADS} -k drawn_alike",
    ),
    Edit("sharding/randomness.py", "not (running and fork.shared is not None)", "True", f"{HEADS} -k dropped"),
    Edit(
        "sharding/randomness.py",
        "within[0].shared = self.shared",
        "pass",
        "tests/models/test_training.py -k interleave",
    ),
    Edit("sharding/randomness.py", "outermost.pause()", "outermost = None", f"{HEADS} -k dropped"),
    Edit(
        "planning/replays/replay.py", "both |= self.whole_draws.get", "self.whole_draws.get", f"{HEADS} -k drawn_alike"
    ),
    Edit("planning/replays/replay.py", 'role.kind == "table"', "False", f"{HEADS} -k belongs"),
    Edit(
        "planning/runs/layer_groups.py",
        "_blocks_without(one, shared) > 1",
        "_blocks_without(one, shared) > 2",
        f"{ALONE} -k every_block",
    ),
    Edit("planning/runs/known_values.py", "id(tensor) in self._given or not", "not", f"{VALUES} -k both_ways"),
    Edit(
        "planning/runs/known_values.py",
        "module._non_persistent_buffers_set:",
        "module._buffers:",
        f"{VALUES} -k checkpoint",
    ),
    Edit(
        "planning/runs/known_values.py", "if storage_of(tensor) in self._asked", "if False", f"{VALUES} -k checkpoint"
    ),
    Edit("planning/runs/known_values.py", "func is aten.masked_select.default", "False", f"{MODES} -k traced"),
    Edit("planning/runs/example_inputs.py", "shadow.ask_as(*asking)", "pass", f"{MODES} -k traced"),
    Edit("planning/runs/gradient_code.py", "session.set_origin(tensor, None)", "pass", f"{FOLLOWED} -k compared"),
    Edit("planning/replays/whole_steps.py", "self._taken(tensors)", "self._completed(tensors)", f"{FOLLOWED} -k pick"),
    Edit("planning/replays/whole_steps.py", "in sources]", "in ()]", f"{HEADS} -k kernel"),
    Edit("planning/proofs/search_widths.py", "any(_AGAIN in name for name in read)", "False", f"{WIDTHS} -k more"),
    Edit("planning/replays/width_steps.py", "id(tensor) in self._shown", "not True", f"{WIDTHS} -k more"),
    Edit("planning/replays/width_steps.py", "layer not in known.layers", "False", f"{WIDTHS} -k more"),
    Edit("nn/shown_width.py", "self._shown = self._whole = None", "pass", f"{WIDTHS} -k whole_tensor"),
    Edit(PICKING, "table.at(len(call.outputs[0]) - 1)", "table.at(0)", f"{HEADS} -k of_all_blocks"),
    Edit(
        "planning/proofs/search_again.py", "error.parameters - proof.slices.keys()", "()", f"{HEADS} -k of_all_blocks"
    ),
    Edit("planning/modules/source_reads.py", 'node.func.id == "isinstance"', "False", f"{FOLLOWED} -k whoever"),
    Edit("planning/modules/source_reads.py", "return [node.left]", "return []", f"{FOLLOWED} -k whoever"),
    Edit(
        "planning/replays/gradients.py",
        '{f"{name}.weight", f"{name}.bias"}',
        '{f"{name}.weight"}',
        f"{HEADS} -k looks_so",
    ),
    Edit("planning/replays/kept_parts.py", "self._found[key] = held", "pass", f"{KEPT} -k for_its_next"),
    Edit("planning/replays/kept_parts.py", "attribute in attributes_read(kind)", "True", f"{KEPT} -k gathered"),
    Edit(
        "planning/proofs/search_states.py",
        "self.elsewhere if recording is self.recording else ()",
        "()",
        f"{KEPT} -k as_in_one",
    ),
    Edit("planning/modules/element_code.py", "[one.abs() for one in given]", "given", f"{KEPT} -k above_zero"),
    Edit("sharding/outputs.py", "type(error) is RuntimeError", "type(error) is ValueError", f"{KEPT} -k what_to_do"),
    Edit("sharding/followed_calls.py", "misfits(module).items()", "dict[str, str]().items()", f"{KEPT} -k of_the_one"),
    Edit("sharding/kept_caches.py", "getattr(type(self)._unguarded, name)", "[][0]", f"{KEPT} -k of_the_one"),
    Edit("sharding/part_tracking.py", 'name == "all_gather" and not args[4]', "False", TRAINED),
    Edit(
        "nn/part_statistics.py",
        "copy_to_group(all_reduce(own, mesh), mesh)",
        "all_reduce(own, mesh)",
        f"{STATISTICS} -k values",
    ),
    Edit("nn/gathered_arguments.py", "replicated_grad=True", "replicated_grad=False", f"{GATHERED} -k values_and"),
    Edit(
        "planning/replays/gather_steps.py",
        "split is None or split != role.split(x.dim() - 1)",
        "False",
        f"{GATHERED} -k could_not",
    ),
    Edit("nn/part_statistics.py", "variances + (means - joined).square()", "variances", f"{STATISTICS} -k values"),
    Edit(
        "nn/part_statistics.py",
        "means.new_tensor(sizes)",
        "means.new_full((len(sizes),), features / len(sizes))",
        f"{STATISTICS} -k values",
    ),
    Edit("nn/part_statistics.py", "(features - statistic.correction)", "features", f"{STATISTICS} -k values"),
    Edit(
        "nn/part_statistics.py", "torch.where(spread, variance, 1).sqrt()", "variance.sqrt()", f"{STATISTICS} -k values"
    ),
    Edit("nn/part_statistics.py", "len(dims) == 1", "True", f"{STATISTICS} -k only_statistics"),
    Edit("sharding/followed_calls.py", "self.thread and self.parts.of(x) is None", "0", f"{STATISTICS} -k values"),
    Edit("planning/proofs/decision.py", "or others[0] in seen", "or True", f"{JOINED} -k both_projections"),
    Edit(
        "planning/proofs/decision.py",
        "{*others[0].layers} or degrees()",
        "{*others[0].layers}",
        f"{JOINED} -k after_another",
    ),
    Edit("planning/replays/statistic_steps.py", "self.is_near(groups, module)", "True", f"{STATISTICS} -k elsewhere"),
    Edit(
        "planning/replays/statistic_steps.py", " or asked.is_relative_to(around)", "", f"{STATISTICS} -k of_all_ranks"
    ),
    Edit("nn/part_statistics.py", 'if statistic.kind == "mean" else y', "if True else y", f"{STATISTICS} -k values"),
    Edit(
        "nn/part_statistics.py",
        "torch.ops.aten.sum(x, [-1], True)",
        "x.sum(-1, keepdim=True)",
        f"{STATISTICS} -k values",
    ),
    Edit("planning/replays/statistic_steps.py", "one_piece and not degrees()", "one_piece", f"{STATISTICS} -k blocks"),
    Edit("planning/replays/statistic_steps.py", "self._summed.add(id(out))", "pass", f"{STATISTICS} -k of_all_ranks"),
    Edit("planning/replays/statistic_steps.py", ".intersection(sizes)", ".intersection(())", f"{STATISTICS} -k half"),
    Edit("planning/runs/row_counts.py", "else 2 * world_size", "else 2", f"{STATISTICS} -k of_all_ranks"),
    Edit(
        "planning/runs/weight_reads.py",
        'f_globals["__name__"].split(".")[0] != "torch"',
        'f_globals["__name__"] == ""',
        "tests/planning/test_by_weight.py -k converted",
    ),
    Edit(
        "planning/alone/convolutions.py",
        "base is not None and not calls_super(kind, base)",
        "False",
        f"{CONVOLUTION} -k says",
    ),
    Edit("nn/normed_weight.py", "all_reduce(squares, mesh)", "squares", f"{CONVOLUTION} -k gradients"),
    Edit("nn/normed_weight.py", "copy_to_group(g, mesh)", "g", f"{CONVOLUTION} -k gradients"),
    Edit("planning/modules/experts_trial.py", "if layout.behind:", "if False:", f"{EXPERTS} -k norm_behind"),
    Edit("planning/entries/experts_entries.py", "slots if style.behind else tokens)", "tokens)", f"{EXPERTS} -k alike"),
    Edit(
        "planning/entries/experts_entries.py",
        "(gives + 2 * needs_dx * takes)",
        "(gives + takes)",
        f"{OTHERS} -k gathered",
    ),
    Edit(
        "nn/cut_experts.py",
        "all_gather(y, mesh, dim=1, shard_sizes=parts, replicated_grad=True)",
        "all_gather(y, mesh, dim=1, shard_sizes=parts)",
        BEHIND,
    ),
    Edit("nn/cut_experts.py", "weights.reshape(-1, num_experts)", "weights.reshape(num_experts, -1).t()", OTHERS),
    Edit("nn/cut_experts.py", "y + (x * identity_weights(taken, len(down))).to(y.dtype)", "y", BEHIND),
    Edit(
        "planning/alone/whole_in_out.py",
        "known.layout.rows and known.num_experts % ranks",
        "False",
        f"{OTHERS} -k rows",
    ),
    Edit("nn/cut_experts.py", "_each_by_itself(routing) if layout.behind else routing", "routing", BEHIND),
    Edit("nn/convolution.py", "input = copy_to_group(input, mesh)", "pass", f"{CONVOLUTION} -k gradients"),
    Edit("nn/convolution.py", "groups = input.shape[channels] *", "groups = 1 or", f"{CONVOLUTION} -k gradients"),
    Edit("nn/convolution.py", "1 if convolution.transposed and convolution.groups == 1 else 0", "0", CONVOLUTION),
    Edit("nn/convolution.py", "cls(*args, **kwargs) if args or kwargs else ", "", f"{CONVOLUTION} -k makes_whole"),
    Edit("planning/alone/convolutions.py", "if name in read:", "if False:", f"{CONVOLUTION} -k says"),
    Edit("planning/replays/gradients.py", "self._summed.add(id(tensor))", "pass", f"{PACKED} -k queries"),
    Edit(
        "planning/replays/replay.py",
        "both = self._drawn[True] & self._drawn[False]",
        "both = set[int]()",
        f"{HEADS} -k drawn_alike",
    ),
    Edit(PICKING, "or local != list(range(low, high))", "", f"{PACKED} -k looks_so"),
    Edit("planning/splits.py", "if outer > 1 and split.copied:", "if False:", f"{PACKED} -k viewed"),
    Edit(
        "planning/proofs/decision.py",
        "return first.out_features < min(first.in_features, last.out_features)",
        "return False",
        ADAPTERS,
    ),
    Edit(
        "partition.py",
        "return array_split_sizes(units, n) if 0 in sizes and units >= n else sizes",
        "return sizes",
        "tests/test_partition.py",
    ),
    Edit(
        "nn/parameters.py",
        "copy_(full.narrow(dim, offsets(sizes)[rank], sizes[rank]))",
        "copy_(full.narrow(dim, rank, sizes[rank]))",
        UNITS,
    ),
    Edit("nn/parallel_linear.py", "if units == local.shape[dim]:", "if True:", UNITS),
    Edit("state/originals.py", "return self._units_before(start),", "return start,", WHOLE),
    Edit("state/originals.py", "made.narrow(dim, run.start,", "made.narrow(dim, shape[dim] - count,", WHOLE),
    Edit(
        "state/plain_optimizer.py",
        "return found if len(original.parts) == 1 else",
        "return found if True else",
        "tests/state/test_optimizer_names.py -k any_number",
    ),
    Edit("nn/packed.py", "mesh, heads=copied_heads", "mesh, heads=1", f"{PACKED} -k train"),
    Edit(
        "planning/proofs/search.py", "not self._provable(group, scope, segments, heads)", "False", f"{PACKED} -k keys"
    ),
    Edit("sharding/local_rules.py", "if dim >= 0 and source[dim] != 1:", "if False:", PARTS),
    Edit("sharding/local_rules.py", "if len(places) < len(ones) else set()", "if not places else set()", PARTS),
    Edit("sharding/apply.py", "modules[name].__class__ = WholeLinear", "modules[name].train()", MERGED),
    Edit(
        "nn/packed_parameter.py",
        "packed._each(Tensor.copy_, args, {})",
        "packed.what",
        "tests/nn/test_packed_parameter.py",
    ),
    Edit("nn/packed_parameter.py", "leaf.parts[index]", "leaf.parts[0]", MERGED),
    Edit(
        "nn/sliced_arguments.py",
        "runs = value.unflatten(",
        "runs = value.flip(dim).unflatten(",
        "tests/nn/test_sliced_arguments.py",
    ),
    Edit("nn/packed.py", "if not places[index]:", "if True:", f"{PACKED} -k train"),
    Edit("sharding/followed_calls.py", "(copied or _leaves", "(_leaves", f"{PACKED} -k train"),
    Edit("planning/splits.py", "copied[::-1].index(True) if any(copied) else 0", "0", f"{SPACES} -k behind"),
    Edit("nn/sliced.py", "(0, size) if whole else", "(rank * part, part) if whole else", f"{SPACES} -k behind"),
    Edit(
        "planning/replays/replay.py",
        'role.kind == "feeder" or role.summed',
        'role.kind == "feeder"',
        f"{SPACES} -k selective",
    ),
    Edit(
        "planning/proofs/decision.py", "isinstance(blamed.error, HandedOn) and guilty", "False", f"{HEADS} -k hands_on"
    ),
)
