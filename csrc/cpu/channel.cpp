#include "cpu/channel.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "cpu/sleep.h"

namespace tpk {

namespace {

constexpr double kFirstSliceS = 0.001;
constexpr double kLastSliceS = 0.008;  // a dead peer is noticed within about this time
constexpr double kHookEveryS = 0.02;
constexpr double kCountEveryS = 0.05;  // one system call per rank
constexpr double kWriterGraceS = 1.0;  // for a rank that reports a failure: a few microseconds of work
constexpr double kAwaitSidesS = 1.0;
constexpr int kPausesPerLook = 64;
constexpr double kYieldAfterUs = 5.0;

std::string bounded_text(const char* text, std::size_t capacity) { return std::string(text, strnlen(text, capacity)); }

void copy_text(char* to, std::size_t capacity, const std::string& text) {
    const std::size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(to, text.data(), length);
    to[length] = '\0';
}

// Ranks that say the same of a call.
struct Side {
    std::uint64_t fingerprint;
    std::uint64_t mask;
    std::vector<int> ranks;
    std::string text;
};

std::string listing(const std::vector<int>& ranks) {
    std::string text;
    for (const int rank : ranks) text += (text.empty() ? "[" : ", ") + std::to_string(rank);
    return text + "]";
}

std::uint64_t bit(int rank) { return std::uint64_t{1} << rank; }

// The ranks of a group of this size among those that a peer has named.
std::uint64_t among(int size, std::uint64_t ranks) { return size < 64 ? ranks & (bit(size) - 1) : ranks; }

// Who claims the poison, or -1 where that is no rank: a peer that has gone wrong may have written anything there.
int writer_of(std::uint32_t state, int size) {
    return state >= kWrittenBy && state - kWrittenBy < static_cast<std::uint32_t>(size)
               ? static_cast<int>(state - kWrittenBy)
               : -1;
}

// Removes us from the sleepers however the sleep ends.
class Sleeper {
public:
    explicit Sleeper(std::atomic<std::uint32_t>& count) : count_(count) {
        count_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() { count_.fetch_sub(1, std::memory_order_relaxed); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

private:
    std::atomic<std::uint32_t>& count_;
};

}  // namespace

Descriptor make_control(int size, Epoch first) {
    if (size < 1 || size > kMaxRanks) {
        throw std::invalid_argument("size must be between 1 and " + std::to_string(kMaxRanks) + ", got " +
                                    std::to_string(size));
    }
    Descriptor file = make_memory_file("tpkernels-control");
    const int error = reserve(file.get(), 0, Control::bytes_for(size));
    if (error != 0) throw std::runtime_error(std::string("cannot reserve the control segment: ") + strerror(error));
    const Mapping mapping(file.get(), Control::bytes_for(size), true);
    Control& control = *reinterpret_cast<Control*>(mapping.data());  // pages of a new file are zero
    control.magic = kMagic;
    control.size = static_cast<std::uint32_t>(size);
    for (int rank = 0; rank < size; ++rank) control.ranks[rank].epoch.store(first, std::memory_order_relaxed);
    return file;
}

Descriptor make_data_file() { return make_memory_file("tpkernels-data"); }

Channel::Channel(int rank, int size, Memory memory, std::unique_ptr<Liveness> liveness, Patience patience)
    : rank_(rank),
      size_(size),
      memory_(std::move(memory)),
      liveness_(std::move(liveness)),
      patience_(std::move(patience)),
      agreed_(0) {
    if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                    " is no rank of a group of at most " + std::to_string(kMaxRanks));
    }
    if (memory_.data.size() != static_cast<std::size_t>(size)) {
        throw std::invalid_argument("expected one data segment per rank");
    }
    if (memory_.control->bytes() < Control::bytes_for(size) || control().magic != kMagic ||
        control().size != static_cast<std::uint32_t>(size)) {
        throw std::invalid_argument("this is not the control segment of a group of " + std::to_string(size));
    }
    epoch_ = first_ = state(rank_).epoch.load(std::memory_order_relaxed);
}

Channel::~Channel() = default;

void Channel::begin(std::uint64_t fingerprint, const std::string& text) { announce(fingerprint, text, 0); }

void Channel::announce(std::uint64_t fingerprint, const std::string& text, std::uint32_t error) {
    raise_if_forked();
    raise_if_poisoned();
    if (busy_.exchange(true, std::memory_order_acquire)) {
        throw std::logic_error("rank " + std::to_string(rank_) +
                               ": another thread is inside a call on this group; one thread per group at a time");
    }
    call_.store(call() + 1, std::memory_order_relaxed);
    first_ = epoch_;
    agreed_ = bit(rank_);
    Header& header = state(rank_).headers[call() & 1];
    header.call = call();
    header.fingerprint = fingerprint;
    header.error = error;
    copy_text(header.text, sizeof(header.text), text);
}

void Channel::end() { busy_.store(false, std::memory_order_release); }

std::byte* Channel::slot(int rank) const {
    return memory_.data[static_cast<std::size_t>(rank)]->data() + (call() & 1) * kSlotBytes;
}

void Channel::signal() {
    RankState& own = state(rank_);
    publish(own.epoch, ++epoch_);
    // Either we see the sleeper here, or it saw our epoch before it slept: both sides are sequentially consistent.
    if (own.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.epoch);
}

bool Channel::has_arrived(int peer, Epoch signals) const {
    return (agreed_ & bit(peer)) != 0 && reached(acquire(state(peer).epoch), first_ + signals);
}

void Channel::wait(int peer, Epoch signals) {
    const Epoch target = first_ + signals;
    try {
        if (!reached(acquire(state(peer).epoch), target)) sleep_until(peer, target);
        if ((agreed_ & bit(peer)) == 0) check_header(peer);
    } catch (...) {
        failed_at_.store(now_s(), std::memory_order_relaxed);
        throw;
    }
}

void Channel::wait_for_all(Epoch signals) {
    for (int step = 1; step < size_; ++step) wait((rank_ + step) % size_, signals);
}

bool Channel::spin_for_all(Epoch signals) {
    for (int step = 1; step < size_; ++step) {
        const int peer = (rank_ + step) % size_;
        if (!reached(acquire(state(peer).epoch), first_ + signals) && !spin_until(peer, first_ + signals)) return false;
        if (!agrees(peer)) return false;
    }
    return true;
}

bool Channel::spin_until(int peer, Epoch target) const {
    const std::atomic<Epoch>& epoch = state(peer).epoch;
    const double start = now_s();
    double now = start;
    while (now - start < 1e-6 * patience_.spin_us) {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (reached(acquire(epoch), target)) return true;
            relax();
        }
        now = now_s();
        if (now - start > 1e-6 * kYieldAfterUs) sched_yield();  // the peer may be waiting for this very core
    }
    return false;
}

