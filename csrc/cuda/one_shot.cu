// Launches of the calls in one kernel: types, alignment, grid.
#include <algorithm>

#include "cuda/host.h"
#include "cuda/one_shot_kernels.h"
#include "cuda/one_shot_norm_kernels.h"
#include "cuda/two_shot_kernels.h"

namespace tpk {

namespace {

// A block pushes at least this much, so that its signals are not most of its work.
constexpr std::int64_t kBytesPerBlock = 8192;

std::int64_t slot_bytes(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

std::int64_t part_bytes(std::int64_t bytes, int world_size) {
    return (slot_bytes(bytes) / 16 + world_size - 1) / world_size * 16;
}

// The number of blocks, which is the same on every rank, whatever the alignment of its tensors: block b exchanges signal
// b with its peers.
int blocks_for(std::int64_t units, const tpk_group& group, int most) {
    return static_cast<int>(std::clamp<std::int64_t>(units, 1, std::min(most, group.max_blocks)));
}

int blocks_of(std::int64_t bytes, const tpk_group& group, int most) {
    return blocks_for((bytes + kBytesPerBlock - 1) / kBytesPerBlock, group, most);
}

// Where and what the call is.
template <typename T>
int place(OneShot<T>& job, const tpk_group& group, const tpk_one_shot& call) {
    TPK_TRY(check_range("slot", call.slot, 0, kSlots - 1));
    if (call.slots == nullptr) return refuse("slots is NULL");
    for (int rank = 0; rank < group.world_size; ++rank) {
        if (call.slots[rank] == nullptr || !is_aligned(call.slots[rank])) {
            return refuse("slots[%d] (%p) is NULL or not aligned to 16", rank, call.slots[rank]);
        }
        job.slots[rank] = static_cast<T*>(call.slots[rank]);
    }
    if (!is_aligned(call.multicast)) return refuse("multicast (%p) is not aligned to 16", call.multicast);
    job.multicast = static_cast<T*>(call.multicast);
    job.fingerprint = call.fingerprint;
    job.slot = call.slot;
    job.op = call.op;
    return 0;
}

// What the exchange in one step needs of a launch; returns the number of blocks in `blocks`.
template <typename T>
int plan(OneShot<T>& job, const tpk_group& group, const tpk_one_shot& call, std::int64_t elements, int* blocks) {
    TPK_TRY(place(job, group, call));
    const std::int64_t bytes = elements * static_cast<std::int64_t>(sizeof(T));
    job.slot_elements = slot_bytes(bytes) / static_cast<std::int64_t>(sizeof(T));
    *blocks = blocks_of(bytes, group, kMaxChunks);
    plan_shares(job, elements, *blocks);
    return 0;
}

// Of a sum's tensors.
template <typename T>
void fill(AllReduce<T>& job, const void* x, const void* bias, void* out, std::int64_t rows, std::int64_t columns) {
    job.elements = rows * columns;
    job.columns = static_cast<unsigned>(columns);
    job.x = static_cast<const T*>(x);
    job.bias = static_cast<const T*>(bias);
    job.out = static_cast<T*>(out);
    job.vectors = is_aligned(x) && is_aligned(out) && (bias == nullptr || is_row_aligned(columns, sizeof(T)));
}

template <typename T>
int launch_all_reduce(const tpk_group& group, const tpk_one_shot& call, const void* x, const void* bias, void* out,
                      std::int64_t rows, std::int64_t columns, void* stream) {
    AllReduce<T> job = {};
    int blocks = 0;
    fill(job, x, bias, out, rows, columns);
    TPK_TRY(plan(job, group, call, job.elements, &blocks));
    all_reduce<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

template <typename T>
int launch_two_shot(const tpk_group& group, const tpk_one_shot& call, const void* x, const void* bias, void* out,
                    std::int64_t rows, std::int64_t columns, void* stream) {
    TwoShot<T> job = {};
    fill(job, x, bias, out, rows, columns);
    TPK_TRY(place(job, group, call));
    plan_parts(job, group.world_size);
    const std::int64_t bytes = job.slot_elements * static_cast<std::int64_t>(sizeof(T));
    const int blocks = blocks_of(bytes, group, kMaxTwoShotBlocks);
    plan_shares(job, job.slot_elements, blocks);
    all_reduce_two_shot<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

// Each row is a block's: its sum must be known before its first element can be normalised.
template <typename T>
int launch_all_reduce_norm(const tpk_group& group, const tpk_one_shot& call, const void* x, const void* bias,
                           const tpk_norm& norm, void* out, std::int64_t rows, std::int64_t columns, void* stream) {
    AllReduceNorm<T> job = {};
    int blocks = 0;
    fill(job, x, bias, out, rows, columns);
    TPK_TRY(plan(job, group, call, job.elements, &blocks));
    blocks = blocks_for(rows, group, kMaxChunks);
    job.unit = columns;
    job.shares = make_chunks(rows, blocks);
    job.residual = static_cast<const T*>(norm.residual);
    job.weight = static_cast<const T*>(norm.weight);
    job.normed = static_cast<T*>(norm.normed);
    job.scales = norm.scales;
    job.eps = norm.eps;
    job.vectors = job.vectors && is_row_aligned(columns, sizeof(T)) && is_aligned(norm.residual) &&
                  is_aligned(norm.weight) && is_aligned(norm.normed);
    all_reduce_norm<T><<<blocks, kReduceThreads, 0, as_stream(stream)>>>(to_device(group), job);
    return launched();
}

template <template <typename> class Launch, typename... Arguments>
int of_dtype(int dtype, Arguments... arguments) {
    switch (dtype) {
        case TPK_F32:
            return Launch<float>::run(arguments...);
        case TPK_BF16:
            return Launch<Bf16>::run(arguments...);
        case TPK_F16:
            return Launch<Half>::run(arguments...);
        default:
            return refuse("dtype (%d) must be fp32 (0), bf16 (1) or fp16 (2)", dtype);
    }
}
template <typename T>
struct InOneStep {
    static constexpr auto run = launch_all_reduce<T>;
};
template <typename T>
struct InOneStepWithNorm {
    static constexpr auto run = launch_all_reduce_norm<T>;
};
template <typename T>
struct InTwoSteps {
    static constexpr auto run = launch_two_shot<T>;
};

int check_sum(const tpk_group* group, const tpk_one_shot* call, const void* x, const void* out, std::int64_t rows,
              std::int64_t columns) {
    TPK_TRY(check_group(group));
    if (call == nullptr) return refuse("call is NULL");
    TPK_TRY(check_range("columns", columns, 0, INT32_MAX));
    TPK_TRY(check_range("rows", rows, 0, columns == 0 ? INT64_MAX : kMaxAllReduceElements / columns));
    if ((x == nullptr || out == nullptr) && rows * columns != 0) return refuse("x or out is NULL");
    return 0;
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
    return load(all_reduce<float>, all_reduce<Bf16>, all_reduce<Half>, all_reduce_two_shot<float>,
                all_reduce_two_shot<Bf16>, all_reduce_two_shot<Half>, all_reduce_norm<float>, all_reduce_norm<Bf16>,
                all_reduce_norm<Half>, all_gather<float>, all_gather<Bf16>);
}

}  // namespace tpk

using namespace tpk;

TPK_API int64_t tpk_one_shot_slot_bytes(int64_t bytes) { return slot_bytes(bytes); }

TPK_API int tpk_all_reduce(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x,
                           const void* bias, void* out, int64_t rows, int64_t columns, void* stream) {
    TPK_TRY(check_sum(group, call, x, out, rows, columns));
    return of_dtype<InOneStep>(dtype, *group, *call, x, bias, out, rows, columns, stream);
}

TPK_API int tpk_all_reduce_norm(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x,
                                const void* bias, const tpk_norm* norm, void* out, int64_t rows, int64_t columns,
                                void* stream) {
    TPK_TRY(check_sum(group, call, x, out, rows, columns));
    if (norm == nullptr) return refuse("norm is NULL");
    if ((norm->residual == nullptr || norm->weight == nullptr || norm->normed == nullptr || norm->scales == nullptr) &&
        rows * columns != 0) {
        return refuse("residual, weight, normed or scales is NULL");
    }
    return of_dtype<InOneStepWithNorm>(dtype, *group, *call, x, bias, *norm, out, rows, columns, stream);
}

TPK_API int64_t tpk_two_shot_slot_bytes(int64_t bytes, int32_t world_size) {
    return 2 * world_size * part_bytes(bytes, world_size);
}

TPK_API int tpk_all_reduce_two_shot(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x,
                                    const void* bias, void* out, int64_t rows, int64_t columns, void* stream) {
    TPK_TRY(check_sum(group, call, x, out, rows, columns));
    return of_dtype<InTwoSteps>(dtype, *group, *call, x, bias, out, rows, columns, stream);
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
