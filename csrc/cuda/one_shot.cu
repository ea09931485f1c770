// Launches of the calls in one kernel: types, alignment, grid.
#include <algorithm>

#include "cuda/host.h"
#include "cuda/one_shot_kernels.h"

namespace tpk {

namespace {

// A block pushes at least this much, so that its signals are not most of its work.
constexpr std::int64_t kBytesPerBlock = 8192;

std::int64_t slot_bytes(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

// What the exchange needs of a launch; returns the number of blocks in `blocks`.  That is the same on every rank,
// whatever the alignment of its tensors: block b exchanges signal b with its peers.
template <typename T>
int plan(OneShot<T>& job, const tpk_group& group, const tpk_one_shot& call, std::int64_t elements, int* blocks) {
    TPK_TRY(check_range("slot", call.slot, 0, kSlots - 1));
    if (call.slots == nullptr) return refuse("slots is NULL");
    for (int rank = 0; rank < group.world_size; ++rank) {
        if (call.slots[rank] == nullptr || !is_aligned(call.slots[rank])) {
            return refuse("slots[%d] (%p) is NULL or not aligned to 16", rank, call.slots[rank]);
        }
        job.slots[rank] = static_cast<T*>(call.slots[rank]);
    }
    if (!is_aligned(call.multicast)) return refuse("multicast (%p) is not aligned to 16", call.multicast);
    const std::int64_t bytes = elements * static_cast<std::int64_t>(sizeof(T));
    job.multicast = static_cast<T*>(call.multicast);
    job.slot_elements = slot_bytes(bytes) / static_cast<std::int64_t>(sizeof(T));
    job.fingerprint = call.fingerprint;
    job.slot = call.slot;
    job.op = call.op;
    const std::int64_t wanted = (bytes + kBytesPerBlock - 1) / kBytesPerBlock;
    *blocks = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, std::min(kMaxChunks, group.max_blocks)));
    plan_shares(job, elements, *blocks);
    return 0;
}

template <typename T>
int launch_all_reduce(const tpk_group& group, const tpk_one_shot& call, const void* x, const void* bias, void* out,
                      std::int64_t rows, std::int64_t columns, void* stream) {
    AllReduce<T> job = {};
    int blocks = 0;
    job.elements = rows * columns;
    TPK_TRY(plan(job, group, call, job.elements, &blocks));
    job.columns = static_cast<unsigned>(columns);
    job.x = static_cast<const T*>(x);
    job.bias = static_cast<const T*>(bias);
    job.out = static_cast<T*>(out);
    job.vectors = is_aligned(x) && is_aligned(out) && (bias == nullptr || is_row_aligned(columns, sizeof(T)));
    all_reduce<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

template <typename T>
int launch_all_gather(const tpk_group& group, const tpk_one_shot& call, const void* x, void* out,
                      const std::int64_t* counts, void* stream) {
    AllGather<T> job = {};
    int blocks = 0;
    std::int64_t largest = 0;
    for (int rank = 0; rank < group.world_size; ++rank) {
        TPK_TRY(check_range("counts", counts[rank], 0, INT64_MAX / kMaxRanks / 16));
        job.starts[rank + 1] = job.starts[rank] + counts[rank];
        largest = std::max(largest, counts[rank]);
    }
    if (out == nullptr && largest > 0) return refuse("out is NULL");
    if (x == nullptr && counts[group.rank] > 0) return refuse("x is NULL");
    TPK_TRY(plan(job, group, call, largest, &blocks));
    job.x = static_cast<const T*>(x);
    job.out = static_cast<T*>(out);
    all_gather<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

}  // namespace

int load_one_shot_kernels() {
    return load(all_reduce<float>, all_reduce<Bf16>, all_reduce<Half>, all_gather<float>, all_gather<Bf16>);
}

}  // namespace tpk

using namespace tpk;

TPK_API int64_t tpk_one_shot_slot_bytes(int64_t bytes) { return slot_bytes(bytes); }

TPK_API int tpk_all_reduce(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x,
                           const void* bias, void* out, int64_t rows, int64_t columns, void* stream) {
    TPK_TRY(check_group(group));
    if (call == nullptr) return refuse("call is NULL");
    TPK_TRY(check_range("columns", columns, 0, INT32_MAX));
    TPK_TRY(check_range("rows", rows, 0, columns == 0 ? INT64_MAX : kMaxAllReduceElements / columns));
    if ((x == nullptr || out == nullptr) && rows * columns != 0) return refuse("x or out is NULL");
    switch (dtype) {
        case TPK_F32:
            return launch_all_reduce<float>(*group, *call, x, bias, out, rows, columns, stream);
        case TPK_BF16:
            return launch_all_reduce<Bf16>(*group, *call, x, bias, out, rows, columns, stream);
        case TPK_F16:
            return launch_all_reduce<Half>(*group, *call, x, bias, out, rows, columns, stream);
        default:
            return refuse("dtype (%d) must be fp32 (0), bf16 (1) or fp16 (2)", dtype);
    }
}

TPK_API int tpk_all_gather(const tpk_group* group, const tpk_one_shot* call, int32_t element_bytes, const void* x,
                           void* out, const int64_t* counts, void* stream) {
    TPK_TRY(check_group(group));
    if (call == nullptr) return refuse("call is NULL");
    if (counts == nullptr) return refuse("counts is NULL");
    switch (element_bytes) {
        case 2:
            return launch_all_gather<Bf16>(*group, *call, x, out, counts, stream);
        case 4:
            return launch_all_gather<float>(*group, *call, x, out, counts, stream);
        default:
            return refuse("element_bytes (%d) must be 2 or 4", element_bytes);
    }
}
