// All-reduce in one kernel and two steps, for data that is too much to send to everybody: each rank sums its share of
// what all have, then everybody gets everybody's sums.
#pragma once

#include "cuda/one_shot_kernels.h"

namespace tpk {

// A slot is two rows of parts, one for each rank, `slot_elements` apart: partials for the owner of the slot, by who sent
// them, then sums for it, by who made them.  `shares` cut a part, not the whole.
template <typename T>
struct TwoShot : AllReduce<T> {};

// Each block has two signals per call: that its partials are there, and that its sums are.
constexpr int kMaxTwoShotBlocks = kMaxChunks / 2;

// Rank r owns elements [r, r + 1) * slot_elements, as far as there are any.
template <typename T>
void plan_parts(TwoShot<T>& job, int world_size) {
    const std::int64_t packs = (job.elements + kPack<T> - 1) / kPack<T>;
    job.slot_elements = (packs + world_size - 1) / world_size * kPack<T>;
}

// All threads of the block: calls at(Width, element, its place in the part) for this block's share of `owner`'s part.
template <typename T, typename At>
TPK_DEVICE void for_each_of_part(const TwoShot<T>& job, int owner, const At& at) {
    const int block = static_cast<int>(block_index());
    const std::int64_t first = owner * job.slot_elements;
    const std::int64_t begin = first + job.shares.begin(block) * kPack<T>;
    const std::int64_t end = first + job.shares.begin(block + 1) * kPack<T>;
    for_each_unit<T>(begin, clipped(begin, end, job.elements), job.vectors,
                     [&](auto width, std::int64_t element) { at(width, element, element - first); });
}

template <typename T, int kCount>
TPK_DEVICE void sum_and_push_at(const Group& group, const TwoShot<T>& job, std::int64_t element, std::int64_t place) {
    const auto at = [&](int rank) {
        return rank == group.rank ? job.x + element : job.slots[group.rank] + rank * job.slot_elements + place;
    };
    const T* const bias = job.bias == nullptr ? nullptr : job.bias + static_cast<std::uint32_t>(element) % job.columns;
    const Pack<T, kCount> sum = sum_over_ranks<T, T, kCount>(group.world_size, at, bias);
    store_pack(job.out + element, sum);
    const std::int64_t there = (group.world_size + group.rank) * job.slot_elements + place;
    if constexpr (kCount > 1) {
        if (kHasMulticast && job.multicast != nullptr) return multicast_pack(job.multicast + there, sum);
    }
    for (int step = 1; step < group.world_size; ++step) {
        store_pack(job.slots[peer_after(group.rank, group.world_size, step)] + there, sum);
    }
}

// As in exchange_share, a block is a call of its own on its share of every part, and no block waits for another one of
// its rank.  The alias fences are around the multicast stores, which are those of the second step.
template <typename T>
TPK_KERNEL_OF(kReduceThreads)
all_reduce_two_shot(TPK_ARGUMENT Group group, TPK_ARGUMENT TwoShot<T> job) {
    const Signal current = make_signal(epoch_of(group.state->current) + 1, job.fingerprint);
    const std::uint64_t others = ~(std::uint64_t{1} << group.rank);
    const int partials = static_cast<int>(block_index()), sums = kMaxTwoShotBlocks + partials;
    const bool multicasts = kHasMulticast && job.multicast != nullptr;
    if (partials == 0) arrive_of_block(group, current);
    if (!wait_slot_of_block(group, current, job.slot, job.op)) return;

    for (int step = 1; step < group.world_size; ++step) {
        const int owner = peer_after(group.rank, group.world_size, step);
        T* const to = job.slots[owner] + group.rank * job.slot_elements;
        for_each_of_part<T>(job, owner, [&](auto width, std::int64_t element, std::int64_t place) {
            store_pack(to + place, load_pack<T, decltype(width)::count>(job.x + element));
        });
    }
    signal_chunk_of_block(group, current, others, partials);
    if (!wait_chunk_of_block(group, current, others, partials, job.op)) return;

    if (multicasts) fence_aliases();
    for_each_of_part<T>(job, group.rank, [&](auto width, std::int64_t element, std::int64_t place) {
        sum_and_push_at<T, decltype(width)::count>(group, job, element, place);
    });
    if (multicasts) fence_aliases();
    signal_chunk_of_block(group, current, others, sums);
    if (!wait_chunk_of_block(group, current, others, sums, job.op)) return;

    for (int step = 1; step < group.world_size; ++step) {
        const int owner = peer_after(group.rank, group.world_size, step);
        const T* const from = job.slots[group.rank] + (group.world_size + owner) * job.slot_elements;
        for_each_of_part<T>(job, owner, [&](auto width, std::int64_t element, std::int64_t place) {
            store_pack(job.out + element, load_pack<T, decltype(width)::count>(from + place));
        });
    }
    leave_of_block(group, current, job.slot, job.op);
}

}  // namespace tpk
