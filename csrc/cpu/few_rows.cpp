// Checks at the door, which kernels run, and room for what a call packs.
#include "few_rows.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "few_rows_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tpk {
namespace {

constexpr int kNumIsas = 4;
constexpr std::uintptr_t kAlignment = 64;

const FewRowsKernels* kernels_of(int isa) {
    switch (static_cast<FewRowsIsa>(isa)) {
        case FewRowsIsa::kPortable:
            return portable_few_rows();
        case FewRowsIsa::kAvx2:
            return avx2_few_rows();
        case FewRowsIsa::kAvx512:
            return avx512_few_rows();
        case FewRowsIsa::kAmx:
            return amx_few_rows();
    }
    throw std::invalid_argument("isa: " + std::to_string(isa) + " is none of 0 to " + std::to_string(kNumIsas - 1));
}

#if defined(__x86_64__)
// Linux gives a process the tiles' state, 8 KiB more of each thread, when it asks; it refuses where it has none to
// give, and where an alternate signal stack is too small for it.
bool may_use_amx() {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    constexpr unsigned kTilesAndBf16 = 1U << 24 | 1U << 22;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTilesAndBf16) != kTilesAndBf16) return false;
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

FewRowsIsa detect_isa() {
    switch (best_isa()) {
        case Isa::kPortable:
            return FewRowsIsa::kPortable;
        case Isa::kAvx2:
            return FewRowsIsa::kAvx2;
        case Isa::kAvx512:
            break;
    }
#if defined(__x86_64__)
    if (amx_few_rows() != nullptr && may_use_amx()) return FewRowsIsa::kAmx;
#endif
    return FewRowsIsa::kAvx512;
}

std::atomic<FewRowsIsa>& isa_in_use() {
    static std::atomic<FewRowsIsa> isa{best_few_rows_isa()};
    return isa;
}

// The best instruction set that has kernels for this dtype; -1: none has.
int isa_for(Dtype dtype) {
    size_of(dtype);  // refuses what is no dtype
    int isa = static_cast<int>(isa_in_use().load(std::memory_order_relaxed));
    while (isa >= 0 && kernels_of(isa)->multiply[static_cast<std::size_t>(dtype)] == nullptr) --isa;
    return isa;
}

const char* name_of(FewRowsIsa isa) {
    switch (isa) {
        case FewRowsIsa::kPortable:
            return "portable";
        case FewRowsIsa::kAvx2:
            return "avx2";
        case FewRowsIsa::kAvx512:
            return "avx512";
        case FewRowsIsa::kAmx:
            return "amx";
    }
    return "unknown";
}

void check_count(const char* name, std::int64_t value, std::int64_t most) {
    if (value >= 0 && value <= most) return;
    throw std::invalid_argument(std::string(name) + " must be from 0 to " + std::to_string(most) + ", got " +
                                std::to_string(value));
}

// Kept by the thread for its next call: fresh pages would cost as much as a small product.
char* aligned_room(std::size_t bytes) {
    thread_local std::vector<char> room;
    if (room.size() < bytes + kAlignment) room.resize(bytes + kAlignment);
    const auto address = reinterpret_cast<std::uintptr_t>(room.data());
    return room.data() + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace

void multiply_few_rows(const FewRows& call) {
    constexpr std::int64_t kMost = std::int64_t{1} << 40;
    check_count("rows", call.rows, kMaxFewRows);
    check_count("columns", call.columns, kMost);
    check_count("contraction", call.contraction, kMost);
    const int isa = isa_for(call.dtype);
    if (isa < 0) {
        const auto dtype = std::to_string(static_cast<std::uint32_t>(call.dtype));
        throw std::invalid_argument("dtype: no kernel for few rows of " + dtype + " on this CPU");
    }
    if (call.rows == 0 || call.columns == 0) return;
    const FewRowsKernels& kernels = *kernels_of(isa);
    const auto dtype = static_cast<std::size_t>(call.dtype);
    const auto item = static_cast<std::int64_t>(size_of(call.dtype));
    const std::int64_t sums_bytes = (call.rows * call.columns * 4 + 63) / 64 * 64;
    char* room = aligned_room(static_cast<std::size_t>(sums_bytes + packed_bytes(call.rows, call.contraction)));
    auto* sums = reinterpret_cast<float*>(room);
    kernels.multiply[dtype](call, room + sums_bytes, sums);
    for (std::int64_t row = 0; row < call.rows; ++row) {
        kernels.finish[dtype](sums + row * call.columns, static_cast<const char*>(call.bias),
                              static_cast<char*>(call.y) + row * call.y_stride * item, call.columns);
    }
}

FewRowsIsa best_few_rows_isa() {
    static const FewRowsIsa isa = detect_isa();
    return isa;
}

void force_few_rows_isa(FewRowsIsa isa) {
    if (kernels_of(static_cast<int>(isa)) == nullptr || static_cast<int>(isa) > static_cast<int>(best_few_rows_isa())) {
        throw std::invalid_argument(std::string("isa: this CPU lacks ") + name_of(isa) + ", it has " +
                                    name_of(best_few_rows_isa()));
    }
    isa_in_use().store(isa, std::memory_order_relaxed);
}

const char* few_rows_isa_of(Dtype dtype) {
    const int isa = isa_for(dtype);
    return isa < 0 ? nullptr : name_of(static_cast<FewRowsIsa>(isa));
}

}  // namespace tpk