void Channel::sleep_until(int peer, Epoch target) {
    RankState& other = state(peer);
    const double start = now_s();
    if (spin_until(peer, target)) return;
    double now = now_s();
    // Stays when this throws: ranks that give up at the same moment must not blame each other.
    std::atomic<std::uint64_t>& waits_for = state(rank_).waits_for;
    waits_for.store(static_cast<std::uint64_t>(peer + 1) << 32 | target, std::memory_order_release);
    double slice = kFirstSliceS;
    double next_hook = start + kHookEveryS;
    double next_count = start;
    while (true) {
        look_around(peer, target, now - start);
        if (now >= next_count) {
            count_heads();
            next_count = now + kCountEveryS;
        }
        bool by_signal = false;
        {
            const Sleeper sleeper(other.sleepers);
            const Epoch seen = other.epoch.load(std::memory_order_seq_cst);
            if (reached(seen, target)) break;
            if (control().poison.state.load(std::memory_order_seq_cst) != kReadable)
                by_signal = futex_wait(other.epoch, seen, slice);
        }
        if (reached(acquire(other.epoch), target)) break;
        now = now_s();
        slice = std::min(2 * slice, std::min(kLastSliceS, std::max(patience_.timeout_s / 20, 1e-4)));
        if (patience_.on_slice && (by_signal || now >= next_hook)) {
            patience_.on_slice(by_signal);
            next_hook = now + kHookEveryS;
        }
    }
    waits_for.store(0, std::memory_order_release);
}

