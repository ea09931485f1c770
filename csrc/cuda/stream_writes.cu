// cuStreamWriteValue32 and cuStreamBatchMemOp, found in the driver when first needed, and tried once.
#include <cuda.h>

#include "cuda/host.h"
#include "cuda/stream_writes.h"

namespace tpk {

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
using BatchMemOp = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

// CUDA_VERSION 12 and later give the second revision of both, which needs no switch of the kernel module.
WriteValue32 write_value_32() {
    static const auto found = driver_function<WriteValue32>("cuStreamWriteValue32");
    return found;
}
BatchMemOp batch_mem_op() {
    static const auto found = driver_function<BatchMemOp>("cuStreamBatchMemOp");
    return found;
}

}  // namespace

// The results of the driver and of the runtime have the same numbers.  The default flags of a write have a fence of
// system scope before it; in a batch each write has its own.
int write_values(cudaStream_t stream, std::uint32_t* words, int stride, std::uint64_t ranks, std::uint32_t value) {
    if (write_value_32() == nullptr || batch_mem_op() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    CUstreamBatchMemOpParams writes[kMaxRanks] = {};
    unsigned count = 0;
    for (int rank = 0; rank < kMaxRanks; ++rank) {
        if ((ranks >> rank & 1) == 0) continue;
        auto& write = writes[count++].writeValue;
        write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        write.address = reinterpret_cast<CUdeviceptr>(words + rank * stride);
        write.value = value;
        write.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    if (count != 1) return static_cast<int>(batch_mem_op()(stream, count, writes, 0));
    return static_cast<int>(
        write_value_32()(stream, writes[0].writeValue.address, value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

}  // namespace tpk

using namespace tpk;

TPK_API int tpk_has_write_value(int* has) {
    int devices = 0;
    *has = 0;
    TPK_TRY(cudaGetDeviceCount(&devices));
    std::uint32_t* words = nullptr;
    std::uint32_t seen[2] = {};
    TPK_TRY(cudaMalloc(reinterpret_cast<void**>(&words), sizeof(seen)));
    cudaStream_t stream = nullptr;
    int error = static_cast<int>(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (error == 0) {
        // A driver that refuses (a virtual GPU may) refuses here, and not within a call. Both ways of writing.
        const bool writes = write_values(stream, words, 1, 1, 1) == 0 && write_values(stream, words, 1, 3, 7) == 0;
        error = static_cast<int>(cudaStreamSynchronize(stream));
        if (error == 0) error = static_cast<int>(cudaMemcpy(seen, words, sizeof(seen), cudaMemcpyDefault));
        *has = error == 0 && writes && seen[0] == 7 && seen[1] == 7;
        cudaStreamDestroy(stream);
    }
    cudaFree(words);
    return error;
}
