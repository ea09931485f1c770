// Checks at the door, and which kernels run: chosen once from what the CPU has, then one relaxed load per call.
#include "reduce.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "reduce_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tpk {
namespace {

const Kernels* kernels_of(Isa isa) {
    switch (isa) {
        case Isa::kPortable:
            return portable_kernels();
        case Isa::kAvx2:
            return avx2_kernels();
        case Isa::kAvx512:
            return avx512_kernels();
    }
    throw std::invalid_argument("isa: " + std::to_string(static_cast<int>(isa)) + " is none of 0, 1, 2");
}

Isa detect_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    // __builtin_cpu_supports asks the operating system too, but not every compiler's knows "f16c".
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    if (!has_f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kPortable;
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return has_avx512 ? Isa::kAvx512 : Isa::kAvx2;
#else
    return Isa::kPortable;
#endif
}

// From the kernel: the C library's sysconf counted ten times too much (320 of 32 MiB on a virtual AMD EPYC,
// glibc 2.36).
std::int64_t last_level_cache_bytes() {
    constexpr std::int64_t kUnknown = 32 << 20;
    std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re");
    if (file == nullptr) return kUnknown;
    long kilobytes = 0;
    const int found = std::fscanf(file, "%ldK", &kilobytes);
    std::fclose(file);
    return found == 1 && kilobytes > 0 ? std::int64_t{kilobytes} << 10 : kUnknown;
}

std::atomic<Isa>& isa_in_use() {
    static std::atomic<Isa> isa{best_isa()};
    return isa;
}

// Sum of two bf16 parts, then a reader of the result; ordinary against streaming stores, in us: 4 MiB 325 : 364, 8 MiB
// 926 : 844, 16 MiB 2531 : 2188. Copy, then a reader: 4 MiB 221 : 264, 8 MiB 607 : 560, 16 MiB 1805 : 1557 (one core
// of an AMD EPYC 9004 series, 32 MiB of last-level cache, 2026-11). A large cache of many cores is not one core's: on an
// Intel Xeon with AMX, which reports 105 MiB, bare loops of 64-byte vectors took, adding two: 2 MiB 548 : 635, 4 MiB
// 1380 : 1307, 8 MiB 3223 : 2748, 16 MiB 7271 : 5878; copying: 1 MiB 241 : 324, 2 MiB 627 : 581, 4 MiB 1377 : 983, 16 MiB
// 6223 : 4622.
std::atomic<std::int64_t>& threshold_in_use() {
    static std::atomic<std::int64_t> bytes{std::min(last_level_cache_bytes() / 4 * 3, std::int64_t{12} << 20)};
    return bytes;
}

const Kernels& active_kernels() { return *kernels_of(active_isa()); }

void check_count(const char* name, std::int64_t value, std::int64_t least) {
    if (value >= least) return;
    throw std::invalid_argument(std::string(name) + " must be at least " + std::to_string(least) + ", got " +
                                std::to_string(value));
}

// Decided from all bytes read and written: when they fit the last-level cache, so may whoever reads the output next.
void plan_memory_traffic(SumCall& call, std::int64_t element_bytes, std::int64_t whole_bytes) {
    constexpr std::int64_t kPartsFollowedByHardware = 8;
    const std::int64_t touched = (call.num_parts + 1) * call.rows * call.columns * element_bytes;
    const bool is_large = std::max(touched, whole_bytes) >= streaming_threshold_bytes();
    call.prefetch = touched >= streaming_threshold_bytes() && call.num_parts > kPartsFollowedByHardware;
    // Streaming stores go to aligned addresses, which whole elements must reach, and lose on a line just read.
    const auto misaligned = reinterpret_cast<std::uintptr_t>(call.out) % static_cast<std::uintptr_t>(element_bytes);
    call.stream = is_large && misaligned == 0;
    for (std::int64_t p = 0; p < call.num_parts; ++p) {
        if (call.parts[p].data == call.out) call.stream = false;
    }
}

}  // namespace

std::size_t size_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32:
            return 4;
        case Dtype::kBFloat16:
        case Dtype::kFloat16:
            return 2;
        case Dtype::kFloat64:
            return 8;
    }
    throw std::invalid_argument("dtype: " + std::to_string(static_cast<std::uint32_t>(dtype)) +
                                " is none of 0 (float32), 1 (bfloat16), 2 (float16), 3 (float64)");
}

void sum_rows(Dtype dtype, const ConstRows* parts, int num_parts, const void* bias, void* out, std::int64_t out_stride,
              std::int64_t rows, std::int64_t columns, std::int64_t whole_bytes) {
    check_count("num_parts", num_parts, 1);
    check_count("rows", rows, 0);
    check_count("columns", columns, 0);
    const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
    if (rows == 0 || columns == 0) return;
    SumCall call{parts, num_parts, bias, out, out_stride, rows, columns, false, false};
    // Rows that lie back to back are one long row: fewer ends to treat.
    bool back_to_back = bias == nullptr && out_stride == columns;
    for (int p = 0; p < num_parts; ++p) back_to_back = back_to_back && parts[p].stride == columns;
    if (back_to_back) {
        call.columns = rows * columns;
        call.rows = 1;
    }
    plan_memory_traffic(call, element_bytes, whole_bytes);
    active_kernels().sum[static_cast<std::size_t>(dtype)](call);
}

void copy_rows(const void* src, std::int64_t src_stride_bytes, void* dst, std::int64_t dst_stride_bytes,
               std::int64_t rows, std::int64_t row_bytes, std::int64_t whole_bytes) {
    check_count("rows", rows, 0);
    check_count("row_bytes", row_bytes, 0);
    if (rows == 0 || row_bytes == 0) return;
    if (src_stride_bytes == row_bytes && dst_stride_bytes == row_bytes) {
        row_bytes *= rows;
        rows = 1;
    }
    const auto copy_streaming = active_kernels().copy_streaming;
    const std::int64_t touched = std::max(2 * rows * row_bytes, whole_bytes);
    const bool stream = copy_streaming != nullptr && touched >= streaming_threshold_bytes();
    for (std::int64_t row = 0; row < rows; ++row) {
        const char* from = static_cast<const char*>(src) + row * src_stride_bytes;
        char* to = static_cast<char*>(dst) + row * dst_stride_bytes;
        if (stream) {
            copy_streaming(from, to, row_bytes);
        } else {
            std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
        }
    }
}

Isa best_isa() {
    static const Isa isa = detect_isa();
    return isa;
}

Isa active_isa() { return isa_in_use().load(std::memory_order_relaxed); }

void force_isa(Isa isa) {
    if (kernels_of(isa) == nullptr || static_cast<int>(isa) > static_cast<int>(best_isa())) {
        throw std::invalid_argument(std::string("isa: this CPU lacks ") + name_of(isa) + ", it has " +
                                    name_of(best_isa()));
    }
    isa_in_use().store(isa, std::memory_order_relaxed);
}

const char* name_of(Isa isa) {
    switch (isa) {
        case Isa::kPortable:
            return "portable";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kAvx512:
            return "avx512";
    }
    return "unknown";
}

std::int64_t streaming_threshold_bytes() { return threshold_in_use().load(std::memory_order_relaxed); }

void force_streaming_threshold(std::int64_t bytes) { threshold_in_use().store(bytes, std::memory_order_relaxed); }

}  // namespace tpk
