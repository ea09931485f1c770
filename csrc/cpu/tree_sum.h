// The sums of `same_bits`: neighbours first, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in fp32 (fp64 for fp64).
//
// Owns the numerical contract: the order above, one rounding to nearest even at the end. Every instruction set gives the
// same bits; only the payload of a NaN may differ. Assumes the caller's floating-point mode as reduce.h does.
// Refuses a number of parts that is no power of two, no terms, and negative counts, with std::invalid_argument.
#pragma once

#include <cstdint>

#include "reduce.h"

namespace tpk {

// sums[i][j] = tree over b of (parts[b * terms][i][j] + parts[b * terms + 1][i][j] + ...), which stays in fp32 (fp64);
// parts have `dtype`, and each of the num_parts / terms blocks has so many of them. No part overlaps `sums`.
void tree_of_products(Dtype dtype, const ConstRows* parts, int num_parts, int terms, void* sums,
                      std::int64_t sums_stride, std::int64_t rows, std::int64_t columns);

// out[i][j] = round(tree over p of parts[p][i][j] + bias[j]); parts are fp32 (fp64), out and bias have `dtype`. The bias
// may be null. No part overlaps `out`.
void tree_of_sums(Dtype dtype, const ConstRows* parts, int num_parts, const void* bias, void* out,
                  std::int64_t out_stride, std::int64_t rows, std::int64_t columns);

}  // namespace tpk
