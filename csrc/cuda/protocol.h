// The protocol of a call between GPUs: what lies in memory, how a rank signals, how it waits, how it fails.
//
// csrc/cuda/README.md is the specification.  One Group describes one rank's end; its calls run on one stream, in order.
// Assumes that pads and State were zeroed (or all set to one epoch) before any rank's first call.
#pragma once

#include "common/signals.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace tpk {

constexpr int kMaxRanks = TPK_MAX_RANKS;
constexpr int kMaxChunks = TPK_MAX_CHUNKS;
constexpr int kSlots = TPK_SLOTS;

// A signal: the number of the call, and the fingerprint of what the sender takes that call to be.  One 64-bit word, so
// that both arrive together.
using Signal = std::uint64_t;
TPK_DEVICE Signal make_signal(Epoch epoch, std::uint32_t fingerprint) {
    return static_cast<Signal>(fingerprint) << 32 | epoch;
}
TPK_DEVICE Epoch epoch_of(Signal signal) { return static_cast<Epoch>(signal); }
TPK_DEVICE std::uint32_t fingerprint_of(Signal signal) { return static_cast<std::uint32_t>(signal >> 32); }

// Words of a signal pad.  Each but the first has one writer.
constexpr int kPoison = 0;                    // 1 + rank of (one of) those who failed; written by anybody, once
constexpr int kArrived = 16;                  // [source]: the call that the source has begun
constexpr int kChunk = kArrived + kMaxRanks;  // [source][chunk]: the call whose chunk is there
constexpr int kPadWords = kChunk + kMaxRanks * kMaxChunks;
static_assert(kPadWords * sizeof(Signal) == TPK_PAD_BYTES);

TPK_DEVICE constexpr int arrived_word(int source) { return kArrived + source; }
TPK_DEVICE constexpr int chunk_word(int source, int chunk) { return kChunk + source * kMaxChunks + chunk; }

// This rank's own memory, on its device.  Only kernels of this rank touch it.
struct alignas(16) State {
    std::uint32_t raised;  // what a raised flag of this call holds; always the same, so that a graph may bake it in
    std::uint32_t unused;
    std::uint32_t failed;    // 1 once a wait of this rank has failed; terminal
    std::uint32_t leaving;   // blocks of the running kernel that are done
    Signal current;          // the call that this rank is in
    Epoch last_use[kSlots];  // the last call that used each slot
};
static_assert(sizeof(State) == TPK_STATE_BYTES);

// Host memory that this rank's kernels write: the first failure.  The host may read it while kernels run.
using Failure = tpk_failure;

struct Group {
    int rank;
    int world_size;
    Signal* pads[kMaxRanks];  // every rank's signal pad, as this rank addresses it
    State* state;
    Failure* failure;
    std::uint64_t* alarm;  // null, or not 0 once another kernel of this rank has given up
    std::uint64_t timeout_ns;
};

// What a side stream does between two copies: tells who gets what was copied, then waits for what comes next.  Sets of
// ranks have a bit per rank; the flag of rank r is flags[r * flag_stride].
struct Relay {
    std::uint64_t signal_peers, wait_peers, wait_ranks;
    const std::uint32_t* flags;
    int flag_stride;
    int signal_chunk, wait_chunk;
    int op;
};

// What a kernel waits for, in the words of the error.
struct Awaited {
    int op;
    int peer;
    int chunk;  // -1: the peer's arrival
};

TPK_DEVICE bool has_failed(const Group& group) { return load_relaxed_device(&group.state->failed) != 0; }

// Keeps the first failure of this rank, and tells the peers.  The claim is in device memory because not every system
// lets a GPU do atomics on host memory.
TPK_DEVICE void fail(const Group& group, int kind, Awaited awaited, Signal current, Epoch expected, Signal got,
                     std::uint64_t waited_ns) {
    if (!claim_device(&group.state->failed)) return;
    Failure* const failure = group.failure;
    failure->kind = kind;
    failure->rank = group.rank;
    failure->op = awaited.op;
    failure->peer = awaited.peer;
    failure->chunk = awaited.chunk;
    failure->epoch = epoch_of(current);
    failure->expected = expected;
    failure->got = epoch_of(got);
    failure->fingerprint = fingerprint_of(got);
    failure->waited_ns = waited_ns;
    store_release_system(&failure->state, 1u);
    if (group.alarm != nullptr && load_relaxed_system(group.alarm) == 0)
        store_release_system(group.alarm, std::uint64_t{1});
    for (int peer = 0; peer < group.world_size; ++peer) {
        store_release_system(group.pads[peer] + kPoison, static_cast<Signal>(group.rank + 1));
    }
}

