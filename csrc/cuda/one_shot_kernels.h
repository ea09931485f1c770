// Calls in one kernel: every rank pushes what it has to every peer, waits for theirs, and finishes from its own slot.
// All-reduce, for little data: one exchange of signals costs more than W times the bytes.  All-gather, where one store
// reaches all ranks.
#pragma once

#include "common/schedule.h"
#include "cuda/numbers.h"
#include "cuda/protocol.h"

namespace tpk {

// The exchange, whatever it is for.  Rank r's contribution goes to r * slot_elements of every rank's slot.
template <typename T>
struct OneShot {
    T* slots[kMaxRanks];         // every rank's slot
    T* multicast;                // the multicast address of the slots, or null: then peers are stored to one by one
    std::int64_t slot_elements;  // a multiple of 16 bytes, at least the largest contribution
    Chunks shares;               // of the blocks, in units of the largest contribution
    std::int64_t unit;           // so many elements: a pack, or a row
    std::uint32_t fingerprint;
    int slot;
    int op;
};

template <typename T>
struct AllReduce : OneShot<T> {
    const T* x;
    const T* bias;
    T* out;
    std::int64_t elements;
    unsigned columns;
    bool vectors;  // x, out (and, with a bias, that and its columns) allow packs
};

template <typename T>
struct AllGather : OneShot<T> {
    const T* x;
    T* out;
    std::int64_t starts[kMaxRanks + 1];  // of each rank's elements in `out`; the last one is their number
};

// Elements of the one-shot all-reduce: 64-bit division would be a function call.  Larger ones are not for one shot.
constexpr std::int64_t kMaxAllReduceElements = std::int64_t{1} << 31;

template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// The largest contribution has `elements` elements.
template <typename T>
void plan_shares(OneShot<T>& job, std::int64_t elements, int blocks) {
    job.unit = kPack<T>;
    job.shares = make_chunks((elements + kPack<T> - 1) / kPack<T>, blocks);
}

// Tells an `at` how many elements it is for.
template <int kCount>
struct Width {
    static constexpr int count = kCount;
};

// All threads of the block: calls at(Width, element) for each pack, if `vectors`, and each element that is left of
// [begin, end); begin is a multiple of a pack.
template <typename T, typename At>
TPK_DEVICE void for_each_unit(std::int64_t begin, std::int64_t end, bool vectors, const At& at) {
    const std::int64_t packs = vectors ? (end - begin) / kPack<T> : 0;
    const std::int64_t units = packs + (end - begin - packs * kPack<T>);
    for (std::int64_t unit = thread_index(); unit < units; unit += num_threads()) {
        if (unit < packs) {
            at(Width<kPack<T>>{}, begin + unit * kPack<T>);
        } else {
            at(Width<1>{}, begin + packs * kPack<T> + (unit - packs));
        }
    }
}

// Part of x to this rank's part of every slot.  A multicast store reaches this rank's own slot as well, where nobody
// looks.  Less than 16 bytes are no multicast store, so rows that are not aligned travel as before.
template <typename T, int kCount>
TPK_DEVICE void push_at(const Group& group, const OneShot<T>& job, const T* x, std::int64_t element) {
    const Pack<T, kCount> mine = load_pack<T, kCount>(x + element);
    const std::int64_t place = group.rank * job.slot_elements + element;
    if constexpr (kCount > 1) {
        if (kHasMulticast && job.multicast != nullptr) return multicast_pack(job.multicast + place, mine);
    }
    for (int step = 1; step < group.world_size; ++step) {
        store_pack(job.slots[peer_after(group.rank, group.world_size, step)] + place, mine);
    }
}

// All threads of the block, after its last read: the last block to come makes the call the current one.
TPK_DEVICE void leave_of_block(const Group& group, Signal current, int slot, int op) {
    check_peers_of_block(group, current, op);
    // Until the last block others may yet read the number of the last call.  All threads of this block have read it
    // before the barriers of its waits.
    if (thread_index() != 0 || fetch_add_device(&group.state->leaving, 1) != num_blocks() - 1) return;
    group.state->leaving = 0;
    group.state->last_use[slot] = epoch_of(current);
    group.state->current = current;
}

// Each block is a call of its own on its share [begin, end) of every contribution, which is the same on every rank: it
// pushes, signals chunk `block`, waits for that chunk of the peers, and finishes.  No block waits for another one of its
// rank.
//
// A slot has two addresses then: stores go through the multicast one, loads (of this call, and of what lay there before)
// through its own.  Accesses of one memory through two addresses are ordered only by an alias fence between them; here it
// is before the first and behind the last multicast store, so peers need not know who multicasts.
template <typename T, typename Push, typename Finish>
TPK_DEVICE void exchange_share(const Group& group, const OneShot<T>& job, const Push& push, const Finish& finish) {
    const Signal current = make_signal(epoch_of(group.state->current) + 1, job.fingerprint);
    const std::uint64_t others = ~(std::uint64_t{1} << group.rank);
    const int block = static_cast<int>(block_index());
    const std::int64_t begin = job.shares.begin(block) * job.unit, end = job.shares.begin(block + 1) * job.unit;
    const bool multicasts = kHasMulticast && job.multicast != nullptr;
    if (block == 0) arrive_of_block(group, current);
    if (!wait_slot_of_block(group, current, job.slot, job.op)) return;

    if (multicasts) fence_aliases();
    push(begin, end);
    if (multicasts) fence_aliases();
    signal_chunk_of_block(group, current, others, block);
    if (!wait_chunk_of_block(group, current, others, block, job.op)) return;
    finish(begin, end);

    leave_of_block(group, current, job.slot, job.op);
}

// The end of what a share has of a contribution of so many elements; begin, if that is nothing.
TPK_DEVICE std::int64_t clipped(std::int64_t begin, std::int64_t end, std::int64_t elements) {
    return end < elements ? end : begin < elements ? elements : begin;
}

template <typename T, int kCount>
TPK_DEVICE Pack<T, kCount> summed_at(const Group& group, const AllReduce<T>& job, std::int64_t element) {
    const auto at = [&](int rank) {
        return rank == group.rank ? job.x + element : job.slots[group.rank] + rank * job.slot_elements + element;
    };
    const T* const bias = job.bias == nullptr ? nullptr : job.bias + static_cast<std::uint32_t>(element) % job.columns;
    return sum_over_ranks<T, T, kCount>(group.world_size, at, bias);
}

template <typename T, int kCount>
TPK_DEVICE void sum_at(const Group& group, const AllReduce<T>& job, std::int64_t element) {
    store_pack(job.out + element, summed_at<T, kCount>(group, job, element));
}

template <typename T>
TPK_KERNEL_OF(kReduceThreads)
all_reduce(TPK_ARGUMENT Group group, TPK_ARGUMENT AllReduce<T> job) {
    const auto push = [&](std::int64_t begin, std::int64_t end) {
        for_each_unit<T>(begin, clipped(begin, end, job.elements), job.vectors,
                         [&](auto width, std::int64_t i) { push_at<T, decltype(width)::count>(group, job, job.x, i); });
    };
    const auto finish = [&](std::int64_t begin, std::int64_t end) {
        for_each_unit<T>(begin, clipped(begin, end, job.elements), job.vectors,
                         [&](auto width, std::int64_t i) { sum_at<T, decltype(width)::count>(group, job, i); });
    };
    exchange_share(group, job, push, finish);
}

// T says how wide elements are, not what they are.
template <typename T>
TPK_KERNEL_OF(kReduceThreads)
all_gather(TPK_ARGUMENT Group group, TPK_ARGUMENT AllGather<T> job) {
    const auto count = [&](int rank) { return job.starts[rank + 1] - job.starts[rank]; };
    const auto push = [&](std::int64_t begin, std::int64_t end) {
        const auto at = [&](auto width, std::int64_t i) { push_at<T, decltype(width)::count>(group, job, job.x, i); };
        for_each_unit<T>(begin, clipped(begin, end, count(group.rank)), is_aligned(job.x), at);
    };
    const auto finish = [&](std::int64_t begin, std::int64_t end) {
        for (int step = 0; step < group.world_size; ++step) {
            const int rank = step == 0 ? group.rank : peer_after(group.rank, group.world_size, step);
            const T* const from = step == 0 ? job.x : job.slots[group.rank] + rank * job.slot_elements;
            T* const to = job.out + job.starts[rank];
            const auto at = [&](auto width, std::int64_t i) {
                constexpr int kCount = decltype(width)::count;
                store_pack(to + i, load_pack<T, kCount>(from + i));
            };
            for_each_unit<T>(begin, clipped(begin, end, count(rank)), is_aligned(from) && is_aligned(to), at);
        }
    };
    exchange_share(group, job, push, finish);
}

}  // namespace tpk
