"""GEMMs of this library's own on one rank: the compiled core's door, few rows, fp8, and what follows a row GEMM."""
