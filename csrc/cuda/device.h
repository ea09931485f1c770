// The vocabulary of device code, twice: for nvcc, and for g++ with every CUDA thread an ordinary thread.
//
// Kernels use nothing but what is here, so that ThreadSanitizer can watch the very source that nvcc compiles.  Memory
// orders: the `system` functions synchronise with other GPUs and with the host, `device` ones within one GPU.  On the
// CPU they are C++ atomics of the same order.  What a block must agree on goes through `any_of_block`; a block that sums
// has `room_of_block`, its shared memory.
//
// Loads of peers' data are plain loads: never mark their pointers __restrict__ or use __ldg, the compiler would read
// through a cache that acquiring does not refresh.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

// One block, a warp of it: 32 registers a thread, so that it finds room beside the largest CTAs of others (README.md).
#define TPK_KERNEL __global__ void __launch_bounds__(64, 32)
// 64 registers a thread. Unasked, the assembler aims at less and spills (sm_80: 8 bytes at 48).
#define TPK_KERNEL_OF(threads) __global__ void __launch_bounds__(threads, 1024 / (threads))
#define TPK_DEVICE __device__ __forceinline__
// Kernel arguments stay in constant memory: indexing the table of peers needs no copy of it on the stack.
#define TPK_ARGUMENT const __grid_constant__
#define TPK_UNROLL _Pragma("unroll")
#define TPK_DO_NOT_UNROLL _Pragma("unroll 1")

