// Launches of the reducer and of the one-shot all-reduce: types, alignment, grid.
#include <algorithm>

#include "cuda/all_reduce_kernel.h"
#include "cuda/host.h"
#include "cuda/reduce_kernel.h"

namespace tpk {

namespace {

// Enough to fill the memory system of one GPU; more blocks only wait for the same bytes.
constexpr int kReduceBlocks = 512;
// A block of the one-shot all-reduce pushes at least this much, so that its signals are not most of its work.
constexpr std::int64_t kBytesPerBlock = 8192;

bool is_row_aligned(std::int64_t stride, std::size_t size) {
    return stride * static_cast<std::int64_t>(size) % 16 == 0;
}

struct ReduceArguments {
    const tpk_group* group;
    int32_t op;
    const void* const* parts;
    const int64_t* strides;
    const void* bias;
    void* out;
    int64_t out_stride, rows, columns;
    int32_t num_chunks, max_blocks;
    void* stream;
};

template <typename In, typename Out>
int launch_reduce(const ReduceArguments& a) {
    Reduction<In, Out> job = {};
    job.vectors = is_aligned(a.out) && is_row_aligned(a.out_stride, sizeof(Out));
    for (int rank = 0; rank < a.group->world_size; ++rank) {
        if (a.parts[rank] == nullptr) return refuse("parts[%d] is NULL", rank);
        job.parts[rank] = static_cast<const In*>(a.parts[rank]);
        job.strides[rank] = a.strides[rank];
        job.vectors = job.vectors && is_aligned(a.parts[rank]) && is_row_aligned(a.strides[rank], sizeof(In));
    }
    job.bias = static_cast<const Out*>(a.bias);
    job.out = static_cast<Out*>(a.out);
    job.out_stride = a.out_stride;
    job.rows = a.rows;
    job.columns = a.columns;
    job.num_chunks = a.num_chunks;
    job.op = a.op;
    const std::int64_t per_tile = std::int64_t{kReduceThreads} * (job.vectors ? kReducePack<In, Out> : 1);
    const std::int64_t tiles = a.rows * ((a.columns + per_tile - 1) / per_tile);
    const int most = a.max_blocks > 0 ? a.max_blocks : kReduceBlocks;
    const int blocks = static_cast<int>(std::clamp<std::int64_t>(tiles, 1, most));
    reduce<In, Out><<<blocks, kReduceThreads, 0, as_stream(a.stream)>>>(to_device(*a.group), job);
    return launched();
}

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
    job.vectors = is_aligned(x) && is_aligned(out) && (bias == nullptr || is_row_aligned(job.columns, sizeof(T)));
    // The same on every rank, whatever the alignment of its tensors: block b exchanges signal b with its peers.
    const std::int64_t wanted = (bytes + kBytesPerBlock - 1) / kBytesPerBlock;
    const int blocks = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, kMaxChunks));
    all_reduce<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

}  // namespace

}  // namespace tpk

using namespace tpk;

TPK_API int tpk_reduce(const tpk_group* group, int32_t op, int32_t part_dtype, int32_t out_dtype,
                       const void* const* parts, const int64_t* strides, const void* bias, void* out,
                       int64_t out_stride, int64_t rows, int64_t columns, int32_t num_chunks, int32_t max_blocks,
                       void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("num_chunks", num_chunks, 0, kMaxChunks));
    TPK_TRY(check_range("rows", rows, 0, INT64_MAX));
    TPK_TRY(check_range("columns", columns, 0, INT64_MAX));
    if (parts == nullptr || strides == nullptr) return refuse("parts or strides is NULL");
    if (out == nullptr && rows * columns != 0) return refuse("out is NULL");
    const ReduceArguments a = {group,      op,   parts,   strides,    bias,       out,
                               out_stride, rows, columns, num_chunks, max_blocks, stream};
    switch (part_dtype * 8 + out_dtype) {
        case TPK_F32 * 8 + TPK_F32:
            return launch_reduce<float, float>(a);
        case TPK_BF16 * 8 + TPK_BF16:
            return launch_reduce<Bf16, Bf16>(a);
        case TPK_F16 * 8 + TPK_F16:
            return launch_reduce<Half, Half>(a);
        case TPK_F32 * 8 + TPK_BF16:
            return launch_reduce<float, Bf16>(a);
        case TPK_F32 * 8 + TPK_F16:
            return launch_reduce<float, Half>(a);
        default:
            return refuse("part_dtype (%d) and out_dtype (%d) must be equal, or the first be fp32", part_dtype,
                          out_dtype);
    }
}

TPK_API int64_t tpk_all_reduce_slot_bytes(int64_t bytes) { return (bytes + 15) / 16 * 16; }

TPK_API int tpk_all_reduce(const tpk_group* group, int32_t op, int32_t dtype, const void* x, const void* bias,
                           void* out, int64_t rows, int64_t columns, void* const* slots, int32_t slot,
                           uint32_t fingerprint, void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("slot", slot, 0, kSlots - 1));
    TPK_TRY(check_range("rows", rows, 0, INT64_MAX));
    TPK_TRY(check_range("columns", columns, 0, INT64_MAX));
    if (slots == nullptr) return refuse("slots is NULL");
    if ((x == nullptr || out == nullptr) && rows * columns != 0) return refuse("x or out is NULL");
    const auto launch = [&](auto job) {
        job.elements = rows * columns;
        job.columns = columns;
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
