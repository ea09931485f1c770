// The copy pipeline: chunks move by the copy engines on side streams, each with what it waits for and whom it tells.
//
// Owns the side streams and two kinds of events: one that forks the side streams from the caller's stream, and one per
// side stream that joins it again.  Both work in capture.
#include <cuda.h>

#include <memory>
#include <new>
#include <vector>

#include "cuda/host.h"

using namespace tpk;

struct tpk_pipeline {
    std::vector<cudaStream_t> lanes;
    std::vector<cudaEvent_t> ends;
    cudaEvent_t begin = nullptr;

    ~tpk_pipeline() {
        for (cudaStream_t lane : lanes) cudaStreamDestroy(lane);
        for (cudaEvent_t end : ends) cudaEventDestroy(end);
        if (begin != nullptr) cudaEventDestroy(begin);
    }
};

namespace {

// The driver is not linked: this library must load where there is none.
template <typename Function>
Function driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<Function>(found);
}

using WriteValue32 = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// The results of the driver and of the runtime have the same numbers.
int write_value(cudaStream_t stream, std::uint32_t* word, std::uint32_t value) {
    static const auto write = driver_function<WriteValue32>("cuStreamWriteValue32");
    if (write == nullptr) return static_cast<int>(cudaErrorNotSupported);
    return static_cast<int>(write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

struct Raise {
    int how;
    std::uint32_t epoch;
};

int tell(const tpk_group& group, const tpk_chunk& chunk, Raise raise, cudaStream_t lane) {
    if (chunk.raise_flag != nullptr) {
        switch (raise.how) {
            case TPK_RAISE_COPY:  // the epoch is the low half of State.current, which comes first
                TPK_TRY(cudaMemcpyAsync(chunk.raise_flag, group.state, sizeof(Epoch), cudaMemcpyDefault, lane));
                break;
            case TPK_RAISE_WRITE_VALUE:
                TPK_TRY(write_value(lane, chunk.raise_flag, raise.epoch));
                break;
            default:
                TPK_TRY(tpk_raise_flag(&group, chunk.raise_flag, lane));
        }
    }
    if (chunk.signal_peer < 0) return 0;
    return tpk_signal(&group, chunk.chunk, std::uint64_t{1} << chunk.signal_peer, lane);
}

int check_chunk(const tpk_group& group, const tpk_chunk& chunk) {
    TPK_TRY(check_range("chunk", chunk.chunk, 0, kMaxChunks - 1));
    TPK_TRY(check_range("wait_peer", chunk.wait_peer, -1, group.world_size - 1));
    TPK_TRY(check_range("signal_peer", chunk.signal_peer, -1, group.world_size - 1));
    TPK_TRY(check_range("rows", chunk.rows, 0, INT64_MAX));
    TPK_TRY(check_range("row_bytes", chunk.row_bytes, 0, INT64_MAX));
    if (chunk.rows * chunk.row_bytes == 0) return 0;
    if (chunk.target == nullptr || chunk.source == nullptr)
        return refuse("target or source of chunk %d is NULL", chunk.chunk);
    if (chunk.rows > 1) {
        TPK_TRY(check_range("target_stride_bytes", chunk.target_stride_bytes, chunk.row_bytes, INT64_MAX));
        TPK_TRY(check_range("source_stride_bytes", chunk.source_stride_bytes, chunk.row_bytes, INT64_MAX));
    }
    return 0;
}

// CUDA copies rows that are at most so far apart (cudaDeviceProp.memPitch): a batch of sequences of 128 Ki tokens of 16
// KiB each is further.  Such rows are few, because memory is finite; each is a copy of its own.
constexpr std::int64_t kMaxPitch = INT32_MAX;

int copy(const tpk_chunk& chunk, cudaStream_t lane) {
    const auto rows = static_cast<std::size_t>(chunk.rows), row_bytes = static_cast<std::size_t>(chunk.row_bytes);
    if (rows * row_bytes == 0 || chunk.target == chunk.source) return 0;
    const bool contiguous =
        rows == 1 || (chunk.target_stride_bytes == chunk.row_bytes && chunk.source_stride_bytes == chunk.row_bytes);
    if (contiguous) {
        return static_cast<int>(cudaMemcpyAsync(chunk.target, chunk.source, rows * row_bytes, cudaMemcpyDefault, lane));
    }
    if (chunk.target_stride_bytes <= kMaxPitch && chunk.source_stride_bytes <= kMaxPitch) {
        return static_cast<int>(cudaMemcpy2DAsync(chunk.target, static_cast<std::size_t>(chunk.target_stride_bytes),
                                                  chunk.source, static_cast<std::size_t>(chunk.source_stride_bytes),
                                                  row_bytes, rows, cudaMemcpyDefault, lane));
    }
    for (std::int64_t row = 0; row < chunk.rows; ++row) {
        TPK_TRY(cudaMemcpyAsync(static_cast<char*>(chunk.target) + row * chunk.target_stride_bytes,
                                static_cast<const char*>(chunk.source) + row * chunk.source_stride_bytes, row_bytes,
                                cudaMemcpyDefault, lane));
    }
    return 0;
}

}  // namespace

TPK_API int tpk_has_write_value(int* has) {
    int devices = 0;
    TPK_TRY(cudaGetDeviceCount(&devices));
    *has = driver_function<WriteValue32>("cuStreamWriteValue32") != nullptr;
    return 0;
}

TPK_API int tpk_pipeline_create(int32_t streams, tpk_pipeline** pipeline) {
    TPK_TRY(check_range("streams", streams, 1, kMaxRanks));
    if (pipeline == nullptr) return refuse("pipeline is NULL");
    auto made = std::unique_ptr<tpk_pipeline>(new (std::nothrow) tpk_pipeline);
    if (made == nullptr) return static_cast<int>(cudaErrorMemoryAllocation);
    // Copies and signals are what others wait for: they go before the GEMM where both could run.
    int least = 0, greatest = 0;
    TPK_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    TPK_TRY(cudaEventCreateWithFlags(&made->begin, cudaEventDisableTiming));
    for (int32_t i = 0; i < streams; ++i) {
        cudaStream_t lane = nullptr;
        TPK_TRY(cudaStreamCreateWithPriority(&lane, cudaStreamNonBlocking, greatest));
        made->lanes.push_back(lane);
        cudaEvent_t end = nullptr;
        TPK_TRY(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
        made->ends.push_back(end);
    }
    *pipeline = made.release();
    return 0;
}

TPK_API int tpk_pipeline_destroy(tpk_pipeline* pipeline) {
    delete pipeline;
    return 0;
}

TPK_API int tpk_pipeline_stream(const tpk_pipeline* pipeline, int32_t lane, void** stream) {
    if (pipeline == nullptr || stream == nullptr) return refuse("pipeline or stream is NULL");
    TPK_TRY(check_range("lane", lane, 0, static_cast<long long>(pipeline->lanes.size()) - 1));
    *stream = pipeline->lanes[static_cast<std::size_t>(lane)];
    return 0;
}

TPK_API int tpk_pipeline_fork(tpk_pipeline* pipeline, void* stream) {
    if (pipeline == nullptr) return refuse("pipeline is NULL");
    TPK_TRY(cudaEventRecord(pipeline->begin, as_stream(stream)));
    for (cudaStream_t lane : pipeline->lanes) TPK_TRY(cudaStreamWaitEvent(lane, pipeline->begin, 0));
    return 0;
}

TPK_API int tpk_pipeline_join(tpk_pipeline* pipeline, void* stream) {
    if (pipeline == nullptr) return refuse("pipeline is NULL");
    for (std::size_t i = 0; i < pipeline->lanes.size(); ++i) {
        TPK_TRY(cudaEventRecord(pipeline->ends[i], pipeline->lanes[i]));
        TPK_TRY(cudaStreamWaitEvent(as_stream(stream), pipeline->ends[i], 0));
    }
    return 0;
}

TPK_API int tpk_pipeline_run(tpk_pipeline* pipeline, int32_t lane, const tpk_group* group, int32_t op,
                             const tpk_chunk* chunks, int64_t count, int32_t raise, uint32_t epoch_on_host) {
    TPK_TRY(check_group(group));
    if (pipeline == nullptr) return refuse("pipeline is NULL");
    TPK_TRY(check_range("lane", lane, 0, static_cast<long long>(pipeline->lanes.size()) - 1));
    TPK_TRY(check_range("raise", raise, TPK_RAISE_KERNEL, TPK_RAISE_WRITE_VALUE));
    // All of them before any of them is enqueued: half a call would hang the peers.
    for (int64_t i = 0; i < count; ++i) TPK_TRY(check_chunk(*group, chunks[i]));
    cudaStream_t stream = pipeline->lanes[static_cast<std::size_t>(lane)];
    if (raise == TPK_RAISE_WRITE_VALUE) {
        cudaStreamCaptureStatus status;
        TPK_TRY(cudaStreamIsCapturing(stream, &status));
        if (status != cudaStreamCaptureStatusNone)
            return refuse("WRITE_VALUE in capture: replays would repeat its value");
    }
    for (int64_t i = 0; i < count; ++i) {
        const tpk_chunk& chunk = chunks[i];
        if (chunk.wait_flag != nullptr) TPK_TRY(tpk_wait_flag(group, op, chunk.chunk, chunk.wait_flag, stream));
        if (chunk.wait_peer >= 0) {
            TPK_TRY(tpk_wait(group, op, chunk.chunk, std::uint64_t{1} << chunk.wait_peer, stream));
        }
        TPK_TRY(copy(chunk, stream));
        TPK_TRY(tell(*group, chunk, {raise, epoch_on_host}, stream));
    }
    return 0;
}