// Throws if waiting for `peer` can not or should not go on.
void Channel::look_around(int peer, Epoch target, double waited_s) {
    raise_if_poisoned();
    raise_if_forked();
    if (interrupted_.exchange(false, std::memory_order_acquire)) {
        throw ChannelError(Failure::kInterrupted, 0, call(), target, "interrupted");
    }
    // A peer in another call may never signal as often as this one does: look at its first signal already.
    if ((agreed_ & bit(peer)) == 0 && reached(acquire(state(peer).epoch), first_ + 1)) check_header(peer);
    // Who is gone first, poison after: a rank that left because of a failure made that readable before it went.
    if (!liveness_->is_alive(peer) && !reached(acquire(state(peer).epoch), target)) {
        const std::uint64_t blamed = bit(peer) | dead_and_late(target);
        raise_if_poisoned();
        fail(Failure::kPeerLost, blamed, "rank " + std::to_string(peer) + " died");
    }
    const std::uint32_t poisoned = control().poison.state.load(std::memory_order_acquire);
    if (const int writer = writer_of(poisoned, size_); writer >= 0 && writer != rank_) {
        // Its failure is lost with it; without this, ranks that wait for others who gave up would wait till the end.
        if (!liveness_->is_alive(writer)) {
            raise_if_poisoned();
            fail(Failure::kPeerLost, bit(writer), "rank " + std::to_string(writer) + " died as it reported a failure");
        }
    }
    if (waited_s > patience_.timeout_s) {
        std::uint64_t blamed = 0;
        for (int other = 0; other < size_; ++other) {
            if (other != rank_ && !reached(acquire(state(other).epoch), target)) blamed |= bit(holds_up(other));
        }
        const int culprit = holds_up(peer);
        const std::string waiting = culprit == peer ? "" : ", waiting for rank " + std::to_string(culprit);
        fail(Failure::kTimeout, blamed,
             "rank " + std::to_string(peer) + " is alive but did not reach signal " + std::to_string(target - first_) +
                 " of this call within " + std::to_string(patience_.timeout_s) + " s (epoch " + std::to_string(target) +
                 " expected, " + std::to_string(acquire(state(peer).epoch)) + " found)" + waiting);
    }
}

// Throws if a rank died before it came to this call, which can not end well then, whomever we wait for.  One that has
// come may have done its part, and left in good order.
void Channel::count_heads() {
    std::uint64_t blamed = dead_and_late(first_ + 1);
    if (blamed == 0) return;
    raise_if_poisoned();
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
        if ((blamed & bit(rank)) != 0) ranks.push_back(rank);
    }
    fail(Failure::kPeerLost, blamed, "rank(s) " + listing(ranks) + " died");
}

// Who keeps `rank` from going on: itself, unless it waits for a rank that is late, which may wait for another.
int Channel::holds_up(int rank) const {
    int current = rank;
    for (int step = 0; step < size_; ++step) {
        const std::uint64_t waits_for = state(current).waits_for.load(std::memory_order_acquire);
        const std::int64_t named = static_cast<std::int64_t>(waits_for >> 32) - 1;
        if (named < 0 || named >= size_) return current;
        const int next = static_cast<int>(named);
        // What it waits for has come, and still it sleeps: stopped.
        if (reached(acquire(state(next).epoch), static_cast<Epoch>(waits_for))) return current;
        current = next;
    }
    return rank;
}

std::uint64_t Channel::dead_and_late(Epoch target) const {
    std::uint64_t ranks = 0;
    for (int other = 0; other < size_; ++other) {
        // Alive first, epoch after: what it signalled before it went counts.
        if (other == rank_ || liveness_->is_alive(other)) continue;
        if (!reached(acquire(state(other).epoch), target)) ranks |= bit(other);
    }
    return ranks;
}

// Whether the header of a peer whose first signal has come says what ours says.
bool Channel::agrees(int peer) {
    if ((agreed_ & bit(peer)) != 0) return true;
    const Header& theirs = state(peer).headers[call_ & 1];
    const Header& ours = state(rank_).headers[call_ & 1];
    if (theirs.call != call_ || theirs.fingerprint != ours.fingerprint) return false;
    agreed_ |= bit(peer);
    return true;
}

void Channel::check_header(int peer) {
    if (agrees(peer)) return;
    // The other ranks get a moment to come, so that the error shows all sides and blames the few.
    const double deadline = now_s() + std::min(kAwaitSidesS, patience_.timeout_s);
    const auto is_here = [&](int rank) { return rank == rank_ || reached(acquire(state(rank).epoch), first_ + 1); };
    for (int rank = 0; rank < size_; ++rank) {
        while (!is_here(rank) && liveness_->is_alive(rank) && now_s() < deadline) {
            raise_if_poisoned();
            futex_wait(state(rank).epoch, state(rank).epoch.load(std::memory_order_seq_cst), kFirstSliceS);
        }
    }
    std::vector<Side> sides;
    for (int rank = 0; rank < size_; ++rank) {
        if (!is_here(rank)) continue;
        const Header& header = state(rank).headers[call_ & 1];
        const auto same = [&](const Side& side) { return side.fingerprint == header.fingerprint; };
        auto side = std::find_if(sides.begin(), sides.end(), same);
        if (side == sides.end()) {
            sides.push_back({header.fingerprint, 0, {}, bounded_text(header.text, sizeof(header.text))});
            side = sides.end() - 1;
        }
        side->mask |= bit(rank);
        side->ranks.push_back(rank);
    }
    std::string text = "the ranks made different calls";
    for (const Side& side : sides) text += "\n  rank(s) " + listing(side.ranks) + ": " + side.text;
    text +=
        "\nAll ranks must make the same calls in the same order, with the same shapes and dtypes (uneven shards: pass "
        "shard_sizes on every rank)";
    const auto fewer = [](const Side& a, const Side& b) { return a.ranks.size() < b.ranks.size(); };
    fail(Failure::kMismatch, std::min_element(sides.begin(), sides.end(), fewer)->mask, text);
}

