// The reducer: sums the ranks' partials as their chunks come.
#pragma once

#include "common/schedule.h"
#include "cuda/numbers.h"
#include "cuda/protocol.h"

namespace tpk {

template <typename In, typename Out>
struct Reduction {
    const In* parts[kMaxRanks];
    std::int64_t strides[kMaxRanks];
    const Out* bias;
    Out* out;
    std::int64_t out_stride, rows, columns;
    Chunks chunks;           // of the rows
    int num_chunks;          // 0: everything is there
    unsigned tiles_per_row;  // see plan_tiles
    int op;
    bool vectors;  // all pointers and strides are multiples of 16 bytes
};

// Elements that a thread sums at once: 16 bytes of the narrower type.
template <typename In, typename Out>
constexpr int kReducePack = 16 / static_cast<int>(sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));

template <typename In, typename Out, int kCount>
TPK_DEVICE void reduce_at(const Group& group, const Reduction<In, Out>& job, std::int64_t row, std::int64_t column) {
    const auto at = [&](int rank) { return job.parts[rank] + row * job.strides[rank] + column; };
    const Out* const bias = job.bias == nullptr ? nullptr : job.bias + column;
    Out* const out = job.out + row * job.out_stride + column;
    store_pack(out, sum_over_ranks<In, Out, kCount>(group.world_size, at, bias));
}

// Decides the job's chunks and tiles, of `threads` units each, from the rest of it.
template <typename In, typename Out>
void plan_tiles(Reduction<In, Out>& job, int threads) {
    const std::int64_t packs = job.vectors ? job.columns / kReducePack<In, Out> : 0;
    const std::int64_t units = packs + (job.columns - packs * kReducePack<In, Out>);
    job.tiles_per_row = static_cast<unsigned>((units + threads - 1) / threads);
    job.chunks = make_chunks(job.rows, job.num_chunks > 0 ? job.num_chunks : 1);
}

// A tile is a piece of one row, a unit per thread: packs first, then what is left of the row, one element each.  A
// block's tiles go up the rows, so that it meets the chunks in order.  Steps instead of 64-bit divisions: those are
// function calls, across which registers would be spilled.
template <typename In, typename Out>
TPK_DEVICE void reduce_rows(const Group& group, const Reduction<In, Out>& job) {
    constexpr int kCount = kReducePack<In, Out>;
    const std::int64_t packs = job.vectors ? job.columns / kCount : 0;
    const std::int64_t units = packs + (job.columns - packs * kCount);
    const unsigned tiles_per_row = job.tiles_per_row;
    const Signal current = group.state->current;
    const std::uint64_t others = ~(std::uint64_t{1} << group.rank);
    if (any_of_block(has_failed(group))) return;
    if (tiles_per_row != 0) {
        const unsigned row_step = num_blocks() / tiles_per_row, tile_step = num_blocks() % tiles_per_row;
        std::int64_t row = block_index() / tiles_per_row;
        unsigned tile = block_index() % tiles_per_row;
        int chunk = -1;
        while (row < job.rows) {
            bool next = false;
            for (; chunk + 1 < job.num_chunks && job.chunks.begin(chunk + 1) <= row; next = true) ++chunk;
            if (next && !wait_chunk_of_block(group, current, others, chunk, job.op)) return;
            const std::int64_t unit = static_cast<std::int64_t>(tile) * num_threads() + thread_index();
            if (unit < packs) {
                reduce_at<In, Out, kCount>(group, job, row, unit * kCount);
            } else if (unit < units) {
                reduce_at<In, Out, 1>(group, job, row, packs * kCount + (unit - packs));
            }
            row += row_step;
            tile += tile_step;
            if (tile >= tiles_per_row) {
                tile -= tiles_per_row;
                ++row;
            }
        }
    }
    // Chunks without rows, and those of other blocks: a rank has heard of every peer before its call ends.
    if (job.num_chunks > 0 && block_index() == 0)
        wait_chunk_of_block(group, current, others, job.num_chunks - 1, job.op);
    check_peers_of_block(group, current, job.op);
}

template <typename In, typename Out>
TPK_KERNEL_OF(kReduceThreads)
reduce(TPK_ARGUMENT Group group, TPK_ARGUMENT Reduction<In, Out> job) {
    reduce_rows(group, job);
}

}  // namespace tpk
