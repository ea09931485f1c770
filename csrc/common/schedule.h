// Chunk schedules: how rows are cut into chunks, and in which order ranks deal with each other.
//
// Pure functions for host and device, equal to those of tpkernels/partition.py (a test compares them): `chunk_begin` to
// chunk_ranges, `peer_after` to peers_after.  A transfer and whoever waits for it compute the same cut from the same
// three numbers, so no table travels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TPK_HOST_DEVICE __host__ __device__ inline
#else
#define TPK_HOST_DEVICE inline
#endif

namespace tpk {

// `count` chunks of `rows` rows, as numpy.array_split cuts: the first rows % count chunks have one row more.  Kernels
// are given this, because dividing 64-bit numbers is a function call on a GPU.
struct Chunks {
    std::int64_t base, rest;

    // First row of `chunk`; that of chunk `count` is `rows`.
    TPK_HOST_DEVICE std::int64_t begin(std::int64_t chunk) const {
        return chunk * base + (chunk < rest ? chunk : rest);
    }
};

TPK_HOST_DEVICE Chunks make_chunks(std::int64_t rows, std::int64_t count) { return {rows / count, rows % count}; }

TPK_HOST_DEVICE std::int64_t chunk_begin(std::int64_t rows, std::int64_t count, std::int64_t chunk) {
    return make_chunks(rows, count).begin(chunk);
}

// The chunk that `row` is in; rows > row >= 0.
TPK_HOST_DEVICE std::int64_t chunk_of_row(std::int64_t rows, std::int64_t count, std::int64_t row) {
    const std::int64_t base = rows / count, rest = rows % count;
    const std::int64_t in_larger = rest * (base + 1);
    return row < in_larger ? row / (base + 1) : rest + (row - in_larger) / base;
}

// The step-th peer of `rank` (step 1 to world_size - 1): nearest successor first, so that no two ranks meet at one.
TPK_HOST_DEVICE int peer_after(int rank, int world_size, int step) { return (rank + step) % world_size; }

}  // namespace tpk
