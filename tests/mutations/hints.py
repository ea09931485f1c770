"""Where to look for models that kill a fault: ops and blocks of the fuzzer that make torch ask each rule."""

from __future__ import annotations

from typing import Any

import tests.fuzz.model  # noqa: F401 - registers the kinds that are named here
from tests.fuzz.vocabulary import BLOCKS, FEATURES, Spec

__all__ = ["candidates", "likely"]

RULES = {
    "_to_copy": "through_bool through_fp32", "zeros_like": "times_a_new_one", "ones_like": "ones_like",
    "full_like": "ones_like", "empty_like": "copied_into_empty", "zero_": "zeroed_in_place", "fill_": "zeroed_in_place",
    "view": "moved_between_rows viewed_as_other_rows heads_through_batch heads_merged_wrongly through_rows",
    "transpose": "transposed_and_back normed_over_length layer_norm heads_away_and_back",
    "t": "turned_rows", "permute": "permuted_and_back movedim", "unsqueeze": "stacked squeezed expanded",
    "squeeze": "squeezed recurrent", "expand": "expanded expanded_heads expanded_in_front",
    "gather": "gathered_feature", "unfold": "unfolded_features",
    "slice": "rotated_halves every_other repeated_features tiled_features size_in_a_slice one_feature last_feature "
             "behind_whole padded_features along_length twice_beside",
    "select": "selected_feature first_head one_feature_in_place last_head first_row_in_place scan",
    "split": "chunks_of_length chunks_beside_themselves chunks_swapped rotated_halves_of_a_head",
    "split_with_sizes": "chunks_of_length",
    "unbind": "heads_mixed recurrent",
    "cat": "beside_whole behind_whole rotated_halves heads_beside_whole twice_beside "
    "rows_beside_whole along_length chunks_swapped extra_heads two_layouts", "stack": "interleaved stacked scan",
    "repeat": "tiled_features repeated_rows glu repeated_in_front tiled_features_without_the_rest tiled_to_a_size",
    "_softmax": "softmax_over_features softmax_over_heads",
    "_log_softmax": "log_softmax_over_features", "cumsum": "cumsum_over_features cumsum_over_heads heads_through_batch",
    "flip": "flip_features flipped_heads", "sum": "sum_of_features sum_over_heads", "mean": "centred_over_features "
    "sum_of_everything mean_over_heads", "amax": "largest_feature largest_head", "amin": "smallest_feature",
    "var": "variance_of_features", "std": "std_of_features", "var_mean": "var_mean_of_features mean_of_var_mean",
    "logsumexp": "logsumexp", "linalg_vector_norm": "vector_norm l2_normed",
    "native_layer_norm": "normed_over_features layer_norm normed_over_heads normed_by_module normed_over_all",
    "mm": "matrix matrix_first matrix_of_a_head einsum from_whole heads_mixed_by_matrix "
    "linear_of_a_head gram_of_rows",
    "addmm": "affine_of_a_head gram_of_rows_plus_one",
    "bmm": "attends_by_part gram_of_features attends_to_whole heads_attend "
    "rows_mixed scores_of_itself matrix_per_head einsum_of_a_head outer_with_whole",
    "constant_pad_nd": "padded_features shifted_features",
    "convolution": "convolved_channels convolved_over_features",
    "max_pool2d_with_indices": "largest_of_neighbours", "avg_pool2d": "mean_of_neighbours",
    "glu": "glu", "grid_sampler_2d": "sampled_features", "grid_sampler_3d": "sampled_in_space",
    "linalg_solve_triangular": "solved_in_a_head solved_over_rows", "view_as_real": "rotary_complex complex_sum",
    "baddbmm": "attends_by_part_and_bias", "_scaled_dot_product_flash_attention_for_cpu": "heads_attend_by_kernel",
}  # fmt: skip
"""Ops by rule."""