std::vector<std::pair<int, int>> Channel::grow(std::size_t bytes) {
    if (bytes <= capacity_) return {};
    if (bytes > kSlotBytes) {
        throw std::invalid_argument("a call can stage at most " + std::to_string(kSlotBytes) + " bytes, got " +
                                    std::to_string(bytes));
    }
    int error = 0;
    for (int slot = 0; slot < 2 && error == 0; ++slot) {
        error =
            reserve(memory_.own_file.get(), static_cast<std::size_t>(slot) * kSlotBytes + capacity_, bytes - capacity_);
    }
    announce(bytes, "grow to " + std::to_string(bytes) + " bytes per call", static_cast<std::uint32_t>(error));
    signal();
    wait_for_all(1);
    std::vector<std::pair<int, int>> failed;
    for (int rank = 0; rank < size_; ++rank) {
        const std::uint32_t theirs = state(rank).headers[call() & 1].error;
        if (theirs != 0) failed.emplace_back(rank, static_cast<int>(theirs));
    }
    if (failed.empty()) {
        capacity_ = bytes;
    } else {
        for (int slot = 0; slot < 2; ++slot) {
            give_back(memory_.own_file.get(), static_cast<std::size_t>(slot) * kSlotBytes + capacity_,
                      bytes - capacity_);
        }
    }
    end();
    return failed;
}

void Channel::poison(Failure kind, std::uint64_t blamed, const std::string& text) {
    if (liveness_->forked()) return;  // a child's failure is not the group's
    Poison& poison = control().poison;
    const std::uint32_t mine = kWrittenBy + static_cast<std::uint32_t>(rank_);
    const double start = now_s();
    std::uint32_t seen = kHealthy;
    while (!poison.state.compare_exchange_strong(seen, mine, std::memory_order_seq_cst)) {
        if (seen == kReadable) return;
        // Another rank is writing (or another thread of ours): we may leave when it has finished.  If it died at it, the
        // next round takes its place: the comparison is then with its claim.
        const int writer = writer_of(seen, size_);
        const bool is_replaceable = seen != mine && (writer < 0 || !liveness_->is_alive(writer));
        if (is_replaceable) continue;
        if (now_s() - start > kWriterGraceS) return;
        sched_yield();
        seen = kHealthy;
    }
    poison.kind = static_cast<std::uint32_t>(kind);
    poison.by = static_cast<std::uint32_t>(rank_);
    poison.call = call();
    poison.blamed = blamed;
    copy_text(poison.text, sizeof(poison.text), text);
    poison.state.store(kReadable, std::memory_order_seq_cst);
    wake_everybody();
}

void Channel::wake_everybody() const {
    for (int rank = 0; rank < size_; ++rank) futex_wake_all(state(rank).epoch);
}

void Channel::interrupt() {
    interrupted_.store(true, std::memory_order_release);
    wake_everybody();
}

void Channel::fail(Failure kind, std::uint64_t blamed, const std::string& text) {
    poison(kind, blamed, text);
    throw ChannelError(kind, blamed, call(), first_, text);
}

void Channel::raise_if_poisoned() const {
    const Poison& poison = control().poison;
    if (poison.state.load(std::memory_order_acquire) != kReadable) return;
    throw ChannelError(
        poison.kind > static_cast<std::uint32_t>(Failure::kOther) ? Failure::kOther : static_cast<Failure>(poison.kind),
        among(size_, poison.blamed), poison.call, first_,
        "rank " + std::to_string(poison.by) + " failed first: " + bounded_text(poison.text, sizeof(poison.text)));
}

void Channel::raise_if_forked() const {
    if (!liveness_->forked()) return;
    throw ChannelError(Failure::kRefused, 0, call(), first_,
                       "this process was forked from rank " + std::to_string(rank_) +
                           "; a group belongs to the process that joined it: start workers with spawn, or make a "
                           "group in the child");
}

}  // namespace tpk
