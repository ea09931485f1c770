// Just enough of CUDA for csrc/cuda/*.cu on a CPU: a stream is a thread with a queue, a kernel is a function.
//
// The default stream (NULL) is the caller: what is launched on it has been done when the launch returns.  So a call that
// enqueues a wait before what it waits for hangs here, as it may on a GPU.  Blocks of a kernel run one after the other
// with one thread each: what threads do to each other is for tests/cuda/ranks.cpp to show.
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
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
#define CUDART_VERSION 13000
#define __global__

namespace emulated {

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
    enqueue(stream, [=] {
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
inline int cudaHostAlloc(void** memory, std::size_t size, unsigned) {
    return *memory = std::calloc(1, size), *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline int cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
inline int cudaFreeHost(void* memory) { return std::free(memory), cudaSuccess; }

inline int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
inline int cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return *stream = new emulated::Stream, cudaSuccess;
}
inline int cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline int cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
inline int cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = new emulated::Event, cudaSuccess; }
inline int cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline int cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    auto moment = event->last = std::make_shared<emulated::Moment>();
    return emulated::enqueue(stream, [moment] { moment->reach(); });
}
inline int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return emulated::enqueue(stream, [moment = event->last] {
        if (moment) moment->wait();
    });
}
inline int cudaMemcpyAsync(void* target, const void* source, std::size_t size, int, cudaStream_t stream) {
    return emulated::enqueue(stream, [=] { std::memcpy(target, source, size); });
}
inline int cudaMemcpy2DAsync(void* target, std::size_t target_stride, const void* source, std::size_t source_stride,
                             std::size_t width, std::size_t height, int, cudaStream_t stream) {
    if (target_stride > 0x7fffffff || source_stride > 0x7fffffff) return cudaErrorInvalidPitchValue;  // memPitch
    return emulated::enqueue(stream, [=] {
        for (std::size_t row = 0; row < height; ++row) {
            std::memcpy(static_cast<char*>(target) + row * target_stride,
                        static_cast<const char*>(source) + row * source_stride, width);
        }
    });
}
inline int cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int,
                                            cudaDriverEntryPointQueryResult* result) {
    return *found = nullptr, *result = cudaDriverEntryPointSymbolNotFound, cudaSuccess;
}
