"""Seeded faults of `same_bits`: the same bits at every degree."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["SAME_BITS"]

CANONICAL, BITS, TRAINED = "gemm/canonical.py", "tests/ops/test_same_bits.py", "tests/sharding/test_same_bits.py"
UNEVEN, OVERRIDES = "tests/nn/test_same_bits.py", "tests/sharding/test_same_bits_overrides.py"
EXPERTS, DEALT = "tests/sharding/test_same_bits_experts.py", "tests/ops/test_same_bits_experts.py"

SAME_BITS = (
    Edit(CANONICAL, 'f"leaf {len(parts)}"', '"leaf"', f"{BITS} -k every_op"),
    Edit(
        "gemm/tree_sum.py",
        "zip(parts[::2], parts[1::2], strict=True)",
        "zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)",
        "tests/csrc/test_tree_sum.py -k without",
    ),
    Edit(CANONICAL, " and x.data_ptr() % gaps.ALIGNMENT == 0:", ":", f"{BITS} -k strides"),
    Edit(
        CANONICAL,
        "part = None if bias is None else dense(bias)\n",
        "part = bias\n",
        f"{BITS} -k strides",
    ),
    Edit("gemm/gaps.py", "return torch.equal(*results)", "return True", "tests/gemm/test_gaps.py -k other_bits"),
    Edit(CANONICAL, "block * width, (block + 1) * width", "block * width, size", f"{BITS} -k values"),
    Edit(
        "dispatch.py",
        "    if not offer.keeps_bits:",
        "    if not offer.keeps_bits and problem.out_dtype is not None:",
        f"{BITS} -k cannot",
    ),
    Edit("backends/canonical_rows.py", "fp8.unpack_alike(", "fp8.unpack(", f"{BITS} -k every_op"),
    Edit(
        "ops/scaled_matmul.py",
        "same = _compared(group, signature, of_rows) if layout.feature else None",
        "same = None",
        f"{BITS} -k scales_of",
    ),
    Edit(
        "state/clipping.py",
        "in local.chunk(blocks, placement.dim)]",
        "in local.chunk(1, placement.dim)]",
        f"{TRAINED} -k gpt",
    ),
    Edit(
        "sharding/sequence_blocks.py",
        "            sums_gradient(self._copies[id(parameter)])\n",
        "",
        f"{TRAINED} -k block_for_each",
    ),
    Edit("sharding/same_bits.py", "overrides=overrides,", "", f"{TRAINED} -k overrides"),
    Edit("sharding/same_bits.py", "strategy=plan.strategy,", 'strategy="auto",', f"{OVERRIDES} -k rules"),
    Edit(
        "planning/alone/ties.py",
        '"default" if old is None or',
        '"default" if old is None or old.source or',
        f"{OVERRIDES} -k rules",
    ),
    Edit("sharding/same_bits.py", "    if not plan.sequence_parallel:", "    if largest < 0:", f"{TRAINED} -k refused"),
    Edit(
        "planning/proofs/decision.py",
        "dict.fromkeys((divisor(world_size), world_size))",
        "(world_size,)",
        "tests/planning/test_degrees.py -k largest_number",
    ),
    Edit(
        "planning/proofs/decision.py",
        " if self._widest is None else self.search.prove_like(group, self._widest[group])",
        "",
        "tests/planning/test_degrees.py -k grouped",
    ),
    Edit(
        "ops/same_bits.py",
        "wanted and (same_bits := same_bits_of(group))",
        "wanted and (same_bits := same_bits_of(group)) > 8",
        "tests/ops/test_same_bits_main_grad.py",
    ),
    Edit("nn/blocks.py", "self.counts[rank * own : (rank + 1) * own]", "self.counts[:own]", f"{UNEVEN} -k sizes"),
    Edit("nn/blocks.py", "block * self.places + units", "units", f"{UNEVEN} -k sizes"),
    Edit(
        "nn/block_copies.py",
        "canonical.top_of_tree(list(sums.split(1)), dx)",
        "dx.copy_(sums[0] + sums[1:].flip(0).sum(0))",
        f"{UNEVEN} -k sizes",
    ),
    Edit(
        "state/originals.py",
        "start + places, first + self.held[run]",
        "start + places, first + self._room",
        f"{UNEVEN} -k sizes",
    ),
    Edit("sharding/block_masks.py", "enumerate(self.widths or ", "enumerate(", f"{TRAINED} -k drops"),
    Edit("nn/cut_experts.py", "product.chunk(blocks, 1)", "product.chunk(1, 1)", f"{EXPERTS} -k own_has"),
    Edit("nn/dealt_experts.py", "if same_bits_of(ep):", "if ep.size() == 0:", f"{EXPERTS} -k own_has"),
    Edit(
        "state/clipping.py",
        "torch.linalg.vector_norm(all_gather(own, group, shard_sizes=sizes), p)",
        "torch.linalg.vector_norm(own, p)",
        f"{EXPERTS} -k own_has",
    ),
    Edit(
        "ops/expert_blocks.py",
        "in rows().runs():",
        "in [(0, 0, count)]:",
        f"{DEALT} -k of_one_rank",
    ),
    Edit(
        "backends/canonical_experts.py",
        "picked = whole.index_select(0, rows.tokens[low:high])",
        "picked = whole.index_select(0, rows.tokens[low:high].flip(0))",
        f"{DEALT} -k values",
    ),
    Edit(
        "ops/expert_blocks.py",
        "order = accumulation_dtype(found.dtype), experts[own].argsort(dim=1, stable=True)",
        "order = accumulation_dtype(found.dtype), (experts[own] + group.size).fmod(3).argsort(dim=1, stable=True)",
        f"{DEALT} -k of_one_rank",
    ),
    Edit("ops/same_bits.py", "if rows * width % VECTOR)", "if width < 0)", f"{TRAINED} -k refused"),
)