// Waits until the word has reached `target`; false if the group has failed, or fails here: after timeout_ns, on a
// peer's poison, on an alarm, or because the peer takes call `current` for another one.  What was written before the
// signal may be read afterwards: by this thread, and by the block after its next barrier. A Word is a Signal or,
// between kernels of one rank, a flag.
template <typename Word>
TPK_DEVICE bool wait_word(const Group& group, const Word* word, Epoch target, Signal current, Awaited awaited) {
    std::uint64_t begin = 0;
    for (unsigned polls = 1;; ++polls) {
        const Word seen = load_acquire_system(word);
        if (reached(epoch_of(seen), target)) {
            if (sizeof(Word) != sizeof(Signal) || epoch_of(seen) != epoch_of(current) || seen == current) return true;
            fail(group, TPK_MISMATCH, awaited, current, target, seen, 0);
            return false;
        }
        if (polls % 16 != 0) continue;
        if (has_failed(group)) return false;
        const std::uint64_t now = time_ns();
        if (begin == 0) begin = now;
        if (const Signal poison = load_relaxed_system(group.pads[group.rank] + kPoison)) {
            awaited.peer = static_cast<int>(poison) - 1;
            fail(group, TPK_POISONED, awaited, current, target, seen, now - begin);
            return false;
        }
        if (group.alarm != nullptr && load_relaxed_system(group.alarm) != 0) {
            fail(group, TPK_ALARM, awaited, current, target, seen, now - begin);
            return false;
        }
        if (now - begin >= group.timeout_ns) {
            fail(group, TPK_TIMEOUT, awaited, current, target, seen, now - begin);
            return false;
        }
        pause();
    }
}

// All threads of the block: chunk `chunk` of every peer in `sources` (bit per rank) is there.  False for all if not.
TPK_DEVICE bool wait_chunk_of_block(const Group& group, Signal current, std::uint64_t sources, int chunk, int op) {
    bool failed = false;
    for (int peer = static_cast<int>(thread_index()); peer < group.world_size;
         peer += static_cast<int>(num_threads())) {
        if ((sources >> peer & 1) == 0) continue;
        const Signal* const word = group.pads[group.rank] + chunk_word(peer, chunk);
        if (!wait_word(group, word, epoch_of(current), current, {op, peer, chunk})) failed = true;
    }
    return !any_of_block(failed);
}

// All threads of the block: tell the peers in `targets` that chunk `chunk` of this rank is there.  The barrier makes
// what the whole block wrote part of what each signal releases.
TPK_DEVICE void signal_chunk_of_block(const Group& group, Signal current, std::uint64_t targets, int chunk) {
    sync_block();
    for (int peer = static_cast<int>(thread_index()); peer < group.world_size;
         peer += static_cast<int>(num_threads())) {
        if (targets >> peer & 1) store_release_system(group.pads[peer] + chunk_word(group.rank, chunk), current);
    }
}

// All threads of the block: every peer is done with slot `slot`, which it read last in call last_use.
TPK_DEVICE bool wait_slot_of_block(const Group& group, Signal current, int slot, int op) {
    const Epoch free = group.state->last_use[slot] + 1;
    bool failed = has_failed(group);
    for (int peer = static_cast<int>(thread_index()); peer < group.world_size;
         peer += static_cast<int>(num_threads())) {
        const Signal* const word = group.pads[group.rank] + arrived_word(peer);
        if (!wait_word(group, word, free, current, {op, peer, -1})) failed = true;
    }
    return !any_of_block(failed);
}

// All threads of the block: tell every rank that this one has begun `current`, so has read all it will of earlier
// calls.
TPK_DEVICE void arrive_of_block(const Group& group, Signal current) {
    for (int peer = static_cast<int>(thread_index()); peer < group.world_size;
         peer += static_cast<int>(num_threads())) {
        store_release_system(group.pads[peer] + arrived_word(group.rank), current);
    }
}

// All threads of the block, after their last read of slots: fails if a peer has.  A rank that has failed can not call
// back the copies that it has enqueued, and those may have overwritten what was read here; its poison came before them.
TPK_DEVICE void check_peers_of_block(const Group& group, Signal current, int op) {
    sync_block();
    if (thread_index() != 0) return;
    const Signal poison = load_acquire_system(group.pads[group.rank] + kPoison);
    if (poison == 0) return;
    fail(group, TPK_POISONED, {op, static_cast<int>(poison) - 1, -1}, current, epoch_of(current), poison, 0);
}

}  // namespace tpk
