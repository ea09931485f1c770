// The copy pipeline: chunks move by the copy engines on side streams, each with what it waits for and whom it tells.
//
// Owns the side streams and two kinds of events: one that forks the side streams from the caller's stream, and one per
// side stream that joins it again.  Both work in capture.  What a call asks of the driver has a budget:
// tests/cuda/test_driver_calls.py.
#include <memory>
#include <new>
#include <vector>

#include "cuda/host.h"
#include "cuda/stream_writes.h"

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

struct Copy {
    char* target;
    const char* source;
};

// Where a chunk's ends are in this call.
Copy ends_of(const tpk_chunk& chunk, const void* const* bases) {
    const auto at = [&](std::int64_t place, std::int32_t base) {
        const std::uintptr_t start = base == 0 ? 0 : reinterpret_cast<std::uintptr_t>(bases[base - 1]);
        return start + static_cast<std::uintptr_t>(place);
    };
    return {reinterpret_cast<char*>(at(chunk.target, chunk.target_base)),
            reinterpret_cast<const char*>(at(chunk.source, chunk.source_base))};
}

int check_chunk(const tpk_call& call, const tpk_chunk& chunk, const void* const* bases, int num_bases) {
    const std::uint64_t ranks = ~std::uint64_t{0} >> (kMaxRanks - call.group->world_size);
    TPK_TRY(check_range("chunk", chunk.chunk, 0, kMaxChunks - 1));
    TPK_TRY(check_range("lane", chunk.lane, -1, static_cast<long long>(call.pipeline->lanes.size()) - 1));
    TPK_TRY(check_range("target_base", chunk.target_base, 0, num_bases));
    TPK_TRY(check_range("source_base", chunk.source_base, 0, num_bases));
    const std::uint64_t told = chunk.wait_peers | chunk.signal_peers, flagged = chunk.wait_ranks | chunk.raise_ranks;
    if (((told | flagged) & ~ranks) != 0)
        return refuse("chunk %d names ranks beyond the world_size (%d)", chunk.chunk, call.group->world_size);
    if ((told | flagged) != 0 && chunk.lane < 0) return refuse("chunk %d waits or tells, but has no lane", chunk.chunk);
    if (flagged != 0 && chunk.flags == nullptr) return refuse("flags of chunk %d is NULL", chunk.chunk);
    TPK_TRY(check_range("rows", chunk.rows, 0, INT64_MAX));
    TPK_TRY(check_range("row_bytes", chunk.row_bytes, 0, INT64_MAX));
    if (chunk.rows * chunk.row_bytes == 0) return 0;
    const Copy ends = ends_of(chunk, bases);
    if (ends.target == nullptr || ends.source == nullptr)
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

int copy(const tpk_chunk& chunk, Copy ends, cudaStream_t lane) {
    const auto rows = static_cast<std::size_t>(chunk.rows), row_bytes = static_cast<std::size_t>(chunk.row_bytes);
    if (rows * row_bytes == 0 || ends.target == ends.source) return 0;
    const bool contiguous =
        rows == 1 || (chunk.target_stride_bytes == chunk.row_bytes && chunk.source_stride_bytes == chunk.row_bytes);
    if (contiguous) {
        return static_cast<int>(cudaMemcpyAsync(ends.target, ends.source, rows * row_bytes, cudaMemcpyDefault, lane));
    }
    if (chunk.target_stride_bytes <= kMaxPitch && chunk.source_stride_bytes <= kMaxPitch) {
        return static_cast<int>(cudaMemcpy2DAsync(ends.target, static_cast<std::size_t>(chunk.target_stride_bytes),
                                                  ends.source, static_cast<std::size_t>(chunk.source_stride_bytes),
                                                  row_bytes, rows, cudaMemcpyDefault, lane));
    }
    for (std::int64_t row = 0; row < chunk.rows; ++row) {
        TPK_TRY(cudaMemcpyAsync(ends.target + row * chunk.target_stride_bytes,
                                ends.source + row * chunk.source_stride_bytes, row_bytes, cudaMemcpyDefault, lane));
    }
    return 0;
}

int raise(const tpk_call& call, const tpk_chunk& chunk, cudaStream_t lane) {
    switch (call.how) {
        case TPK_RAISE_COPY:  // of State.raised, which comes first
            for (int rank = 0; rank < call.group->world_size; ++rank) {
                if ((chunk.raise_ranks >> rank & 1) == 0) continue;
                TPK_TRY(cudaMemcpyAsync(chunk.flags + rank * chunk.flag_stride, call.group->state,
                                        sizeof(std::uint32_t), cudaMemcpyDefault, lane));
            }
            return 0;
        case TPK_RAISE_WRITE_VALUE:
            return write_values(lane, chunk.flags, chunk.flag_stride, chunk.raise_ranks, call.raised_value);
        default:
            return launch_raise(*call.group, chunk.flags, chunk.flag_stride, chunk.raise_ranks, lane);
    }
}

// Signals of a copy wait for the next one's waits on their side stream, so that one kernel does both.
int move(const tpk_call& call, const void* const* bases, cudaStream_t stream) {
    std::vector<Relay> relays(call.pipeline->lanes.size());
    const auto flush = [&](std::size_t lane) {
        Relay job = relays[lane];
        if ((job.signal_peers | job.wait_peers | job.wait_ranks) == 0) return 0;
        relays[lane] = {};
        job.op = call.op;
        return launch_relay(*call.group, job, call.pipeline->lanes[lane]);
    };
    for (std::int64_t i = 0; i < call.num_chunks; ++i) {
        const tpk_chunk& chunk = call.chunks[i];
        if (chunk.lane < 0) {
            TPK_TRY(copy(chunk, ends_of(chunk, bases), stream));
            continue;
        }
        const auto lane = static_cast<std::size_t>(chunk.lane);
        Relay& next = relays[lane];
        next.wait_peers = chunk.wait_peers;
        next.wait_ranks = chunk.wait_ranks;
        next.flags = chunk.flags;
        next.flag_stride = chunk.flag_stride;
        next.wait_chunk = chunk.chunk;
        TPK_TRY(flush(lane));
        TPK_TRY(copy(chunk, ends_of(chunk, bases), call.pipeline->lanes[lane]));
        if (chunk.raise_ranks != 0) TPK_TRY(raise(call, chunk, call.pipeline->lanes[lane]));
        next.signal_peers = chunk.signal_peers;
        next.signal_chunk = chunk.chunk;
    }
    for (std::size_t lane = 0; lane < relays.size(); ++lane) {
        relays[lane].wait_peers = relays[lane].wait_ranks = 0;
        TPK_TRY(flush(lane));
    }
    return 0;
}

}  // namespace

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

