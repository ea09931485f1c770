// Just enough of CUDA for csrc/cuda/*.cu on a CPU: a stream is a thread with a queue, a kernel is a function.
//
// The default stream (NULL) is the caller: what is launched on it has been done when the launch returns.  So a call that
// enqueues a wait before what it waits for hangs here, as it may on a GPU.  Blocks of a kernel run one after the other
// with one thread each: what threads do to each other is for tests/cuda/ranks.cpp to show.
//
// It counts what is asked of the driver, and can be told to do nothing else.  It can also have one hardware queue, as
// CUDA has with CUDA_DEVICE_MAX_CONNECTIONS=1: a kernel of any stream starts only when all that were launched before it
// have started.  Of that queue's other inhabitants (events, what the driver puts there for copies) it knows nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

using cudaError_t = int;
enum : int {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorNotSupported = 801
};
enum { cudaHostAllocMapped = 2, cudaHostAllocPortable = 1, cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1 };
enum { cudaEnableDefault = 0, cudaMemcpyDefault = 4 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
#define CUDART_VERSION 13000
#define __global__

namespace emulated {

// What the driver was asked for: a call each.
struct Calls {
    unsigned kernels, copies, records, event_waits, stream_writes;
};
inline Calls calls = {};
inline bool only_counts = false;  // and drops what it is asked for

// The hardware queue: kernels start in the order of their numbers.
struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned launched = 0, started = 0;

    unsigned number() {
        const std::lock_guard<std::mutex> lock(mutex);
        return launched++;
    }
    void start(unsigned number) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return started == number; });
        ++started;
        changed.notify_all();
    }
};
inline Queue* one_queue = nullptr;

// Every task of a side stream may be late by up to so many microseconds.
inline unsigned most_late_us = 0, seed = 0;

// Blocks of the kernel that was launched last.
inline std::atomic<unsigned> last_blocks = 0;

struct Moment {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;

    void reach() {
        const std::lock_guard<std::mutex> lock(mutex);
        reached = true;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return reached; });
    }
};

class Stream {
public:
    Stream() : thread_([this] { run(); }) {}
    ~Stream() {
        push(nullptr);
        thread_.join();
    }
    void push(std::function<void()> task) {
        const std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
        changed_.notify_one();
    }

private:
    void run() {
        std::mt19937 random(seed++);
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [this] { return !tasks_.empty(); });
                task = std::move(tasks_.front());
                tasks_.pop_front();
            }
            if (!task) return;
            if (most_late_us > 0 && random() % 4 == 0)
                std::this_thread::sleep_for(std::chrono::microseconds(random() % most_late_us));
            task();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> tasks_;
    std::thread thread_;
};

struct Event {
    std::shared_ptr<Moment> last;
};

inline int enqueue(Stream* stream, std::function<void()> task) {
    if (only_counts) return cudaSuccess;
    if (stream == nullptr) {
        task();
    } else {
        stream->push(std::move(task));
    }
    return cudaSuccess;
}

// Arguments are copied when the kernel is launched, as CUDA does.
template <typename Kernel, typename... Arguments>
void launch(unsigned blocks, Stream* stream, Kernel kernel, Arguments... arguments) {
    last_blocks = blocks;
    ++calls.kernels;
    Queue* const queue = only_counts ? nullptr : one_queue;
    const unsigned number = queue == nullptr ? 0 : queue->number();
    enqueue(stream, [=] {
        if (queue != nullptr) queue->start(number);
        for (unsigned block = 0; block < blocks; ++block) {
            tpk::simulated = {0, block, 1, blocks, [](void*, bool mine) { return mine; }, nullptr};
            kernel(arguments...);
        }
    });
}

}  // namespace emulated

using cudaStream_t = emulated::Stream*;
using cudaEvent_t = emulated::Event*;
struct cudaFuncAttributes {};

