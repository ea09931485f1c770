// What a test says to the emulated device.
#include "cuda/device.h"
#include "cuda_runtime.h"
#include "multicast.h"

// Tasks of side streams that are made from now on are late, sometimes.
extern "C" __attribute__((visibility("default"))) void emulated_late(unsigned seed, unsigned most_us) {
    emulated::seed = seed;
    emulated::most_late_us = most_us;
}

// Blocks of the last launch.
extern "C" __attribute__((visibility("default"))) unsigned emulated_last_blocks() { return emulated::last_blocks; }

// A multicast address of `size` bytes that `count` ranks have at these addresses, as this rank addresses them.
extern "C" __attribute__((visibility("default"))) void* emulated_multicast(std::size_t size, char* const* addresses,
                                                                          int count) {
    return sim::multicast_window(size, {addresses, addresses + count});
}
