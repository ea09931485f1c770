"""Seeded faults in what computes block by block, for ``same_bits``, outside of :mod:`tpkernels.gemm.canonical`."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["BLOCKS"]

INTERPRETED_BITS = "tests/backends/test_symmetric_same_bits.py -k two_ranks"
EXPERT_BITS = "tests/ops/test_same_bits_experts.py -k of_one_rank"

BLOCKS = (
    Edit(
        "backends/symmetric/tuning.py",
        "world_size=problem.same_bits)",
        "world_size=problem.world_size)",
        "tests/backends/test_symmetric_same_bits.py -k tiles_do_not",
    ),
    Edit(
        "backends/symmetric/same_bits.py",
        "blocks, terms = context.problem.same_bits // channel.size,",
        "blocks, terms = 1,",
        INTERPRETED_BITS,
    ),
    Edit(
        "kernels/matmul_reduce_scatter.py",
        "row + i * addend_rows",
        "row + (ADDENDS - 1 - i) * addend_rows",
        INTERPRETED_BITS,
    ),
    # fp8: a part that is taken before it has come, another block's weights
    Edit("backends/symmetric/same_bits.py", "if len(parts) < 2:", "if parts:", INTERPRETED_BITS),
    Edit(
        "gemm/fp8.py", "self.weights[:, :, panel]", "self.weights[:, :, : panel.stop - panel.start]", INTERPRETED_BITS
    ),
    Edit(
        "kernels/matmul_reduce_scatter.py",
        'return scale == "none" or addends == 0',
        "return True",
        "tests/kernels/test_known_launches.py -k rounded",
    ),
    Edit(
        "kernels/operands.py",
        "(len(scale_a), scale_b.numel()) == (m, n)",
        "not scale_a.numel()",
        "tests/kernels/test_choices.py -k scales",
    ),
    Edit("backends/canonical_experts.py", "range(self._blocks)", "range(1)", EXPERT_BITS),
    Edit("backends/canonical_experts.py", "blocks[middle:], right", "blocks[:middle], right", EXPERT_BITS),
    Edit("ops/expert_blocks.py", "unbind(), own)", "unbind()[:1], own)", EXPERT_BITS),
)
