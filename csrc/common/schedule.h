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

// First row of chunk `chunk` of `count`, as numpy.array_split cuts: the first rows % count chunks have one row more.
// chunk_begin(rows, count, count) is rows.
TPK_HOST_DEVICE std::int64_t chunk_begin(std::int64_t rows, std::int64_t count, std::int64_t chunk) {
    const std::int64_t base = rows / count, rest = rows % count;
    return chunk * base + (chunk < rest ? chunk : rest);
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
