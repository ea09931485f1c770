// Layout of a group's control segment: who is how far, what each rank is doing, and the first failure.
//
// One segment per group, made by rank 0, mapped writable by all ranks.  Every field has one writer except `sleepers`
// and the claim of the poison.  Nothing here is a pointer, and nothing depends on where the segment is mapped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/signals.h"

namespace tpk {

constexpr std::uint64_t kMagic = 0x6c656e6e61686374ull;
constexpr int kMaxRanks = 64;  // blame is a 64-bit mask
constexpr std::size_t kTextBytes = 480;
constexpr std::size_t kPoisonTextBytes = 2048;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "counters must work between processes");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "counters must work between processes");

// What a rank says of one call, written before the call's first epoch and read after it.
struct alignas(64) Header {
    std::uint64_t call;
    std::uint64_t fingerprint;
    std::uint32_t error;    // errno of this rank's part in a growth, 0 for success
    char text[kTextBytes];  // the call in words, zero-terminated: both sides appear in the error
};

// A rank's own cache lines.
struct RankState {
    alignas(64) std::atomic<Epoch> epoch;  // also the futex word that waiters sleep on
    std::atomic<std::uint32_t> sleepers;
    // (peer + 1) << 32 | the epoch that this rank waits for, or has waited for in vain; else 0.  Only to find whom to
    // blame for a time-out: a rank that waits for a late one is not late itself.
    std::atomic<std::uint64_t> waits_for;
    alignas(64) Header headers[2];  // by parity of the call
};

enum class Failure : std::uint32_t {
    kNone = 0,
    kPeerLost = 1,
    kMismatch = 2,
    kTimeout = 3,
    kInterrupted = 4,
    kRefused = 5,
    kOther = 6,
};

// States of the poison.  A claim names its writer, so that a writer that dies at it can be replaced.
constexpr std::uint32_t kHealthy = 0;
constexpr std::uint32_t kReadable = 1;
constexpr std::uint32_t kWrittenBy = 2;  // + rank

// The first failure of the group; terminal.
struct Poison {
    alignas(64) std::atomic<std::uint32_t> state;
    std::uint32_t kind;
    std::uint32_t by;
    std::uint64_t call;
    std::uint64_t blamed;
    char text[kPoisonTextBytes];
};

struct Control {
    std::uint64_t magic;
    std::uint32_t size;
    Poison poison;
    alignas(64) RankState ranks[1];  // `size` of them

    static constexpr std::size_t bytes_for(int size) {
        return offsetof(Control, ranks) + static_cast<std::size_t>(size) * sizeof(RankState);
    }
};

}  // namespace tpk
