// Sums over ranks and copies: the arithmetic of the CPU collectives.
//
// Owns the numerical contract: widen to fp32 (fp64 for fp64), add the parts in the order given, add the bias, round
// once to nearest even. Every instruction set gives the same bits; only the payload of a NaN may differ.
// Assumes the caller's floating-point mode (rounding to nearest, denormals kept), and that nobody writes the inputs
// meanwhile. On return every store is ordered before the caller's next release store, streaming stores included.
// Refuses fewer than one part, and negative counts, with std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpk {

enum class Dtype : std::uint32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

std::size_t size_of(Dtype dtype);

// A row-major matrix; stride in elements between rows; rows are contiguous. Any alignment, even off the element's.
struct ConstRows {
    const void* data;
    std::int64_t stride;
};

// out[i][j] = round(((parts[0] + parts[1]) + ...) + bias[j]). The bias has the parts' dtype and may be null. out may be
// one of the parts (exactly the same rows); any other overlap is the caller's mistake.
// A caller that works piece by piece says in `whole_bytes` what all its pieces read and write (streaming_threshold_bytes).
void sum_rows(Dtype dtype, const ConstRows* parts, int num_parts, const void* bias, void* out, std::int64_t out_stride,
              std::int64_t rows, std::int64_t columns, std::int64_t whole_bytes = 0);

// dst[i] = src[i] bytewise, row by row. The two must not overlap.
void copy_rows(const void* src, std::int64_t src_stride_bytes, void* dst, std::int64_t dst_stride_bytes,
               std::int64_t rows, std::int64_t row_bytes, std::int64_t whole_bytes = 0);

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

Isa best_isa();           // what this CPU and its operating system have
Isa active_isa();         // what sum_rows and copy_rows use; best_isa() unless forced
void force_isa(Isa isa);  // tests only; throws std::invalid_argument for one this CPU lacks
const char* name_of(Isa isa);

// Calls that read and write at least this many bytes in all bypass the caches with their stores, where the instruction
// set can: three quarters of the last-level cache, but 12 MiB at most, found by measurement (reduce.cpp). Tests only
// force it.
std::int64_t streaming_threshold_bytes();
void force_streaming_threshold(std::int64_t bytes);

}  // namespace tpk
