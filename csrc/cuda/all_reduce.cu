// Launches of the one-shot all-reduce: types, alignment, grid.
#include <algorithm>

#include "cuda/all_reduce_kernel.h"
#include "cuda/host.h"

namespace tpk {

namespace {

// A block of the one-shot all-reduce pushes at least this much, so that its signals are not most of its work.
constexpr std::int64_t kBytesPerBlock = 8192;

template <typename T>
int launch_all_reduce(const tpk_group& group, AllReduce<T> job, const void* x, const void* bias, void* out,
                      void* const* slots, void* stream) {
    job.x = static_cast<const T*>(x);
    job.bias = static_cast<const T*>(bias);
    job.out = static_cast<T*>(out);
    for (int rank = 0; rank < group.world_size; ++rank) {
        if (slots[rank] == nullptr || !is_aligned(slots[rank])) {
            return refuse("slots[%d] (%p) is NULL or not aligned to 16", rank, slots[rank]);
        }
        job.slots[rank] = static_cast<T*>(slots[rank]);
    }
    const std::int64_t bytes = job.elements * static_cast<std::int64_t>(sizeof(T));
    job.slot_elements = tpk_all_reduce_slot_bytes(bytes) / static_cast<std::int64_t>(sizeof(T));
    job.vectors =
        is_aligned(x) && is_aligned(out) && (bias == nullptr || is_row_aligned(std::int64_t{job.columns}, sizeof(T)));
    // The same on every rank, whatever the alignment of its tensors: block b exchanges signal b with its peers.
    const std::int64_t wanted = (bytes + kBytesPerBlock - 1) / kBytesPerBlock;
    const int blocks = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, kMaxChunks));
    plan_shares(job, blocks);
    all_reduce<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

}  // namespace

int load_all_reduce_kernels() { return load(all_reduce<float>, all_reduce<Bf16>, all_reduce<Half>); }

}  // namespace tpk

using namespace tpk;

TPK_API int64_t tpk_all_reduce_slot_bytes(int64_t bytes) { return (bytes + 15) / 16 * 16; }

TPK_API int tpk_all_reduce(const tpk_group* group, int32_t op, int32_t dtype, const void* x, const void* bias,
                           void* out, int64_t rows, int64_t columns, void* const* slots, int32_t slot,
                           uint32_t fingerprint, void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("slot", slot, 0, kSlots - 1));
    TPK_TRY(check_range("columns", columns, 0, INT32_MAX));
    TPK_TRY(check_range("rows", rows, 0, columns == 0 ? INT64_MAX : kMaxAllReduceElements / columns));
    if (slots == nullptr) return refuse("slots is NULL");
    if ((x == nullptr || out == nullptr) && rows * columns != 0) return refuse("x or out is NULL");
    const auto launch = [&](auto job) {
        job.elements = rows * columns;
        job.columns = static_cast<unsigned>(columns);
        job.fingerprint = fingerprint;
        job.slot = slot;
        job.op = op;
        return launch_all_reduce(*group, job, x, bias, out, slots, stream);
    };
    switch (dtype) {
        case TPK_F32:
            return launch(AllReduce<float>{});
        case TPK_BF16:
            return launch(AllReduce<Bf16>{});
        case TPK_F16:
            return launch(AllReduce<Half>{});
        default:
            return refuse("dtype (%d) must be fp32 (0), bf16 (1) or fp16 (2)", dtype);
    }
}
