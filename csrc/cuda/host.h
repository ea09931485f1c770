// What the launching functions share: checks at the door, and the message of the one that refused.
#pragma once

#include <cuda_runtime.h>

#include "cuda/protocol.h"

#define TPK_API extern "C" __attribute__((visibility("default")))

namespace tpk {

// Remembers, for this thread, why an argument is refused; returns TPK_INVALID.
__attribute__((format(printf, 1, 2))) int refuse(const char* format, ...);

// 0, or the refusal: a group that kernels can be given.
int check_group(const tpk_group* group);
int check_range(const char* name, long long value, long long least, long long most);
Group to_device(const tpk_group& group);

// Loads each kernel onto the current device.
template <typename... Kernels>
int load(Kernels... kernels) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    const auto one = [&](auto kernel) {
        if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    };
    (one(kernels), ...);
    return static_cast<int>(error);
}
// Enqueue one kernel of one warp.
int launch_relay(const tpk_group& group, const Relay& job, cudaStream_t stream);
int launch_raise(const tpk_group& group, std::uint32_t* flags, int stride, std::uint64_t ranks, cudaStream_t stream);
int load_reduce_kernels();
int load_one_shot_kernels();

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
// The launch's own error, and only that: an older one, of somebody else, has been reported to them.
inline int launched() { return static_cast<int>(cudaGetLastError()); }
// Every row begins at a multiple of 16 bytes if the first one does.
inline bool is_row_aligned(std::int64_t stride, std::size_t size) {
    return stride * static_cast<std::int64_t>(size) % 16 == 0;
}

}  // namespace tpk

// Returns the first refusal or CUDA error from the function that contains it.
#define TPK_TRY(call)                                        \
    do {                                                     \
        if (const int tpk_status = static_cast<int>(call)) { \
            return tpk_status;                               \
        }                                                    \
    } while (false)
