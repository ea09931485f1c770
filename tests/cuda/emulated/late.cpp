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

// Calls of the driver since the last time that this was asked: kernels, copies, records of events, waits for events,
// writes of streams.  `only`: from now on they are counted and dropped.
extern "C" __attribute__((visibility("default"))) void emulated_calls(unsigned* counts, int only) {
    const emulated::Calls& c = emulated::calls;
    const unsigned found[] = {c.kernels, c.copies, c.records, c.event_waits, c.stream_writes};
    std::memcpy(counts, found, sizeof(found));
    emulated::calls = {};
    emulated::only_counts = only != 0;
}

// From now on kernels start in the order of their launches, as with one hardware queue; or whenever they can.
extern "C" __attribute__((visibility("default"))) void emulated_one_queue(int on) {
    emulated::one_queue = on != 0 ? new emulated::Queue : nullptr;  // kept for good: kernels may look at it
}

// Streams that come to this wait until it is opened. A gate holds back a copy, as a slow link does.
extern "C" __attribute__((visibility("default"))) void* emulated_gate(void* stream) {
    auto* const gate = new emulated::Moment;
    emulated::enqueue(static_cast<cudaStream_t>(stream), [gate] { gate->wait(); });
    return gate;
}
extern "C" __attribute__((visibility("default"))) void emulated_open(void* gate) {
    static_cast<emulated::Moment*>(gate)->reach();
}
