// One-shot all-reduce: every rank pushes all it has to every peer, and every rank sums everything.  For small tensors,
// where one exchange of signals costs more than W times the bytes.
#pragma once

#include "common/schedule.h"
#include "cuda/numbers.h"
#include "cuda/protocol.h"

namespace tpk {

template <typename T>
struct AllReduce {
    const T* x;
    const T* bias;
    T* out;
    std::int64_t elements;
    unsigned columns;
    Chunks shares;               // of the blocks, in packs
    T* slots[kMaxRanks];         // every rank's slot; source r writes at r * slot_elements
    std::int64_t slot_elements;  // a multiple of 16 bytes
    std::uint32_t fingerprint;
    int slot;
    int op;
    bool vectors;  // x, out (and, with a bias, that and its columns) allow packs
};

template <typename T, int kCount>
TPK_DEVICE void push_at(const Group& group, const AllReduce<T>& job, std::int64_t element) {
    const Pack<T, kCount> mine = load_pack<T, kCount>(job.x + element);
    for (int step = 1; step < group.world_size; ++step) {
        const int peer = peer_after(group.rank, group.world_size, step);
        store_pack(job.slots[peer] + group.rank * job.slot_elements + element, mine);
    }
}

template <typename T, int kCount>
TPK_DEVICE void sum_at(const Group& group, const AllReduce<T>& job, std::int64_t element) {
    const auto at = [&](int rank) {
        return rank == group.rank ? job.x + element : job.slots[group.rank] + rank * job.slot_elements + element;
    };
    const T* const bias = job.bias == nullptr ? nullptr : job.bias + static_cast<std::uint32_t>(element) % job.columns;
    store_pack(job.out + element, sum_over_ranks<T, T, kCount>(group.world_size, at, bias));
}

// Elements of the one-shot all-reduce: 64-bit division would be a function call.  Larger ones are not for one shot.
constexpr std::int64_t kMaxAllReduceElements = std::int64_t{1} << 31;

template <typename T>
void plan_shares(AllReduce<T>& job, int blocks) {
    constexpr int kCount = 16 / static_cast<int>(sizeof(T));
    job.shares = make_chunks((job.elements + kCount - 1) / kCount, blocks);
}

// Each block is a call of its own on its share of the elements, which is the same on every rank: it pushes, signals
// chunk `block`, waits for that chunk of the peers, and sums.  No block waits for another one of its rank.
template <typename T>
TPK_DEVICE void all_reduce_share(const Group& group, const AllReduce<T>& job) {
    constexpr int kCount = 16 / static_cast<int>(sizeof(T));
    const Signal current = make_signal(epoch_of(group.state->current) + 1, job.fingerprint);
    const std::uint64_t others = ~(std::uint64_t{1} << group.rank);
    const int chunk = static_cast<int>(block_index());
    if (block_index() == 0) arrive_of_block(group, current);
    if (!wait_slot_of_block(group, current, job.slot, job.op)) return;

    const std::int64_t begin = job.shares.begin(chunk) * kCount;
    const std::int64_t past = job.shares.begin(chunk + 1) * kCount;
    const std::int64_t end = past < job.elements ? past : job.elements;
    const std::int64_t packs = job.vectors ? (end - begin) / kCount : 0;
    const std::int64_t units = packs + (end - begin - packs * kCount);
    for (std::int64_t unit = thread_index(); unit < units; unit += num_threads()) {
        if (unit < packs) {
            push_at<T, kCount>(group, job, begin + unit * kCount);
        } else {
            push_at<T, 1>(group, job, begin + packs * kCount + (unit - packs));
        }
    }
    signal_chunk_of_block(group, current, others, chunk);
    if (!wait_chunk_of_block(group, current, others, chunk, job.op)) return;
    for (std::int64_t unit = thread_index(); unit < units; unit += num_threads()) {
        if (unit < packs) {
            sum_at<T, kCount>(group, job, begin + unit * kCount);
        } else {
            sum_at<T, 1>(group, job, begin + packs * kCount + (unit - packs));
        }
    }

    check_peers_of_block(group, current, job.op);

    // The last block to leave makes this call the current one: until then others may yet read the number of the last.
    // All threads of this block have read it before the barriers above.
    if (thread_index() != 0 || fetch_add_device(&group.state->leaving, 1) != num_blocks() - 1) return;
    group.state->leaving = 0;
    group.state->last_use[job.slot] = epoch_of(current);
    group.state->current = current;
}

template <typename T>
TPK_KERNEL_OF(kReduceThreads)
all_reduce(TPK_ARGUMENT Group group, TPK_ARGUMENT AllReduce<T> job) {
    all_reduce_share(group, job);
}

}  // namespace tpk
