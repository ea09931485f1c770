"""Seeded faults of fp8 operands, dense ones and those of experts."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["FP8"]

DENSE, EXPERTS = "tests/ops/test_fp8.py", "tests/ops/test_grouped_fp8.py"
SCALING = "total.mul_(x.scale).mul_(matrix.scale)"

FP8 = (
    Edit("gemm/fp8.py", SCALING, "total.mul_(x.scale)", DENSE),
    Edit("gemm/fp8.py", "mul_(256.0)", "mul_(255.0)", DENSE),
    Edit("gemm/fp8.py", "        start = stop\n", "        start = k\n", DENSE),
    # another expert's scale, one that is applied twice, one row's for all
    Edit("gemm/fp8.py", "self._scale[expert].t()", "self._scale[0].t()", EXPERTS),
    Edit("gemm/fp8.py", SCALING, f"{SCALING}.mul_(matrix.scale)", EXPERTS),
    Edit(
        "ops/expert_scales.py",
        "fp8.scale_rows(self.scale_x, rows.shape[0])",
        "fp8.scale_rows(self.scale_x.reshape(-1)[:1], rows.shape[0])",
        EXPERTS,
    ),
)
