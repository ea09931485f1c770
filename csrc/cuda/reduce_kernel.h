// The reducer: sums the ranks' partials as their chunks come.
#pragma once

#include <algorithm>

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
    Chunks chunks;       // of the rows
    int num_chunks;      // 0: everything is there
    std::int64_t steps;  // see plan_strips
    unsigned strip, strips_per_row;
    int op;
    bool vectors;  // all pointers and strides are multiples of 16 bytes
};

// Elements that a thread sums at once: 16 bytes of the narrower type.
template <typename In, typename Out>
constexpr int kReducePack = 16 / static_cast<int>(sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));

// Threads of a block, and strips that each of its warps works on at once: there are few blocks, so each must have many
// loads on their way, and warps enough that some load while others add.  A block that waits leaves room for a warp of
// another kernel (tests/cuda/test_residency.py); so 30 warps of 64 registers a thread, and not 32.  On an H200, of the
// bandwidth of a copy: 512 threads with one pack each 40 to 72 % (benchmarks/results, first-reducer), 30 warps with two
// strips each 64 to 98 % (benchmarks/README.md).
constexpr int kSumThreads = 960;

template <typename In, typename Out>
constexpr int kReducePlaces = sizeof(Pack<In, kReducePack<In, Out>>) > 16 ? 1 : 2;

// Where a thread's elements of one strip begin, if it has any there.
struct Place {
    std::int64_t row, column;
    bool inside;
};

// Sums `kCount` elements at each place over all ranks, and adds the bias if there is one: fp32, in rank order, rounded
// once.  The loads of all places and of two ranks go out together; the order of the additions does not depend on that.
template <typename In, typename Out, int kCount, int kPlaces>
TPK_DEVICE void reduce_at(const Group& group, const Reduction<In, Out>& job, const Place (&places)[kPlaces]) {
    constexpr int kBatch = 2;
    float sum[kPlaces][kCount];
    TPK_UNROLL
    for (int p = 0; p < kPlaces; ++p) {
        TPK_UNROLL
        for (int i = 0; i < kCount; ++i) sum[p][i] = -0.0f;  // which changes no bit of what is added to it
    }
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
                for (int i = 0; i < kCount; ++i) sum[p][i] = add(sum[p][i], widen(part[j][p].element[i]));
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

// Decides the job's chunks and strips from the rest of it; returns the blocks of its grid, so many at most.  A block has
// one thread, or whole warps.
template <typename In, typename Out>
int plan_strips(Reduction<In, Out>& job, int threads, int most_blocks) {
    const std::int64_t packs = job.vectors ? job.columns / kReducePack<In, Out> : 0;
    const std::int64_t units = packs + (job.columns - packs * kReducePack<In, Out>);
    job.strip = threads < kStrip ? threads : kStrip;
    job.strips_per_row = static_cast<unsigned>((units + job.strip - 1) / job.strip);
    const std::int64_t strips = job.rows * job.strips_per_row, of_block = static_cast<unsigned>(threads) / job.strip;
    const std::int64_t blocks = std::clamp<std::int64_t>((strips + of_block - 1) / of_block, 1, most_blocks);
    job.steps = (strips + blocks * of_block - 1) / (blocks * of_block);
    job.chunks = make_chunks(job.rows, job.num_chunks > 0 ? job.num_chunks : 1);
    return static_cast<int>(blocks);
}

// Where a strip is: so many strips after the first one of the first row, and then `per_step` further each time.  Steps
// instead of 64-bit divisions: those are function calls, across which registers would be spilled.
struct Strip {
    std::int64_t row;
    unsigned place;  // in its row

    TPK_DEVICE Strip(unsigned number, unsigned strips_per_row)
        : row(number / strips_per_row), place(number % strips_per_row) {}

    TPK_DEVICE void advance(unsigned per_step, unsigned strips_per_row) {
        row += per_step / strips_per_row;
        place += per_step % strips_per_row;
        if (place >= strips_per_row) {
            place -= strips_per_row;
            ++row;
        }
    }
};

// A strip is a piece of one row, a unit per thread of a warp: packs first, then what is left of the row, one element
// each.  The strips of a step lie side by side, a warp of the grid each, so that a block goes up the rows and meets the
// chunks in order.
template <typename In, typename Out>
TPK_DEVICE void reduce_rows(const Group& group, const Reduction<In, Out>& job) {
    constexpr int kCount = kReducePack<In, Out>, kPlaces = kReducePlaces<In, Out>;
    const std::int64_t packs = job.vectors ? job.columns / kCount : 0;
    const std::int64_t units = packs + (job.columns - packs * kCount);
    const Signal current = group.state->current;
    const std::uint64_t others = ~(std::uint64_t{1} << group.rank);
    if (any_of_block(has_failed(group))) return;
    if (job.strips_per_row != 0) {
        const unsigned of_block = num_threads() / job.strip, per_step = num_blocks() * of_block;
        const unsigned warp = thread_index() / job.strip, lane = thread_index() % job.strip;
        Strip own(block_index() * of_block + warp, job.strips_per_row);
        Strip last(block_index() * of_block + of_block - 1, job.strips_per_row);  // of the block: all threads agree
        int chunk = -1;
        for (std::int64_t step = 0; step < job.steps;) {
            bool next = false;
            for (; chunk + 1 < job.num_chunks && job.chunks.begin(chunk + 1) <= last.row; next = true) ++chunk;
            if (next && !wait_chunk_of_block(group, current, others, chunk, job.op)) return;
            // Strips of rows that have come; those of a later chunk are waited for when these are stored.
            const bool has_all = chunk + 1 >= job.num_chunks;
            const std::int64_t end = has_all ? job.rows : job.chunks.begin(chunk + 1);
            Place places[kPlaces];
            TPK_UNROLL
            for (int p = 0; p < kPlaces; ++p) {
                const bool has_come = step < job.steps && (has_all || last.row < end);
                const std::int64_t unit = static_cast<std::int64_t>(own.place) * job.strip + lane;
                const bool is_there = has_come && own.row < job.rows && unit < units;
                places[p] = {own.row, unit * kCount, is_there && unit < packs};
                const Place element[1] = {{own.row, packs * kCount + (unit - packs), is_there && unit >= packs}};
                if (element[0].inside) reduce_at<In, Out, 1, 1>(group, job, element);
                if (!has_come) continue;
                own.advance(per_step, job.strips_per_row);
                last.advance(per_step, job.strips_per_row);
                ++step;
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
TPK_KERNEL_OF(kSumThreads)
reduce(TPK_ARGUMENT Group group, TPK_ARGUMENT Reduction<In, Out> job) {
    reduce_rows(group, job);
}

}  // namespace tpk