MORE: dict[str, list[Spec]] = {
    "split": [{"is": "packed_gate", "how": "chunk"}, {"is": "packed_attention", "heads": 4}],
    "glu": [{"is": "packed_gate", "how": "glu"}],
    "split_with_sizes": [{"is": "packed_gate", "how": "hidden"}, {"is": "packed_gate", "how": "split"},
                         {"is": "packed_attention", "heads": 4, "kv_heads": 2, "packing": "split"}],
    "slice": [{"is": "packed_gate", "how": "slice"}, {"is": "packed_gate", "how": "every_other"},
              {"is": "packed_attention", "heads": 4, "packing": "slices"}],
    "select": [{"is": "packed_gate", "how": "view"}], "expand": [{"is": "attention", "heads": 4, "kv_heads": 2}],
    "unbind": [{"is": "packed_gate", "how": "view"}, {"is": "packed_gate", "how": "pairs"},
               {"is": "packed_attention", "heads": 4, "packing": "three_first"}],
    "cat": [{"is": "two_ways", "how": "cat"}, {"is": "two_ways", "how": "cat whole"}, {"is": "gated_mlp", "how": "cat"},
            {"is": "latent_attention", "heads": 4}],
    "native_layer_norm": [{"is": "mlp", "ops": [
        {"is": "in_heads", "heads": 4, "ops": [{"is": "normed_by_module", "rms": False}]}]}],
    "stack": [{"is": "two_ways", "how": "stack"}, {"is": "mlp", "ops": [{"is": "two_layouts", "how": "stack"}]}],
    "bmm": [{"is": "attention", "heads": 4}, {"is": "fused_experts"}],
    "baddbmm": [{"is": "attention", "heads": 4, "kernel": "baddbmm"},
                {"is": "attention", "heads": 4, "kernel": "baddbmm", "scores": "shared_table"}],
    "_scaled_dot_product_flash_attention_for_cpu": [
        {"is": "attention", "heads": 4, "kernel": "sdpa", "scores": scores}
        for scores in ("none", "causal", "alibi", "table", "given_bias", "embedding", "shared_table")
    ] + [{"is": "attention", "heads": 4, "kv_heads": kv, "kernel": "gqa", "scores": "causal"} for kv in (1, 2)]
    + [{"is": "attention", "heads": 3, "kernel": "sdpa"}],
    "view": [{"is": "mlp", "ops": [{"is": "in_heads", "heads": 4, "how": how}]} for how in ("hidden", "heads_last")]
    + [{"is": "packed_attention", "heads": 4, "packing": how} for how in ("three_first", "heads_first")],
}  # fmt: skip

PLANNER = (
    "temperature phase magnitude used_on_both on_both times_a_feature_of_the_whole gate_of_one gradient_over_features "
    "scaled_by_features scaled_by_numel numbers_of_features whole_in_place complex_with_whole where_whole plus_whole "
    "from_whole_to_one running closure buffer used_twice scale_of_first_features rotary_by_whole normed_by_module "
    "norm_on_both scale_of_part_and_loss attribute_per_head heads_plus_whole learned_phase complex_parameter "
    "scale_in_a_head"
)  # fmt: skip
PLANNER_BLOCKS: list[Spec] = [
    {"is": "attention", "heads": 4, "gives": True}, {"is": "reads_the_weight", "how": "linear"},
    {"is": "reads_the_weight", "how": "norm"}, {"is": "reads_the_weight", "how": "called_too"}, {"is": "tied_layers"},
    {"is": "layer_called_twice", "how": "nested"}, {"is": "two_ways", "how": "cat whole"}, {"is": "mlp", "bias": True},
    {"is": "packed_gate", "how": "pairs"}, {"is": "packed_gate", "how": "every_other"}, {"is": "packed_gate"},
    {"is": "attention", "heads": 6, "kv_heads": 3}, {"is": "attention", "heads": 4, "kv_heads": 1},
    {"is": "attention", "heads": 4, "scores": "given_bias"}, {"is": "latent_attention", "heads": 4},
    {"is": "latent_query", "heads": 4}, {"is": "state_space", "per_feature": False}, {"is": "bottleneck"},
    {"is": "layer_called_twice", "how": "up"}, {"is": "layer_called_twice", "how": "down"}, {"is": "deep_mlp"},
    {"is": "tied_layers", "how": "functional"}, {"is": "experts"}, {"is": "gated_mlp"},
]  # fmt: skip


def _around(block: Spec, **more: Any) -> Spec:
    return {"seed": 0, "world": 2, "blocks": [block], **more}


def _of(name: str) -> list[Spec]:
    """Models of one op, on features or on heads."""
    found = []
    if name in FEATURES:
        found.append(_around({"is": "mlp", "ops": [{"is": name}]}))
    if name not in FEATURES or name in ("temperature", "rms_by_hand"):
        found += [
            _around({"is": "mlp", "ops": [{"is": "in_heads", "heads": 4, "layout": layout, "ops": [{"is": name}]}]})
            for layout in ("bshd", "bhsd")
        ]
    return found