namespace tpk {

constexpr int kStrip = 32;  // threads that load together

TPK_DEVICE unsigned thread_index() { return threadIdx.x; }
TPK_DEVICE unsigned block_index() { return blockIdx.x; }
TPK_DEVICE unsigned num_threads() { return blockDim.x; }
TPK_DEVICE unsigned num_blocks() { return gridDim.x; }

TPK_DEVICE void sync_block() { __syncthreads(); }
TPK_DEVICE bool any_of_block(bool mine) { return __syncthreads_or(mine) != 0; }
// Of the block's own, the same at every call.
template <unsigned kFloats>
TPK_DEVICE float* room_of_block() {
    __shared__ float room[kFloats];
    return room;
}

TPK_DEVICE std::uint64_t load_acquire_system(const std::uint64_t* word) {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
TPK_DEVICE std::uint32_t load_acquire_system(const std::uint32_t* word) {
    std::uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
TPK_DEVICE void store_release_system(std::uint64_t* word, std::uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
TPK_DEVICE void store_release_system(std::uint32_t* word, std::uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
TPK_DEVICE std::uint64_t load_relaxed_system(const std::uint64_t* word) {
    std::uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
TPK_DEVICE std::uint32_t load_relaxed_device(const std::uint32_t* word) {
    std::uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
TPK_DEVICE std::uint32_t fetch_add_device(std::uint32_t* word, std::uint32_t value) {
    std::uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}
// Whether this thread, and no other before it, turned 0 into 1.
TPK_DEVICE bool claim_device(std::uint32_t* word) {
    std::uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(word) : "memory");
    return before == 0;
}

TPK_DEVICE std::uint64_t time_ns() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
TPK_DEVICE void pause() { __nanosleep(40); }

struct alignas(16) Bytes16 {
    std::uint32_t word[4];
};
TPK_DEVICE Bytes16 load16(const void* from) {
    const uint4 v = *static_cast<const uint4*>(from);
    return {{v.x, v.y, v.z, v.w}};
}
TPK_DEVICE void store16(void* to, Bytes16 v) {
    *static_cast<uint4*>(to) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

// NVLS: a store to a multicast address reaches the same place on every rank.  Only these stores may use such an address.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasMulticast = true;
TPK_DEVICE void multicast16(void* to, Bytes16 v) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]),
                 "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}
#else
constexpr bool kHasMulticast = false;
TPK_DEVICE void multicast16(void*, Bytes16) {}
#endif
// Orders this thread's accesses before and after it that reach one memory through different addresses.
TPK_DEVICE void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

__host__ __device__ __forceinline__ bool is_aligned(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}
TPK_DEVICE float bits_to_float(std::uint32_t bits) { return __uint_as_float(bits); }
TPK_DEVICE std::uint32_t float_to_bits(float value) { return __float_as_uint(value); }
TPK_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
TPK_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
TPK_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
TPK_DEVICE float square_root(float a) { return __fsqrt_rn(a); }

}  // namespace tpk

#else  // ---------------------------------------------------------------------------------- ordinary threads, for tests

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#define TPK_KERNEL inline void
#define TPK_KERNEL_OF(threads) inline void
#define TPK_DEVICE inline
#define TPK_ARGUMENT const
#define TPK_UNROLL
#define TPK_DO_NOT_UNROLL

namespace tpk {

constexpr int kStrip = 2;  // as above; narrow, so that few threads already make several strips

// What a thread is told before it runs a kernel; `vote` is a barrier that also ors (tests/cuda/simulator.h).
struct SimulatedThread {
    unsigned thread = 0, block = 0, threads = 1, blocks = 1;
    bool (*vote)(void* block, bool mine) = nullptr;
    void* block_state = nullptr;
    float* room = nullptr;
};
inline thread_local SimulatedThread simulated;

TPK_DEVICE unsigned thread_index() { return simulated.thread; }
TPK_DEVICE unsigned block_index() { return simulated.block; }
TPK_DEVICE unsigned num_threads() { return simulated.threads; }
TPK_DEVICE unsigned num_blocks() { return simulated.blocks; }

TPK_DEVICE bool any_of_block(bool mine) { return simulated.vote(simulated.block_state, mine); }
TPK_DEVICE void sync_block() { any_of_block(false); }
// A block's, if it has several threads; else the thread's.
template <unsigned kFloats>
TPK_DEVICE float* room_of_block() {
    static thread_local float alone[kFloats];
    return simulated.room != nullptr ? simulated.room : alone;
}

TPK_DEVICE std::uint64_t load_acquire_system(const std::uint64_t* word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
TPK_DEVICE std::uint32_t load_acquire_system(const std::uint32_t* word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
TPK_DEVICE void store_release_system(std::uint64_t* word, std::uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
TPK_DEVICE void store_release_system(std::uint32_t* word, std::uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
TPK_DEVICE std::uint64_t load_relaxed_system(const std::uint64_t* word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
TPK_DEVICE std::uint32_t load_relaxed_device(const std::uint32_t* word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
TPK_DEVICE std::uint32_t fetch_add_device(std::uint32_t* word, std::uint32_t value) {
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
TPK_DEVICE bool claim_device(std::uint32_t* word) {
    std::uint32_t expected = 0;
    return __atomic_compare_exchange_n(word, &expected, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

TPK_DEVICE std::uint64_t time_ns() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
TPK_DEVICE void pause() { std::this_thread::yield(); }

struct alignas(16) Bytes16 {
    std::uint32_t word[4];
};
TPK_DEVICE Bytes16 load16(const void* from) { return *static_cast<const Bytes16*>(from); }
TPK_DEVICE void store16(void* to, Bytes16 v) { *static_cast<Bytes16*>(to) = v; }

// What a multicast address is, a test decides (tests/cuda/multicast.h).
constexpr bool kHasMulticast = true;
inline void (*simulated_multicast)(void* to, Bytes16 v) = nullptr;
inline void (*simulated_fence)() = nullptr;
TPK_DEVICE void multicast16(void* to, Bytes16 v) { simulated_multicast(to, v); }
TPK_DEVICE void fence_aliases() { simulated_fence(); }

TPK_DEVICE bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }
TPK_DEVICE float bits_to_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
TPK_DEVICE std::uint32_t float_to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
TPK_DEVICE float add(float a, float b) { return a + b; }
TPK_DEVICE float multiply(float a, float b) { return a * b; }
TPK_DEVICE float divide(float a, float b) { return a / b; }
TPK_DEVICE float square_root(float a) { return std::sqrt(a); }

}  // namespace tpk

#endif
