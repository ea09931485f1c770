// Epochs: monotone 32-bit counters by which ranks tell each other how far they are.
//
// A counter only ever grows, one writer each, and wraps; it is never reset and never compared with a constant, so a
// stale value can not be taken for a fresh one.  `reached` is right as long as two ranks are less than 2^31 apart,
// which the protocol guarantees (no rank is ever more than one call ahead; csrc/README.md).
#pragma once

#include <atomic>
#include <cstdint>

namespace tpk {

using Epoch = std::uint32_t;

// Whether a counter at `seen` has passed `target`, across the wrap.
constexpr bool reached(Epoch seen, Epoch target) { return static_cast<std::int32_t>(seen - target) >= 0; }

static_assert(reached(3, 3) && reached(4, 3) && !reached(2, 3));
static_assert(reached(1, 0xffffffffu) && !reached(0xffffffffu, 1), "the order must survive the wrap");

// Everything this rank wrote before becomes visible to whoever acquires this epoch or a later one.  Sequentially
// consistent rather than release, because the writer next looks whether somebody sleeps (see Channel::signal).
inline void publish(std::atomic<Epoch>& counter, Epoch epoch) { counter.store(epoch, std::memory_order_seq_cst); }

// Reads made afterwards see what was written before the epoch that is returned.
inline Epoch acquire(const std::atomic<Epoch>& counter) { return counter.load(std::memory_order_acquire); }

}  // namespace tpk
