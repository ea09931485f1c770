// GEMM of few rows for any CPU, in the compilers' vector types of 16 bytes (SSE2 on x86-64, NEON on aarch64). No fp16:
// neither baseline converts it, and integer arithmetic for each element of a weight would not beat a library.
#include "few_rows_kernels.h"

namespace tpk {
namespace {

#include "few_rows_numbers.h"

constexpr int kColumnsOfOneRow = 4;
constexpr int kColumnsOfRows = 2;

using Words = std::uint32_t __attribute__((vector_size(16)));
using Singles = float __attribute__((vector_size(16)));

struct __attribute__((packed, may_alias)) AnyWords {
    Words v;
};

// A plain access, not memcpy: see reduce_portable.cpp.
inline Words load_bytes(const char* from) { return reinterpret_cast<const AnyWords*>(from)->v; }
inline void store_bytes(char* to, Words v) { reinterpret_cast<AnyWords*>(to)->v = v; }
inline Words load_first_bytes(const char* from, std::int64_t bytes) {
    alignas(16) char buffer[16] = {};
    for (std::int64_t i = 0; i < bytes; ++i) buffer[i] = from[i];
    return load_bytes(buffer);
}

struct OneSum {
    using Sum = Singles;
    static Sum zero() { return Singles{}; }
    static float total(Sum sum) { return (sum[0] + sum[2]) + (sum[1] + sum[3]); }
};

struct Float32 : OneFloat32, OneSum {
    static constexpr std::int64_t kStep = 4;
    static constexpr std::int64_t kPackedBytes = 16;
    using Wide = Singles;
    static Wide load(const char* from) { return (Singles)load_bytes(from); }
    static Wide load_first(const char* from, std::int64_t elements) {
        return (Singles)load_first_bytes(from, elements * 4);
    }
    static void pack(char* to, Wide wide) { store_bytes(to, (Words)wide); }
    static Wide unpack(const char* from) { return load(from); }
    static Sum add_products(Sum sum, Wide a, Wide b) { return sum + a * b; }
};

// The even elements (on little-endian machines) and the odd ones.
struct BFloat16 : OneBFloat16, OneSum {
    static constexpr std::int64_t kStep = 8;
    static constexpr std::int64_t kPackedBytes = 32;
    struct Wide {
        Singles a, b;
    };
    static Wide widen_vector(Words v) { return {(Singles)(v << 16), (Singles)(v & 0xffff0000U)}; }
    static Wide load(const char* from) { return widen_vector(load_bytes(from)); }
    static Wide load_first(const char* from, std::int64_t elements) {
        return widen_vector(load_first_bytes(from, elements * 2));
    }
    static void pack(char* to, Wide wide) {
        store_bytes(to, (Words)wide.a);
        store_bytes(to + 16, (Words)wide.b);
    }
    static Wide unpack(const char* from) { return {(Singles)load_bytes(from), (Singles)load_bytes(from + 16)}; }
    static Sum add_products(Sum sum, Wide x, Wide y) { return (sum + x.a * y.a) + x.b * y.b; }
};

#include "few_rows_loops.h"

constexpr FewRowsKernels kKernels = {
    {multiply<Float32>, multiply<BFloat16>, nullptr, nullptr},
    {finish<Float32>, finish<BFloat16>, nullptr, nullptr},
};

}  // namespace

const FewRowsKernels* portable_few_rows() { return &kKernels; }

}  // namespace tpk