FIRST: dict[str, list[Spec]] = {
    "empty_like gives something whole": _of("times_what_was_empty"),
    "bernoulli_ gives something whole": _of("nothing_of_dropout"),
    "bernoulli gives something whole": _of("nothing_of_draws"),
    "native_dropout gives something whole": _of("nothing_of_native_dropout"),
    "log_sigmoid_forward gives something whole": _of("log_sigmoid"),
    "rand_like gives something whole": _of("nothing_of_noise"),
    "index_put refuses nothing": _of("one_feature_put"),
    "index_put_ refuses nothing": _of("one_feature_put_in_place"),
    "as_strided refuses nothing": _of("first_feature_by_its_place"),
    "_safe_softmax refuses nothing": _of("safe_softmax_over_features"),
    "split_with_sizes refuses nothing": _of("first_quarter_of_features"),
    "cat refuses nothing, nor does the rest": _of("two_layouts"),
    "stack refuses nothing, nor does the rest": [
        _around({"is": "mlp", "ops": [{"is": "two_layouts", "how": "stack"}]})
    ],
    "repeat refuses nothing, nor does the rest": _of("tiled_to_a_size"),
    "repeat is taken to move nothing": _of("repeated_in_front"),
    "var_mean refuses nothing, nor does the rest": _of("mean_of_var_mean"),
    "baddbmm refuses nothing, nor does the rest": _of("attends_by_part_and_bias"),
    "constant_pad_nd refuses nothing, nor does the rest": _of("shifted_features"),
    "pointwise ops take any layout": [_around({"is": "two_packed", "how": how}) for how in ("first", "last")],
    "activations may be mixed": _of("times_the_whole_by_way_of_zeros"),
    "nothing is completed": [_around({"is": "scaled_mlp", "how": "same"})],
    "parameters may be partial and complete": [_around({"is": "scaled_mlp", "how": "same"})],
    "half of a module may be partial": [_around({"is": "scaled_mlp"})],
    "parts may leave the model": [_around({"is": "added_to_zeros", "gives": True})],
    "a column takes a part": [_around({"is": "added_to_zeros", "how": "layer"})],
    "tied weights are cut apart": [_around({"is": "tied_layers", "how": "square", "hidden": 8})],
    "ranks of other sizes than the first are like it": [
        _around({"is": "mlp", "hidden": 15, "ops": [{"is": "branch", "on": "features", "ops": [{"is": "tanh"}]}]})
    ],
    "runs are without gradients": [
        _around({"is": "mlp", "ops": [{"is": "branch", "on": "grad", "ops": [{"is": "positions"}]}]})
    ],
    "parts by features are cut along the sequence": [
        _around(
            {"is": "bottleneck", "ops": [{"is": "plus_whole"}], "wiring": {"residual": "none"}},
            head="classes",
            sequence_parallel=True,
        )
    ],
    "modules do on a part of the sequence what they do on all": [
        _around({"is": "mlp", "wiring": {"norm": "by length", "residual": "add"}}, sequence_parallel=True)
    ],
    "custom backwards are trusted": [*_of("gradient_over_features"), *_of("hook_over_features")],
    "constants may be one rank's": _of("divided_by_a_tensor"),
    "ops may take other tensors": _of("chosen_by_size"),
    "a row takes any layout": [_around({"is": "two_ways", "how": "cat"})],
    "copies of heads do not sum their gradients": [
        _around({"is": "attention", "heads": 4, "kv_heads": 1}),
        _around({"is": "attention", "heads": 4, "kv_heads": 2}, world=4),
    ],
    "an embedding does not sum": [_around({"is": "mlp"}, stem="ids")],
}
"""By faults: what shows them most plainly."""


def likely(fault: str) -> list[Spec]:
    """Models made to kill ``fault``; there may be none."""
    return FIRST.get(fault, [])


def candidates(fault: str) -> list[Spec]:
    """Models that could kill ``fault``."""
    rule = fault.partition(" ")[0]
    if rule in RULES:
        return [spec for name in RULES[rule].split() for spec in _of(name)] + [_around(b) for b in MORE.get(rule, [])]
    assert all(block["is"] in BLOCKS for block in PLANNER_BLOCKS)
    return [
        *(spec for name in PLANNER.split() for spec in _of(name)), *(_around(block) for block in PLANNER_BLOCKS),
        *(_around({"is": "mlp", "bias": True}, **more) for more in (
            {"stem": "ids", "head": "tied"}, {"stem": "linear", "head": "linear"}, {"override": [0.0, "row_split"]},
            {"override": [0.0, "row_split"], "stem": "linear"})),
        _around({"is": "attention", "heads": 8, "kv_heads": 2, "head_dim": 2}) | {"world": 2},
        _around({"is": "attention", "heads": 4, "kv_heads": 1}) | {"stem": "linear"},
        _around({"is": "mlp", "ops": [{"is": "prelu"}]}),
        _around({"is": "mlp", "ops": [{"is": "branch", "on": "features"}]}),
    ]  # fmt: skip
