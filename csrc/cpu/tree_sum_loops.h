// The loops of the tree sums, included by each tree_sum_<isa>.cpp inside its unnamed namespace: plain loops over fp32
// (fp64) that the compiler makes vectors of.

#include "plain_numbers.h"

// Columns at a time: what a level of the tree keeps of them stays in the first-level cache.
constexpr std::int64_t kColumns = 512;

template <class In>
inline const typename In::Stored* part_at(const TreeCall& call, int part, std::int64_t row, std::int64_t column) {
    const ConstRows& rows = call.parts[part];
    return static_cast<const typename In::Stored*>(rows.data) + row * rows.stride + column;
}

// sums = the tree over `blocks` blocks from `first` on, of `count` columns from `column` on.
template <class In>
void tree(const TreeCall& call, int first, int blocks, std::int64_t row, std::int64_t column, std::int64_t count,
          typename In::Wide* __restrict sums) {
    if (blocks == 2 && call.terms == 1) {
        const auto* const left = part_at<In>(call, first, row, column);
        const auto* const right = part_at<In>(call, first + 1, row, column);
        for (std::int64_t j = 0; j < count; ++j) sums[j] = In::widen(left[j]) + In::widen(right[j]);
        return;
    }
    if (blocks == 1) {
        const auto* const term = part_at<In>(call, first * call.terms, row, column);
        for (std::int64_t j = 0; j < count; ++j) sums[j] = In::widen(term[j]);
        for (int t = 1; t < call.terms; ++t) {
            const auto* const next = part_at<In>(call, first * call.terms + t, row, column);
            for (std::int64_t j = 0; j < count; ++j) sums[j] += In::widen(next[j]);
        }
        return;
    }
    alignas(64) typename In::Wide right[kColumns];
    tree<In>(call, first, blocks / 2, row, column, count, sums);
    tree<In>(call, first + blocks / 2, blocks / 2, row, column, count, right);
    for (std::int64_t j = 0; j < count; ++j) sums[j] += right[j];
}

template <class In, class Out>
void sum_all(const TreeCall& call) {
    alignas(64) typename In::Wide sums[kColumns];
    const auto* const bias = static_cast<const typename Out::Stored*>(call.bias);
    for (std::int64_t row = 0; row < call.rows; ++row) {
        auto* const out = static_cast<typename Out::Stored*>(call.out) + row * call.out_stride;
        for (std::int64_t column = 0; column < call.columns; column += kColumns) {
            const std::int64_t left = call.columns - column;
            const std::int64_t count = left < kColumns ? left : kColumns;
            tree<In>(call, 0, call.blocks, row, column, count, sums);
            if (bias != nullptr) {
                for (std::int64_t j = 0; j < count; ++j) sums[j] += Out::widen(bias[column + j]);
            }
            for (std::int64_t j = 0; j < count; ++j) out[column + j] = Out::narrow_any(sums[j]);
        }
    }
}

constexpr TreeKernels kKernels = {
    {sum_all<Float32, Float32>, sum_all<BFloat16, Float32>, sum_all<Float16, Float32>, sum_all<Float64, Float64>},
    {sum_all<Float32, Float32>, sum_all<Float32, BFloat16>, sum_all<Float32, Float16>, sum_all<Float64, Float64>},
};
