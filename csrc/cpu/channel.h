// One rank's end of a group that shares memory: the protocol of csrc/README.md.
//
//   begin    says which call this is (header), and picks the slot of the call's parity
//   slot     this rank writes its own slot; peers read it in place
//   signal   one more epoch: all that was written to the slot so far may be read
//   wait     until a peer has signalled n times in this call; its header must agree with ours
//   end
//
// A slot is written again two calls later.  By then every rank has begun the call in between, for each call waits for
// every peer, and so has finished with what it read here.
//
// Every wait is bounded: it spins a little, then sleeps on the peer's epoch (futex) in slices, and between slices looks
// for poison, for the peer's death, for an interruption and at the clock, and less often whether anybody died before he
// came to this call.  None of this needs anything of the caller's: a wait ends in time whatever the rest of the process
// does.  Failures throw ChannelError and poison the group for good.  A Channel serves one thread at a time; a second one
// is refused, not serialised.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/control.h"
#include "cpu/liveness.h"
#include "cpu/segment.h"

namespace tpk {

class ChannelError : public std::runtime_error {
public:
    ChannelError(Failure kind, std::uint64_t blamed, std::uint64_t call, Epoch epoch, const std::string& message)
        : std::runtime_error(message), kind(kind), blamed(blamed), call(call), epoch(epoch) {}

    Failure kind;
    std::uint64_t blamed;  // bit r: rank r
    std::uint64_t call;
    Epoch epoch;
};

// The pages of a group's ranks, mapped: `own` writable, the others read-only.
struct Memory {
    std::shared_ptr<Mapping> control;
    std::vector<std::shared_ptr<Mapping>> data;  // by rank
    Descriptor own_file;                         // of this rank's data segment, to grow it
};

struct Patience {
    double timeout_s = 1800.0;
    double spin_us = 50.0;  // 0 where ranks share cores
    // Called about every 20 ms of a long wait, and at once where a signal has ended a sleep; may throw.  While it waits
    // for something, so does the call.
    std::function<void(bool by_signal)> on_slice;
};

// A control segment for `size` ranks whose counters start at `first`.
Descriptor make_control(int size, Epoch first = 0);

// A data segment without any pages yet; grow() reserves them.
Descriptor make_data_file();

class Channel {
public:
    Channel(int rank, int size, Memory memory, std::unique_ptr<Liveness> liveness, Patience patience);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    std::uint64_t call() const { return call_.load(std::memory_order_relaxed); }
    Epoch epoch() const { return epoch_; }
    std::size_t capacity() const { return capacity_; }
    std::shared_ptr<Mapping> segment(int rank) const { return memory_.data.at(static_cast<std::size_t>(rank)); }

    // Start a call that all ranks make.  Throws ChannelError when the group is poisoned or this is a forked child, and
    // std::logic_error when another thread is inside a call.
    void begin(std::uint64_t fingerprint, const std::string& text);
    void end();
    // The memory of `rank` for the current call, `capacity` bytes: writable for our own rank only.
    std::byte* slot(int rank) const;
    void signal();
    bool has_arrived(int peer, Epoch signals) const;
    void wait(int peer, Epoch signals);
    void wait_for_all(Epoch signals);
    // The same for as long as a wait spins.  False: somebody is late or in another call, and wait_for_all will tell.
    bool spin_for_all(Epoch signals);

    // Make room for `bytes` per call on every rank: a call of its own.  Returns the ranks that could not, with their
    // errno; if there is one, no rank has grown and the group goes on as before.
    std::vector<std::pair<int, int>> grow(std::size_t bytes);

    // Fail the group for good; the first failure wins.  On return it is readable (unless its writer hangs), so that
    // who leaves now is not taken for the culprit.  Any thread.
    void poison(Failure kind, std::uint64_t blamed, const std::string& text);
    // End the wait that this rank is in, or its next one.  Any thread.
    void interrupt();
    // When the last wait that failed did (CLOCK_MONOTONIC, seconds); 0 while none has.  Any thread.
    double failed_at() const { return failed_at_.load(std::memory_order_relaxed); }

private:
    Control& control() const { return *reinterpret_cast<Control*>(memory_.control->data()); }
    RankState& state(int rank) const { return control().ranks[rank]; }
    void announce(std::uint64_t fingerprint, const std::string& text, std::uint32_t error);
    bool agrees(int peer);
    void check_header(int peer);
    bool spin_until(int peer, Epoch target) const;
    void sleep_until(int peer, Epoch target);
    void look_around(int peer, Epoch target, double waited_s);
    void count_heads();
    std::uint64_t dead_and_late(Epoch target) const;
    int holds_up(int rank) const;
    void raise_if_poisoned() const;
    void raise_if_forked() const;
    [[noreturn]] void fail(Failure kind, std::uint64_t blamed, const std::string& text);
    void wake_everybody() const;

    const int rank_;
    const int size_;
    const Memory memory_;
    const std::unique_ptr<Liveness> liveness_;
    const Patience patience_;
    std::atomic<std::uint64_t> call_{0};  // written by the calling thread; any thread that poisons reads it
    Epoch epoch_;                         // ours, as published
    Epoch first_;                         // value before the current call's first signal, equal on all ranks
    std::uint64_t agreed_;                // bit r: the header of rank r was checked in this call
    std::size_t capacity_ = 0;
    std::atomic<bool> busy_{false};
    std::atomic<bool> interrupted_{false};
    std::atomic<double> failed_at_{0.0};
};

}  // namespace tpk
