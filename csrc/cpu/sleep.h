// The clock, and how a thread waits for another process: spinning, or asleep on a counter (futex).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>

#include "common/signals.h"

namespace tpk {

// Seconds of CLOCK_MONOTONIC, as Python's time.monotonic() tells them.
inline double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// For a thread that spins.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The counter is the futex word: between processes, hence without FUTEX_PRIVATE_FLAG.  Returns whether a signal's handler
// has run in this thread.
inline bool futex_wait(std::atomic<Epoch>& word, Epoch seen, double seconds) {
    timespec timeout;
    timeout.tv_sec = static_cast<time_t>(seconds);
    timeout.tv_nsec = static_cast<long>((seconds - static_cast<double>(timeout.tv_sec)) * 1e9);
    // Every outcome (woken, changed, timed out, a signal) leads to the same look at the counter.
    return syscall(SYS_futex, reinterpret_cast<Epoch*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0) != 0 &&
           errno == EINTR;
}

inline void futex_wake_all(std::atomic<Epoch>& word) {
    syscall(SYS_futex, reinterpret_cast<Epoch*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace tpk
