// GEMM of few rows: the local product of a decoding step, which is as long as the reading of its weight.
//
// y[m][n] = round(sum over k of x[m][k] * w[n][k] + bias[n]) for up to 128 rows m. The weight is read once, from where it
// lies, and nothing of it is packed or kept; libraries repack it at each call, which takes longer than the product.
//
// Owns the numerical contract: products and sums in fp32, in an order that depends on K, the dtype and the instruction
// set alone, then the bias, then one rounding to nearest even. So a row of y does not depend on how many rows there
// are, equal calls give equal bits, and sums of integers that fp32 holds are exact; instruction sets differ in the last
// bits. AMX, which multiplies bf16 only, counts denormals of x, of w and of sums as zeros; the others keep them.
// Assumes the caller's floating-point mode, and that nobody writes the inputs meanwhile. Reads no byte outside of the
// rows that it is given. One thread works; calls of different threads do not meet.
// Refuses dtypes without kernels, more than 128 rows and negative counts with std::invalid_argument.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace tpk {

constexpr std::int64_t kMaxFewRows = 128;

// Row-major matrices with contiguous rows, strides in elements; any alignment, even off the element's. x is
// [rows, contraction], w [columns, contraction], y [rows, columns] and none of the others. The bias may be null.
struct FewRows {
    Dtype dtype;
    const void* x;
    std::int64_t x_stride;
    const void* w;
    std::int64_t w_stride;
    const void* bias;
    void* y;
    std::int64_t y_stride;
    std::int64_t rows;
    std::int64_t columns;
    std::int64_t contraction;
};

void multiply_few_rows(const FewRows& call);

// In the order of what they add; each serves some dtypes, and leaves the others to those before it.
enum class FewRowsIsa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

FewRowsIsa best_few_rows_isa();            // of the CPU, its operating system and this build; AMX asks for permission
void force_few_rows_isa(FewRowsIsa isa);   // tests only; throws std::invalid_argument for one this CPU lacks
const char* few_rows_isa_of(Dtype dtype);  // which one multiplies this dtype; null: none does

}  // namespace tpk
