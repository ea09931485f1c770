// What stands for the multicast addresses of NVLS: a range where nothing is mapped, and what each rank has there.
//
// A store becomes visible at this thread's next alias fence and not before, which is what the memory model promises at
// the least.  Any other access of such an address is a fault, as it is undefined on a GPU.  Windows are kept for good.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/device.h"

namespace sim {

struct Window {
    const char* base;
    std::size_t size;
    std::vector<char*> of_ranks;
};
constexpr std::size_t kMaxWindows = 1024;
inline Window windows[kMaxWindows];
// Written before the threads that read it are started, or by whoever allocates: a lock would order what must not be.
inline std::atomic<std::size_t> num_windows{0};

struct Pending {
    char* to;
    tpk::Bytes16 value;
};
inline thread_local std::vector<Pending> pending;

inline void store_to_all(void* to, tpk::Bytes16 value) {
    const char* const address = static_cast<char*>(to);
    for (std::size_t i = num_windows.load(std::memory_order_acquire); i-- > 0;) {
        const Window& window = windows[i];
        if (address < window.base || address + sizeof(value) > window.base + window.size) continue;
        for (char* const memory : window.of_ranks) pending.push_back({memory + (address - window.base), value});
        return;
    }
    std::fprintf(stderr, "WRONG: %p is no multicast address\n", to);
    std::_Exit(1);
}

inline void fence() {
    for (const Pending& store : pending) tpk::store16(store.to, store.value);
    pending.clear();
}

// A multicast address of `size` bytes on every rank.
inline void* multicast_window(std::size_t size, std::vector<char*> of_ranks) {
    const std::size_t place = num_windows.load();
    void* const base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == kMaxWindows || base == MAP_FAILED) return nullptr;
    tpk::simulated_multicast = store_to_all;
    tpk::simulated_fence = fence;
    windows[place] = {static_cast<char*>(base), size, std::move(of_ranks)};
    num_windows.store(place + 1, std::memory_order_release);
    return base;
}

}  // namespace sim
