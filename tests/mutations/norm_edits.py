"""Seeded faults of norms over features that are cut, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["NORMS"]

HEADS, RESPONSE, CHANNELS = (
    f"tests/planning/test_{name}.py" for name in ("per_head", "response_norm", "channel_norms")
)
FIND, NORM = "planning/modules/part_norms.py", "nn/part_norm.py"
PAIRS = "planning/proofs/convolution_pairs.py"
TRAINED = f"{HEADS} -k over_all_ranks"

NORMS = (
    Edit(FIND, "gated, sorted(lengths[name]))", "gated, [3])", f"{CHANNELS} -k as_many_dimensions"),
    Edit(FIND, "((norm.centred or norm.response) and degrees())", "False", f"{HEADS} -k in_no_blocks"),
    Edit(FIND, "norm.centred or norm.response", "norm.centred", f"{RESPONSE} -k in_no_blocks"),
    Edit(
        "planning/replays/replay.py",
        "x.dim() == 4 or not",
        "True or not",
        f"{RESPONSE} -k looks_like",
    ),
    Edit(FIND, "shape[0] if self.response else", "shape[0] if False else", f"{RESPONSE} -k of_all_ranks"),
    Edit(NORM, "copy_to_group(all_reduce(sizes, mesh), mesh)", "all_reduce(sizes, mesh)", f"{RESPONSE} -k values"),
    Edit(NORM, "variances + (means - mean).square()", "variances", TRAINED),
    Edit(NORM, "(moments, mesh)", "(moments, mesh, replicated_grad=True)", TRAINED),
    Edit(FIND, "1 if self.channels_first else len", "len", f"{CHANNELS} -k of_all_ranks"),
    Edit(NORM, "1 if self.channels_first else -1", "-1", f"{CHANNELS} -k values"),
    Edit(NORM, ".movedim(-1, dim)", ".movedim(-1, -1)", f"{CHANNELS} -k values"),
    Edit(PAIRS, "self.bytes.sent_in_norms(proof.norms)", "0", f"{CHANNELS} -k send_more"),
)
