// What follows a row layer in most models: add the residual, then normalise by the root mean square; and its gradient.
//
// Owns the numerical contract. Forward, for each row, in fp32 (fp64 for fp64):
//
//   r = round(y + residual)
//   scale = 1 / sqrt(mean over columns of r^2 + eps)
//   n = round(r * scale * weight)
//
// Backward, from the gradients dn of n and dr of r:
//
//   h = dn * weight,  g = r * scale,  d = round(dr + scale * (h - g * mean(h * g))),  dweight = sum over rows of dn * g
//
// d is the gradient of y and of the residual alike. Sums over columns run in sixteen lanes, column j in lane j mod 16,
// that a fixed tree adds up, sums over rows in order: every instruction set gives the same bits, so that hosts with
// different CPUs normalise alike. Assumes the caller's floating-point mode as reduce.h does.
// Refuses negative counts with std::invalid_argument.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace tpk {

// Rows of `columns` contiguous elements, back to back, aligned to their elements.
struct ResidualNorm {
    Dtype dtype;
    std::int64_t rows;
    std::int64_t columns;
    const void* weight;  // one row
    double eps;
};

// `sums` (r) may be y or the residual, `normed` (n) may be y. `scales` takes one fp32 (fp64) per row; may be null.
void residual_norm(const ResidualNorm& call, const void* y, const void* residual, void* sums, void* normed,
                   void* scales);

// dn or dr may be null, which is zeros. `d` may be dn or dr. `dweight` takes one fp32 (fp64) per column; may be null.
void residual_norm_backward(const ResidualNorm& call, const void* dn, const void* dr, const void* sums,
                            const void* scales, void* d, void* dweight);

}  // namespace tpk