TPK_API int tpk_call_run(const tpk_call* call, int32_t steps, const void* const* bases, int32_t num_bases,
                         void* stream) {
    if (call == nullptr || call->pipeline == nullptr) return refuse("call or its pipeline is NULL");
    TPK_TRY(check_group(call->group));
    TPK_TRY(check_range("steps", steps, 1, TPK_BEGIN | TPK_MOVE | TPK_JOIN | TPK_END));
    if ((steps & TPK_MOVE) != 0) {
        TPK_TRY(check_range("how", call->how, TPK_RAISE_KERNEL, TPK_RAISE_WRITE_VALUE));
        TPK_TRY(check_range("num_bases", num_bases, 0, INT32_MAX));
        // All of them before any of them is enqueued: half a call would hang the peers.
        for (std::int64_t i = 0; i < call->num_chunks; ++i)
            TPK_TRY(check_chunk(*call, call->chunks[i], bases, num_bases));
    }
    if ((steps & TPK_BEGIN) != 0) {
        TPK_TRY(tpk_begin(call->group, call->op, call->slot, call->fingerprint, call->flags, call->num_flags, stream));
        TPK_TRY(tpk_pipeline_fork(call->pipeline, stream));
    }
    if ((steps & TPK_MOVE) != 0) TPK_TRY(move(*call, bases, as_stream(stream)));
    if ((steps & TPK_JOIN) != 0) TPK_TRY(tpk_pipeline_join(call->pipeline, stream));
    return (steps & TPK_END) == 0 ? 0 : tpk_end(call->group, call->op, stream);
}
