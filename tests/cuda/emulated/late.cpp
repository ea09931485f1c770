// What a test says to the emulated device.
#include "cuda/device.h"
#include "cuda_runtime.h"

// Tasks of side streams that are made from now on are late, sometimes.
extern "C" __attribute__((visibility("default"))) void emulated_late(unsigned seed, unsigned most_us) {
    emulated::seed = seed;
    emulated::most_late_us = most_us;
}
