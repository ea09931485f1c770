// What the dispatcher (residual_norm.cpp) knows of an instruction set; the rules of reduce_kernels.h hold here, too.
#pragma once

#include "residual_norm.h"

namespace tpk {

// All by Dtype. `room` is for the kernel's own use, aligned to 64 bytes: see kRoomRows.
struct ResidualNormKernels {
    void (*forward[4])(const ResidualNorm& call, const void* y, const void* residual, void* sums, void* normed,
                       void* scales, void* room);
    void (*backward[4])(const ResidualNorm& call, const void* dn, const void* dr, const void* sums, const void* scales,
                        void* d, void* dweight, void* room);
};

// Rows of fp32 (fp64) that a kernel needs: the weight, and what it keeps of the row it is at.
constexpr std::int64_t kRoomRows = 4;

// Null where the compiler's target does not have them.
const ResidualNormKernels* portable_residual_norm();
const ResidualNormKernels* avx2_residual_norm();
const ResidualNormKernels* avx512_residual_norm();

}  // namespace tpk
