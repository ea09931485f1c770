// Words that a stream writes without a kernel: what the driver offers, behind a plain interface.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tpk {

// Writes `value` to words[r * stride] for each bit r of `ranks`, in one call of the driver, when the stream comes to it;
// what the stream has done before is visible to whoever sees it. cudaErrorNotSupported where the driver cannot.
int write_values(cudaStream_t stream, std::uint32_t* words, int stride, std::uint64_t ranks, std::uint32_t value);

}  // namespace tpk
