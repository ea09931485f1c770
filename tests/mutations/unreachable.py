"""Faults that no model on a CPU can show, and why."""

from __future__ import annotations

from tests.mutations.faults import FAULTS

__all__ = ["UNREACHABLE"]

_COPY = "a copy: the replay carries its layout on without asking the rule"
_PARTS = "torch makes it of other ops before the planner sees it"
_CUDA = "a kernel of CUDA"
_VIEW = "the trace calls it a view"
_REASONS = {
    "clone": _COPY, "detach": _COPY, "alias": _COPY, "contiguous": _COPY,
    "_unsafe_view": _VIEW, "reshape": _VIEW, "_reshape_alias": _VIEW,
    "chunk": _PARTS, "softmax": _PARTS, "repeat_interleave": _PARTS, "rms_norm": _PARTS, "_fused_rms_norm": _PARTS,
    "_scaled_dot_product_flash_attention": _CUDA, "_scaled_dot_product_efficient_attention": _CUDA,
    "_scaled_dot_product_cudnn_attention": _CUDA, "_scaled_dot_product_fused_attention_overrideable": _CUDA,
    "lift_fresh": "works on constants, which are whole",
}  # fmt: skip

_REASONS_OF_FAULTS = {
    "view_as_complex refuses nothing": "a rank has one of two numbers, of which torch makes no complex one",
    "unbind refuses nothing": "a rank has fewer results, and the replay counts them",
    "embedding refuses nothing": "rows that are cut are no heads, and meet nothing that is cut as they are",
    "index_select refuses nothing": "what is picked has not the size of its segments, which rows compare",
    "topk refuses nothing": "what is picked has not the size of its segments, which rows compare",
    "_prelu_kernel refuses nothing": "torch itself raises for slopes of channels that a rank lacks",
    "copy_ refuses nothing": "what is written to keeps its layout, which the replay compares",
}

UNREACHABLE = {name: why for name in FAULTS for rule, why in _REASONS.items() if name.partition(" ")[0] == rule}
UNREACHABLE |= _REASONS_OF_FAULTS
