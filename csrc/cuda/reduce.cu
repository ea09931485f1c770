// Launches of the reducer: types, alignment, grid.
#include "cuda/host.h"
#include "cuda/reduce_kernel.h"

namespace tpk {

namespace {

struct ReduceArguments {
    const tpk_group* group;
    int32_t op;
    const void* const* parts;
    const int64_t* strides;
    const void* bias;
    void* out;
    int64_t out_stride, rows, columns;
    int32_t num_chunks;
    void* stream;
};

template <typename In, typename Out>
int launch_reduce(const ReduceArguments& a) {
    Reduction<In, Out> job = {};
    job.vectors = is_aligned(a.out) && is_row_aligned(a.out_stride, sizeof(Out));
    for (int rank = 0; rank < a.group->world_size; ++rank) {
        if (a.parts[rank] == nullptr && a.rows * a.columns != 0) return refuse("parts[%d] is NULL", rank);
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
    const int blocks = plan_strips(job, kSumThreads, a.group->max_blocks);
    reduce<In, Out><<<blocks, kSumThreads, 0, as_stream(a.stream)>>>(to_device(*a.group), job);
    return launched();
}

}  // namespace

int load_reduce_kernels() {
    return load(reduce<float, float>, reduce<Bf16, Bf16>, reduce<Half, Half>, reduce<float, Bf16>, reduce<float, Half>,
                reduce<Bf16, float>, reduce<Half, float>);
}

}  // namespace tpk

using namespace tpk;

TPK_API int tpk_reduce(const tpk_group* group, int32_t op, int32_t part_dtype, int32_t out_dtype,
                       const void* const* parts, const int64_t* strides, const void* bias, void* out,
                       int64_t out_stride, int64_t rows, int64_t columns, int32_t num_chunks, void* stream) {
    TPK_TRY(check_group(group));
    TPK_TRY(check_range("num_chunks", num_chunks, 0, kMaxChunks));
    TPK_TRY(check_range("rows", rows, 0, INT64_MAX));
    TPK_TRY(check_range("columns", columns, 0, INT32_MAX));
    if (parts == nullptr || strides == nullptr) return refuse("parts or strides is NULL");
    if (out == nullptr && rows * columns != 0) return refuse("out is NULL");
    const ReduceArguments a = {group, op, parts, strides, bias, out, out_stride, rows, columns, num_chunks, stream};
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
        case TPK_BF16 * 8 + TPK_F32:
            return launch_reduce<Bf16, float>(a);
        case TPK_F16 * 8 + TPK_F32:
            return launch_reduce<Half, float>(a);
        default:
            return refuse("part_dtype (%d) and out_dtype (%d) must be equal, or one of them fp32", part_dtype,
                          out_dtype);
    }
}
