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

// Tiles that a thread works on at once: there are few blocks, so each must have many loads on their way.  On an H200
// one tile at a time reached 40 % of the bandwidth of a copy with two ranks, and 65 % with eight.
template <typename In, typename Out>
constexpr int kReducePlaces = sizeof(Pack<In, kReducePack<In, Out>>) > 16 ? 2 : 3;

// Where a thread's elements of one tile begin, if it has any there.
struct Place {
    std::int64_t row, column;
    bool inside;
};

// Sums `kCount` elements at each place over all ranks, and adds the bias if there is one: fp32, in rank order, rounded
// once.  The loads of all places and of two ranks go out together; the order of the additions does not depend on that.
template <typename In, typename Out, int kCount, int kPlaces>
TPK_DEVICE void reduce_at(const Group& group, const Reduction<In, Out>& job, const Place (&places)[kPlaces]) {
    constexpr int kBatch = 2;
    float sum[kPlaces][kCount] = {};
    TPK_DO_NOT_UNROLL
    for (int first = 0; first < group.world_size; first += kBatch) {
        Pack<In, kCount> part[kBatch][kPlaces] = {};
        TPK_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (first + j >= group.world_size) break;
            const In* const base = job.parts[first + j];
            const std::int64_t stride = job.strides[first + j];
            TPK_UNROLL
            for (int p = 0; p < kPlaces; ++p) {
                const Place at = places[p];
                if (at.inside) part[j][p] = load_pack<In, kCount>(base + at.row * stride + at.column);
            }
        }
        TPK_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (first + j >= group.world_size) break;
            TPK_UNROLL
            for (int p = 0; p < kPlaces; ++p) {
                TPK_UNROLL
                for (int i = 0; i < kCount; ++i) {
                    const float value = widen(part[j][p].element[i]);
                    sum[p][i] = first + j == 0 ? value : add(sum[p][i], value);  // 0 + -0 is not -0
                }
            }
        }
    }
    TPK_UNROLL
    for (int p = 0; p < kPlaces; ++p) {
        const Place at = places[p];
        if (!at.inside) continue;
        Pack<Out, kCount> rounded;
        TPK_UNROLL
        for (int i = 0; i < kCount; ++i) {
            if (job.bias != nullptr) sum[p][i] = add(sum[p][i], widen(job.bias[at.column + i]));
            narrow(sum[p][i], rounded.element[i]);
        }
        store_pack(job.out + at.row * job.out_stride + at.column, rounded);
    }
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
    constexpr int kCount = kReducePack<In, Out>, kPlaces = kReducePlaces<In, Out>;
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
            // Tiles of rows that have come; rows of a later chunk are waited for when these are stored.
            const std::int64_t end = job.num_chunks > 0 ? job.chunks.begin(chunk + 1) : job.rows;
            Place places[kPlaces];
            TPK_UNROLL
            for (int p = 0; p < kPlaces; ++p) {
                const bool has_come = row < end;
                const std::int64_t unit = static_cast<std::int64_t>(tile) * num_threads() + thread_index();
                places[p] = {row, unit * kCount, has_come && unit < packs};
                const Place element[1] = {
                    {row, packs * kCount + (unit - packs), has_come && unit >= packs && unit < units}};
                if (element[0].inside) reduce_at<In, Out, 1, 1>(group, job, element);
                if (!has_come) continue;
                row += row_step;
                tile += tile_step;
                if (tile >= tiles_per_row) {
                    tile -= tiles_per_row;
                    ++row;
                }
            }
            reduce_at<In, Out, kCount, kPlaces>(group, job, places);
        }
    }
    // Chunks without rows, and those of other blocks: a rank has heard of every peer before its call ends.
    if (job.num_chunks > 0 && block_index() == 0)
        wait_chunk_of_block(group, current, others, job.num_chunks - 1, job.op);
    check_peers_of_block(group, current, job.op);
}

template <typename In, typename Out>
TPK_KERNEL_ALONE(kReduceThreads)
reduce(TPK_ARGUMENT Group group, TPK_ARGUMENT Reduction<In, Out> job) {
    reduce_rows(group, job);
}

}  // namespace tpk