template <typename Kernel>
int cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
    return cudaSuccess;
}
inline int cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(int) { return "an error of the emulated runtime"; }
inline int cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline int cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
enum cudaDeviceP2PAttr { cudaDevP2PAttrNativeAtomicSupported };
inline int cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) { return *value = 1, cudaSuccess; }
inline int cudaHostAlloc(void** memory, std::size_t size, unsigned) {
    return *memory = std::calloc(1, size), *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline int cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
inline int cudaFreeHost(void* memory) { return std::free(memory), cudaSuccess; }

inline int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
inline int cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return *stream = new emulated::Stream, cudaSuccess;
}
inline int cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return *stream = new emulated::Stream, cudaSuccess;
}
inline int cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline int cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = new emulated::Event, cudaSuccess; }
inline int cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline int cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ++emulated::calls.records;
    if (emulated::only_counts) return cudaSuccess;
    auto moment = event->last = std::make_shared<emulated::Moment>();
    return emulated::enqueue(stream, [moment] { moment->reach(); });
}
inline int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ++emulated::calls.event_waits;
    return emulated::enqueue(stream, [moment = event->last] {
        if (moment) moment->wait();
    });
}
inline int cudaMemcpyAsync(void* target, const void* source, std::size_t size, int, cudaStream_t stream) {
    ++emulated::calls.copies;
    return emulated::enqueue(stream, [=] { std::memcpy(target, source, size); });
}
inline int cudaMemcpy(void* target, const void* source, std::size_t size, int) {
    return std::memcpy(target, source, size), cudaSuccess;
}
inline int cudaMalloc(void** memory, std::size_t size) {
    return *memory = std::calloc(1, size), *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline int cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline int cudaStreamSynchronize(cudaStream_t stream) {
    auto moment = std::make_shared<emulated::Moment>();
    emulated::enqueue(stream, [moment] { moment->reach(); });
    if (!emulated::only_counts) moment->wait();
    return cudaSuccess;
}
inline int cudaMemcpy2DAsync(void* target, std::size_t target_stride, const void* source, std::size_t source_stride,
                             std::size_t width, std::size_t height, int, cudaStream_t stream) {
    if (target_stride > 0x7fffffff || source_stride > 0x7fffffff) return cudaErrorInvalidPitchValue;  // memPitch
    ++emulated::calls.copies;
    return emulated::enqueue(stream, [=] {
        for (std::size_t row = 0; row < height; ++row) {
            std::memcpy(static_cast<char*>(target) + row * target_stride,
                        static_cast<const char*>(source) + row * source_stride, width);
        }
    });
}

// ------------------------------------------------------------------------------------------------------------ driver

using CUresult = int;
using CUstream = cudaStream_t;
using CUdeviceptr = std::uintptr_t;
using cuuint32_t = std::uint32_t;
enum { CU_STREAM_WRITE_VALUE_DEFAULT = 0, CU_STREAM_MEM_OP_WRITE_VALUE_32 = 2 };
struct CUstreamBatchMemOpParams {
    struct {
        int operation;
        CUdeviceptr address;
        cuuint32_t value;
        unsigned flags;
    } writeValue;
};

namespace emulated {

inline int write(cudaStream_t stream, CUdeviceptr address, cuuint32_t value) {
    return enqueue(stream, [=] { __atomic_store_n(reinterpret_cast<cuuint32_t*>(address), value, __ATOMIC_RELEASE); });
}
inline int write_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
    ++calls.stream_writes;
    return write(stream, address, value);
}
inline int batch(CUstream stream, unsigned count, CUstreamBatchMemOpParams* writes, unsigned) {
    ++calls.stream_writes;
    for (unsigned i = 0; i < count; ++i) write(stream, writes[i].writeValue.address, writes[i].writeValue.value);
    return cudaSuccess;
}

}  // namespace emulated

inline int cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, int,
                                            cudaDriverEntryPointQueryResult* result) {
    *found = nullptr;
    if (std::strcmp(name, "cuStreamWriteValue32") == 0) *found = reinterpret_cast<void*>(emulated::write_value);
    if (std::strcmp(name, "cuStreamBatchMemOp") == 0) *found = reinterpret_cast<void*>(emulated::batch);
    *result = *found == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
