// What ranks are told to call, the same on all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "world.h"

constexpr unsigned kThreads = 3, kBlocks = 2;
constexpr unsigned kThreadsOfStrips = 4;  // of the reducer: two warps of two

struct Call {
    int number, op, slot, type;
    std::uint32_t fingerprint;
    int chunks;
    std::vector<std::int64_t> rows;  // of each rank
    std::int64_t columns, padding;
    bool bias;
};

enum { kBarrier, kGather, kScatter, kReduce, kGatherAtOnce, kReduceInTwo, kReduceAndNorm, kOps };

inline Call next_call(Random& random, int number, int world_size, bool one_slot) {
    Call call = {};
    call.number = number;
    call.op = static_cast<int>(pick(random, 0, kOps - 1));
    call.slot = pick(random, 0, 3) == 0 ? static_cast<int>(pick(random, 0, 1)) : number & 1;  // as replayed graphs may
    if (one_slot) call.slot = 0;
    call.type = static_cast<int>(pick(random, 0, 6));
    call.fingerprint = static_cast<std::uint32_t>(random());
    call.chunks = static_cast<int>(pick(random, 1, 3));
    for (int rank = 0; rank < world_size; ++rank) call.rows.push_back(pick(random, 0, 5));
    call.columns = pick(random, 0, 2) == 0 ? 8 * pick(random, 1, 4) : pick(random, 1, 33);
    call.padding = pick(random, 0, 1) * 8;
    call.bias = pick(random, 0, 1) == 1;
    return call;
}

template <typename T>
T* as(std::vector<float>& buffer) {
    return reinterpret_cast<T*>(buffer.data());
}

inline std::uint64_t bit(int rank) { return std::uint64_t{1} << rank; }
