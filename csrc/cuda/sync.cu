// Launches of the kernels that begin calls, signal and wait; failures' host memory; what the machine offers.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "cuda/host.h"
#include "cuda/sync_kernels.h"

namespace tpk {

namespace {

thread_local char message[256] = "no argument was refused";

// A second one would have to find room, too; a thread looks after more than one peer where there are more than 32.
constexpr unsigned kOneWarp = 32;

}  // namespace

int refuse(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return TPK_INVALID;
}

int check_range(const char* name, long long value, long long least, long long most) {
    if (value >= least && value <= most) return 0;
    return refuse("%s (%lld) must be from %lld to %lld", name, value, least, most);
}

int check_group(const tpk_group* group) {
    if (group == nullptr) return refuse("group is NULL");
    TPK_TRY(check_range("world_size", group->world_size, 1, kMaxRanks));
    TPK_TRY(check_range("rank", group->rank, 0, group->world_size - 1));
    TPK_TRY(check_range("max_blocks", group->max_blocks, 1, INT32_MAX));
    if (group->pads == nullptr) return refuse("pads is NULL");
    for (int rank = 0; rank < group->world_size; ++rank) {
        if (group->pads[rank] == nullptr) return refuse("pads[%d] is NULL", rank);
        if (!is_aligned(group->pads[rank]))
            return refuse("pads[%d] (%p) is not aligned to 16", rank, group->pads[rank]);
    }
    if (group->state == nullptr || !is_aligned(group->state))
        return refuse("state (%p) is NULL or not aligned to 16", group->state);
    if (group->failure == nullptr) return refuse("failure is NULL");
    return 0;
}

Group to_device(const tpk_group& group) {
    Group result = {};
    result.rank = group.rank;
    result.world_size = group.world_size;
    for (int rank = 0; rank < group.world_size; ++rank) result.pads[rank] = static_cast<Signal*>(group.pads[rank]);
    result.state = static_cast<State*>(group.state);
    result.failure = group.failure;
    result.alarm = group.alarm;
    result.timeout_ns = group.timeout_ns;
    return result;
}

int launch_relay(const tpk_group& group, const Relay& job, cudaStream_t stream) {
    relay<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

int launch_raise(const tpk_group& group, std::uint32_t* flags, int stride, std::uint64_t ranks, cudaStream_t stream) {
    raise_flags<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(group), flags, stride, ranks);
    return launched();
}

}  // namespace tpk

using namespace tpk;

TPK_API int tpk_cuda_abi(void) { return TPK_CUDA_ABI; }

TPK_API const char* tpk_error_string(int error) {
    if (error == TPK_INVALID) return message;
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

TPK_API int tpk_device_count(int* count) { return static_cast<int>(cudaGetDeviceCount(count)); }

TPK_API int tpk_can_access_peer(int device, int peer_device, int* can) {
    return static_cast<int>(cudaDeviceCanAccessPeer(can, device, peer_device));
}

TPK_API int tpk_has_peer_atomics(int device, int peer_device, int* has) {
    return static_cast<int>(cudaDeviceGetP2PAttribute(has, cudaDevP2PAttrNativeAtomicSupported, device, peer_device));
}

TPK_API int tpk_failure_create(tpk_failure** host, tpk_failure** device) {
    void *on_host = nullptr, *on_device = nullptr;
    TPK_TRY(cudaHostAlloc(&on_host, sizeof(tpk_failure), cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(on_host, 0, sizeof(tpk_failure));
    if (const cudaError_t error = cudaHostGetDevicePointer(&on_device, on_host, 0)) {
        cudaFreeHost(on_host);
        return static_cast<int>(error);
    }
    *host = static_cast<tpk_failure*>(on_host);
    *device = static_cast<tpk_failure*>(on_device);
    return 0;
}

TPK_API int tpk_failure_destroy(tpk_failure* host) { return static_cast<int>(cudaFreeHost(host)); }

TPK_API int tpk_load_kernels(void) {
    TPK_TRY(load(begin_call, end_call, meet, signal_chunk, wait_chunk, raise_flags, relay));
    TPK_TRY(load_reduce_kernels());
    return load_one_shot_kernels();
}

TPK_API int tpk_begin(const tpk_group* group, int32_t op, int32_t slot, uint32_t fingerprint, uint32_t* flags,
                      int32_t num_flags, void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("slot", slot, 0, kSlots - 1));
    TPK_TRY(check_range("num_flags", num_flags, 0, kMaxRanks * kMaxChunks));
    if (flags == nullptr && num_flags > 0) return refuse("flags is NULL, and num_flags %d", num_flags);
    begin_call<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(*group), op, slot, fingerprint, flags, num_flags);
    return launched();
}

TPK_API int tpk_end(const tpk_group* group, int32_t op, void* stream) {
    TPK_TRY(check_group(group));
    end_call<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(*group), op);
    return launched();
}

TPK_API int tpk_barrier(const tpk_group* group, int32_t op, uint32_t fingerprint, void* stream) {
    TPK_TRY(check_group(group));
    meet<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(*group), op, fingerprint);
    return launched();
}

TPK_API int tpk_signal(const tpk_group* group, int32_t chunk, uint64_t peers, void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("chunk", chunk, 0, kMaxChunks - 1));
    signal_chunk<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(*group), peers, chunk);
    return launched();
}

TPK_API int tpk_wait(const tpk_group* group, int32_t op, int32_t chunk, uint64_t peers, void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("chunk", chunk, 0, kMaxChunks - 1));
    wait_chunk<<<1, kOneWarp, 0, as_stream(stream)>>>(to_device(*group), peers, chunk, op);
    return launched();
}

TPK_API int tpk_raise_flag(const tpk_group* group, uint32_t* flag, void* stream) {
    TPK_TRY(check_group(group));
    if (flag == nullptr) return refuse("flag is NULL");
    return launch_raise(*group, flag, 0, 1, as_stream(stream));
}

TPK_API int tpk_wait_flag(const tpk_group* group, int32_t op, int32_t chunk, const uint32_t* flag, void* stream) {
    TPK_TRY(check_group(group));
    if (flag == nullptr) return refuse("flag is NULL");
    Relay job = {};
    job.wait_ranks = 1;
    job.flags = flag;
    job.wait_chunk = chunk;
    job.op = op;
    return launch_relay(*group, job, as_stream(stream));
}
