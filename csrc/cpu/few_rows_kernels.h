// What the dispatcher (few_rows.cpp) knows of an instruction set: one table of functions per file of kernels.
//
// The rules of reduce_kernels.h hold here, too: those files define nothing outside an unnamed namespace but their
// table's getter, use no std:: function, and need no initialisation before main.
#pragma once

#include "few_rows.h"

namespace tpk {

// Both by Dtype; null where the instruction set adds nothing for it.
struct FewRowsKernels {
    // sums[m * columns + n] = sum over k of x[m][k] * w[n][k]; `packed` is room for x, aligned to 64 bytes.
    void (*multiply[4])(const FewRows& call, char* packed, float* sums);
    // y[n] = round(sums[n] + bias[n]), one row.
    void (*finish[4])(const float* sums, const char* bias, char* y, std::int64_t columns);
};

// Enough for every instruction set: fp32 of x, each row filled up to whole steps along K.
constexpr std::int64_t kLargestStep = 64;
constexpr std::int64_t packed_bytes(std::int64_t rows, std::int64_t contraction) {
    return rows * (contraction + kLargestStep) * 4;
}

// Null where the compiler's target does not have them.
const FewRowsKernels* portable_few_rows();
const FewRowsKernels* avx2_few_rows();
const FewRowsKernels* avx512_few_rows();
const FewRowsKernels* amx_few_rows();

}  // namespace tpk
