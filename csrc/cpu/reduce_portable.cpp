// Sums for any CPU, in the compilers' vector types of 16 bytes (SSE2 on x86-64, NEON on aarch64); fp16 in integer
// arithmetic, since neither baseline converts it. No streaming stores: memcpy has them where they pay.
#include "reduce_kernels.h"

namespace tpk {
namespace {

constexpr std::int64_t kVectorBytes = 16;
constexpr bool kCanStream = false;

using Words = std::uint32_t __attribute__((vector_size(16)));
using Singles = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(16)));

// Words where they lie in memory, at any address. A packed struct, because clang drops aligned(1) from a `using`.
struct __attribute__((packed, may_alias)) AnyWords {
    Words v;
};

// A plain access, not memcpy: ThreadSanitizer must see it also where the compiler may not treat memcpy as its own.
inline Words load_bytes(const char* from) { return reinterpret_cast<const AnyWords*>(from)->v; }
inline void store_bytes(char* to, Words v) { reinterpret_cast<AnyWords*>(to)->v = v; }

inline void fence() {}
inline void stream_bytes(char* dst, const char* src) { store_bytes(dst, load_bytes(src)); }

inline Words load_first_bytes(const char* from, std::int64_t bytes) {
    alignas(16) char buffer[kVectorBytes] = {};
    for (std::int64_t i = 0; i < bytes; ++i) buffer[i] = from[i];
    return load_bytes(buffer);
}
inline void store_first_bytes(char* to, Words v, std::int64_t bytes) {
    alignas(16) char buffer[kVectorBytes];
    store_bytes(buffer, v);
    for (std::int64_t i = 0; i < bytes; ++i) to[i] = buffer[i];
}

inline Words select(Words mask, Words yes, Words no) { return (yes & mask) | (no & ~mask); }
inline Words is_above(Words x, std::uint32_t limit) {  // x and limit below 2^31: SSE2 compares signed words only
    using SignedWords = std::int32_t __attribute__((vector_size(16)));
    return (Words)((SignedWords)x > static_cast<std::int32_t>(limit));
}

// Every format reads and writes vectors of bytes; widen and narrow are what differs.
template <class Format, class WideType, std::int64_t kBytes>
struct Vectors {
    static constexpr std::int64_t kElementBytes = kBytes;
    using Wide = WideType;
    static Wide load(const char* from) { return Format::widen(load_bytes(from)); }
    static Wide load_first(const char* from, std::int64_t bytes) {
        return Format::widen(load_first_bytes(from, bytes));
    }
    static void store(char* to, Wide wide) { store_bytes(to, Format::narrow(wide)); }
    static void store_first(char* to, Wide wide, std::int64_t bytes) {
        store_first_bytes(to, Format::narrow(wide), bytes);
    }
    static void stream(char* to, Wide wide) { store(to, wide); }
};

struct OneSingles {
    Singles v;
};
struct OneDoubles {
    Doubles v;
};
struct TwoSingles {
    Singles a, b;
};

struct Float32 : Vectors<Float32, OneSingles, 4> {
    static Wide widen(Words v) { return {(Singles)v}; }
    static Words narrow(Wide wide) { return (Words)wide.v; }
    static Wide add(Wide x, Wide y) { return {x.v + y.v}; }
};

struct Float64 : Vectors<Float64, OneDoubles, 8> {
    static Wide widen(Words v) { return {(Doubles)v}; }
    static Words narrow(Wide wide) { return (Words)wide.v; }
    static Wide add(Wide x, Wide y) { return {x.v + y.v}; }
};

// Both formats of 16 bits keep the even elements (on little-endian machines) in `a` and the odd ones in `b`.
// A bf16 is the upper half of an fp32.
struct BFloat16 : Vectors<BFloat16, TwoSingles, 2> {
    static Wide widen(Words v) { return {(Singles)(v << 16), (Singles)(v & 0xffff0000U)}; }
    static Words round(Singles value) {  // the result is the upper half of each word
        const Words bits = (Words)value;
        return bits + 0x7fffU + ((bits >> 16) & 1U);
    }
    static Words narrow(Wide wide) { return (round(wide.a) >> 16) | (round(wide.b) & 0xffff0000U); }
    static Wide add(Wide x, Wide y) { return {x.a + y.a, x.b + y.b}; }
};

// Exponent biases: fp16 15, fp32 127; mantissas: 10 and 23 bits. Branch-free after Fabian Giesen's public-domain
// half_to_float_fast5 and float_to_half_fast3_rtne.
struct Float16 : Vectors<Float16, TwoSingles, 2> {
    static Singles widen_lower(Words half) {
        const Words sign = (half & 0x8000U) << 16;
        const Words magnitude = (half & 0x7fffU) << 13;
        const Words normal = magnitude + (112U << 23);
        const Words not_finite = magnitude + (224U << 23);
        // 2^-14 * 1.m less 2^-14 is the denormal, which fp32 holds as a normal number.
        const Words denormal = (Words)((Singles)(magnitude + (113U << 23)) - (Singles)(Words{} + (113U << 23)));
        const Words value = select(is_above(magnitude, 0x0f7fffffU), not_finite,
                                   select(is_above(magnitude, 0x007fffffU), normal, denormal));
        return (Singles)(value | sign);
    }
    static Words narrow_to_lower(Singles value) {
        const Words bits = (Words)value;
        const Words sign = bits & 0x80000000U;
        const Words magnitude = bits ^ sign;
        const Words normal = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
        // Adding 0.5 makes the fp32 adder round at the place of fp16's last denormal bit.
        const Words half = Words{} + 0x3f000000U;
        const Words denormal = (Words)((Singles)magnitude + (Singles)half) - half;
        const Words infinity = Words{} + 0x7c00U;
        const Words nan = Words{} + 0x7e00U;
        const Words finite = select(is_above(magnitude, (113U << 23) - 1U), normal, denormal);
        const Words large = select(is_above(magnitude, 0x7f800000U), nan, infinity);
        return select(is_above(magnitude, (143U << 23) - 1U), large, finite) | (sign >> 16);
    }
    static Wide widen(Words v) { return {widen_lower(v & 0xffffU), widen_lower(v >> 16)}; }
    static Words narrow(Wide wide) { return narrow_to_lower(wide.a) | (narrow_to_lower(wide.b) << 16); }
    static Wide add(Wide x, Wide y) { return {x.a + y.a, x.b + y.b}; }
};

#include "reduce_loops.h"

}  // namespace

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace tpk
