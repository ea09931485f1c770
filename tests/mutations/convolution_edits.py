"""Seeded faults of convolutions that are cut in pairs, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["CONVOLUTIONS"]

GROUPED = "tests/planning/test_grouped_pairs.py"
PAIRS = "tests/planning/test_convolution_pairs.py"
CUT, VALUES = f"{PAIRS} -k gives_its_channels", f"{PAIRS} -k values"
WHOLE = f"{PAIRS} -k only_looks"
STREAMS = "tests/planning/test_channel_streams.py"
SCATTERS, GATHERS = f"{STREAMS} -k scatters", f"{STREAMS} -k more_than_it_takes"
ENDS, COMPILED = f"{STREAMS} -k stream_may_end", f"{STREAMS} -k compiled_code"
MERGED = "tests/integrations/transformers/test_peft.py -k on_convolutions_merge"

DROPS, SAYS = f"{PAIRS} -k dropout_between", f"{PAIRS} -k says_why"

KEYS = "tests/planning/test_convolved_keys.py"
MEETING, COUNTED = f"{KEYS} -k channels_meet", f"{KEYS} -k 'channels_meet and counted'"
KEYS_VALUES = f"{KEYS} -k 'unsharded_model and 2'"

NORMED = "tests/planning/test_normed_pairs.py"
NORMED_CUT = f"{NORMED} -k 'makes_is_cut or of_a_rank'"

NARROW = "tests/planning/test_narrow_segments.py"
NARROW_CUT, NARROW_VALUES = f"{NARROW} -k weighs_all_others", f"{NARROW} -k 'values and 2'"

FOCAL = "tests/planning/test_modulation.py"
FOCAL_CUT = f"{FOCAL} -k reads_its_width"

BESIDE = "tests/planning/test_streams_beside.py"
STREAM_CUT, STREAM_WHOLE = f"{BESIDE} -k begin_and_end", f"{BESIDE} -k stays_whole"
STREAM_CACHE, COLUMN_ALONE = f"{BESIDE} -k a_cache", f"{BESIDE} -k 'gathers_the and 2'"
NORMS = "tests/planning/test_packed_norms.py"
NORMS_VALUES = f"{NORMS} -k 'whole_model and 2'"

CONVOLUTIONS = (
    Edit("nn/packed_norm.py", "part.copy_(values)", "del values", NORMS_VALUES),
    Edit("nn/packed_norm.py", "factor = 1.0 / float(", "factor = 0.1 or float(", f"{NORMS} -k 'all_batches and 2'"),
    Edit(
        "planning/proofs/pair_choices.py",
        "segments=sizes if len(sizes) > 1 else ()",
        "segments=()",
        f"{NORMS} -k taken_apart_in",
    ),
    Edit("nn/packed_norm.py", " and kind.forward is _FORWARD", "", f"{NORMS} -k no_rank_could"),
    Edit(
        "planning/proofs/pair_choices.py",
        "style = replace(style, copied=proof.copied",
        "_ = replace(style, copied=proof.copied",
        FOCAL_CUT,
    ),
    Edit(
        "planning/proofs/pair_proofs.py",
        "few * world_size > sum(sizes) - few",
        "few > sum(sizes)",
        f"{FOCAL} -k narrow_beside",
    ),
    Edit(
        "planning/proofs/pair_proofs.py",
        "replace(proof, attributes=shown, copied=copied, behind=behind)",
        "replace(proof, attributes=shown)",
        FOCAL_CUT,
    ),
    Edit(
        "nn/packed.py",
        "copied_places(len(self.layers), self.copied, self.behind).index(False)",
        "0",
        f"{FOCAL} -k 'values and 2'",
    ),
    Edit("planning/proofs/decided_pairs.py", "if index in replay.part_draws_in}", "if index is None}", STREAM_WHOLE),
    Edit("planning/proofs/decided_pairs.py", "<= {*known}:", "<= {*replay.statistics}:", STREAM_WHOLE),
    Edit("planning/proofs/decided_pairs.py", "{**widths, **proof.attributes}", "proof.attributes", STREAM_CUT),
    Edit("planning/proofs/decided_pairs.py", "with suppress(Blamed):", "if True:", STREAM_CUT),
    Edit("planning/proofs/pairs_beside.py", "replace(style, gather_input=True)", "style", STREAM_CUT),
    Edit("planning/proofs/pairs_beside.py", "group.columns[0] not in sharing", "True", STREAM_WHOLE),
    Edit("planning/replays/replay.py", "if role is not None and role.group != taken.group:", "if False:", STREAM_CUT),
    Edit("sharding/followed_calls.py", "self._check_row(module, -1, *args, **kwargs)", "del kwargs", STREAM_CACHE),
    Edit("nn/column.py", "shard_sizes=sizes, impl", "shard_sizes=sizes, replicated_grad=True, impl", COLUMN_ALONE),
    Edit(
        "verification/part_places.py",
        "isinstance(style, Column) and style.gather_input:",
        "False:",
        f"{BESIDE} -k verification",
    ),
    Edit("nn/channel_parts.py", "copy_to_group(one, mesh) if copied", "one if copied", NARROW_VALUES),
    Edit(
        "nn/channel_parts.py",
        "replicate_parameter(parameter, mesh, requires_grad=wanted) if places",
        "replicate_parameter(parameter * 2, mesh, requires_grad=wanted) if places",
        NARROW_VALUES,
    ),
    Edit("planning/proofs/pair_proofs.py", "if key[0] not in beside}", "if key}", NARROW_CUT),
    Edit("planning/entries/convolution_entries.py", "total += 2 * _bytes", "total += 0 * _bytes", f"{NARROW} -k bytes"),
    Edit("planning/replays/rules.py", "tuple(size * places for size", "tuple(size for size", MEETING),
    Edit("planning/replays/rules.py", "if split.dim < channels:", "if True:", MEETING),
    Edit("planning/runs/layer_groups.py", "rows, scattered=linear)", "rows, scattered=frozenset())", MEETING),
    Edit(
        "planning/proofs/pair_proofs.py", "beside = len(group.layers) <= SMALL_GROUP and", "beside = False and", COUNTED
    ),
    Edit("planning/proofs/channel_bytes.py", "Row(scatter_unit=int(gives))", "Row()", MEETING),
    Edit("planning/proofs/pair_choices.py", "style = replace(style, segments=sizes)", "pass", MEETING),
    Edit(
        "sharding/followed_calls.py",
        "module.sizes_taken if isinstance(module, PackedRowParallelLinear) else ()",
        "()",
        KEYS_VALUES,
    ),
    Edit(
        "nn/packed_row.py", '{"weight": (self._stored(1), names)}', '{"weight": (self._stored(0), names)}', KEYS_VALUES
    ),
    Edit(
        "planning/runs/layer_groups.py",
        "drawn = any(returned[number][2] for number in given) and not results",
        "drawn = False",
        ENDS,
    ),
    Edit("planning/proofs/convolution_pairs.py", " + self.sent_for_results(group)", " + 0", CUT),
    Edit("sharding/outputs.py", "return _gathered(output, self._cut, self._mesh)", "return output", COMPILED),
    Edit("planning/proofs/channel_bytes.py", "gathers=True) < self", "gathers=True) > self", GATHERS),
    Edit("planning/runs/row_counts.py", "before.taken + takes", "before.taken", SCATTERS),
    Edit("planning/styles.py", "(() if self.gather_input else self.taken)", "self.taken", CUT),
    Edit("nn/paired_convolution.py", "if len(totals) > 1:", "if False:", VALUES),
    Edit("planning/runs/trace.py", " - shadow.around | {shadow.convolving}", " | {shadow.convolving}", WHOLE),
    Edit(
        "planning/replays/replay.py",
        "self.part_draws_in |= self._open_groups | pairs",
        "self.part_draws_in |= set()",
        DROPS,
    ),
    Edit(
        "planning/replays/replay.py",
        "|= self._open_groups | pairs\n        both",
        "|= self._open_groups\n        both",
        WHOLE,
    ),
    Edit(
        "planning/replays/channel_steps.py",
        "self._open_pairs.discard(taken.group)",
        "self._open_pairs.discard(-1)",
        DROPS,
    ),
    Edit("planning/replays/channel_steps.py", "self._open_pairs.add(role.group)", "self._open_pairs.add(-1)", DROPS),
    Edit(
        "sharding/followed_calls.py", "convolved.set(self._convolved)", "convolved.set(None)", f"{PAIRS} -k another_way"
    ),
    Edit("planning/replays/rules.py", '"_prelu_kernel": _copy, "mm": _mm', '"mm": _mm', CUT),
    Edit("planning/proofs/why_alone.py", "return refused or self._not_tried(name)", "return refused", SAYS),
    Edit("nn/paired_convolution.py", "input = copy_to_group(input, mesh)", "pass", VALUES),
    Edit("nn/paired_convolution.py", "y if b is None else y + b.view", "y if True else y + b.view", VALUES),
    Edit("nn/paired_convolution.py", '"weight": 1 - given["weight"]', '"weight": given["weight"]', CUT),
    Edit("nn/sliced.py", "buffer if name in cuts.runs else shard_buffer(buffer, mesh, dim)", "buffer", VALUES),
    Edit("nn/convolution.py", "if paired and (args or kwargs):", "if False:", MERGED),
    Edit(
        "integrations/transformers/adapters.py",
        "_like(weight, product) if isinstance(weight, DTensor) else product",
        "product",
        MERGED,
    ),
    Edit("planning/modules/channel_modules.py", "None if any(part % size for part in parts) else", "", WHOLE),
    Edit("planning/replays/channel_steps.py", "told or degrees()", "told", f"{PAIRS} -k same_bits"),
    Edit("planning/replays/channel_steps.py", "self._whole_channels.add(name)\n        if name", "if name", WHOLE),
    Edit("planning/replays/channel_steps.py", "self._whole_channels.add(name)\n            return", "return", WHOLE),
    Edit("planning/replays/channel_steps.py", "if split != taken.split(1):", "if False:", WHOLE),
    Edit("planning/proofs/convolution_pairs.py", "if added[best] > 0:", "if False:", f"{PAIRS} -k never_more"),
    Edit("planning/proofs/convolution_pairs.py", " or len(segments) > 1:", ":", CUT),
    Edit(
        "planning/proofs/convolution_pairs.py", "takes=n in takes or n in group.rows", "takes=n in group.rows", SCATTERS
    ),
    Edit("planning/replays/roles.py", "replace(column, taken=row)", "column", CUT),
    Edit("planning/entries/convolution_entries.py", "1 + wanted", "2", SCATTERS),
    Edit("nn/paired_convolution.py", "0 if outputs else None", "None if outputs else None", SCATTERS),
    Edit("nn/paired_convolution.py", '{"weight": cast(int, dims["weight"])}', '{"weight": 0}', VALUES),
    Edit("nn/paired_convolution.py", "told(b, 0, (b.shape[0],), 0, 0)", "del told", VALUES),
    Edit("nn/paired_convolution.py", "copy_fresh(self, fresh, mesh)", "del fresh", VALUES),
    Edit("planning/entries/plan_entries.py", 'and style.taken and name == "bias"', "and False", CUT),
    Edit("planning/proofs/pair_proofs.py", "packed & inner and", "False and", NORMED_CUT),
    Edit("planning/proofs/convolution_pairs.py", "self._apart.append(best)", "pass", NORMED_CUT),
    Edit("planning/proofs/channel_bytes.py", 'f"{name}.{NORMED}") if one', '"") if one', NORMED_CUT),
    Edit("planning/splits.py", "error.taken = name, split.segments", "pass", CUT),
    Edit("sharding/followed_calls.py", "sizes=segments_taken(module)", "sizes=()", VALUES),
    Edit("nn/paired_convolution.py", "dim=channels, shard_sizes=chunk", "dim=0, shard_sizes=chunk", VALUES),
    Edit("planning/proofs/convolution_pairs.py", "if name in recording.direct or name", "if name", WHOLE),
    Edit(
        "planning/proofs/decision.py",
        "self.decision.by_channel = dict(sorted(replay.cut_segments.items()))",
        "pass",
        CUT,
    ),
    Edit("planning/proofs/decision.py", "pairs and not degrees()", "pairs", f"{PAIRS} -k same_bits"),
    Edit(
        "sharding/followed_calls.py", "self._follow_channels(module, args[0] if args else None, output)", "pass", VALUES
    ),
    Edit("sharding/same_bits.py", "isinstance(style, Channels) and style.paired:", "False:", f"{PAIRS} -k same_bits"),
    Edit("planning/replays/rules.py", "if split.dim >= call.rank_of() - dims:", "if False:", f"{PAIRS} -k space"),
    Edit("nn/paired_convolution.py", 'else joined(self, "bias")', "else None", VALUES),
    Edit("nn/paired_convolution.py", "fresh_like(self, held, bias=", "fresh_like(self, held, bias=not ", VALUES),
    Edit("planning/replays/gate_rules.py", "if values != gates:", "if False:", WHOLE),
    Edit("planning/replays/gate_rules.py", "if dim != split.dim:", "if dim < 0:", CUT),
    Edit("planning/proofs/pair_proofs.py", "if error.met is None or len(error.met.segments) > 1", "if True", CUT),
    Edit("planning/proofs/pair_proofs.py", "module._parameters | module._buffers", "module._parameters", CUT),
    Edit("planning/proofs/pair_proofs.py", "if not error.segmented:", "if True:", CUT),
    Edit(
        "planning/proofs/pair_proofs.py",
        "not error.segmented), failures[0])",
        "False), failures[0])",
        SAYS,
    ),
    Edit("planning/proofs/pair_choices.py", "for name, cuts in slices.items():", "for name, cuts in ():", VALUES),
    Edit("sharding/followed_calls.py", "segments_given(module) or (output", "(output", VALUES),
    Edit("state/plain_state.py", "self._assign and isinstance(like, nn.Parameter)", "self._assign", VALUES),
    Edit(
        "nn/paired_convolution.py", "own * self.groups // self.in_channels", "self.groups", f"{GROUPED} -k values_and"
    ),
    Edit("nn/paired_convolution.py", "segments or taken or gathers", "segments or taken", f"{GROUPED} -k no_input"),
    Edit("planning/proofs/pair_proofs.py", 'if f"{key[0]}.".startswith(around)', "if key", f"{GROUPED} -k gather_what"),
    Edit(
        "planning/proofs/convolution_pairs.py",
        "if name in shadow.grouped and",
        "if False and",
        f"{GROUPED} -k could_not",
    ),
)
