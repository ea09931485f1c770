// Sums and copies for CPUs with AVX2 and F16C. See reduce_kernels.h for what this file must not define.
#include "reduce_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace tpk {
namespace {

constexpr std::int64_t kVectorBytes = 32;
constexpr bool kCanStream = true;

inline __m256i load_bytes(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_bytes(char* to, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
inline void stream_vector(char* to, __m256i v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v); }

inline void fence() { _mm_sfence(); }
inline void stream_bytes(char* dst, const char* src) { stream_vector(dst, load_bytes(src)); }

// AVX2 masks words but not halves, so that the end of a row goes through a buffer.
inline __m256i load_first_bytes(const char* from, std::int64_t bytes) {
    alignas(32) char buffer[kVectorBytes] = {};
    __builtin_memcpy(buffer, from, static_cast<std::size_t>(bytes));
    return load_bytes(buffer);
}
inline void store_first_bytes(char* to, __m256i v, std::int64_t bytes) {
    alignas(32) char buffer[kVectorBytes];
    store_bytes(buffer, v);
    __builtin_memcpy(to, buffer, static_cast<std::size_t>(bytes));
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
    static void stream(char* to, Wide wide) { stream_vector(to, Format::narrow(wide)); }
};

struct Singles {
    __m256 v;
};
struct Doubles {
    __m256d v;
};
struct TwoSingles {
    __m256 a, b;
};

struct Float32 : Vectors<Float32, Singles, 4> {
    static Wide widen(__m256i v) { return {_mm256_castsi256_ps(v)}; }
    static __m256i narrow(Wide wide) { return _mm256_castps_si256(wide.v); }
    static Wide add(Wide x, Wide y) { return {_mm256_add_ps(x.v, y.v)}; }
};

struct Float64 : Vectors<Float64, Doubles, 8> {
    static Wide widen(__m256i v) { return {_mm256_castsi256_pd(v)}; }
    static __m256i narrow(Wide wide) { return _mm256_castpd_si256(wide.v); }
    static Wide add(Wide x, Wide y) { return {_mm256_add_pd(x.v, y.v)}; }
};

inline TwoSingles add_two(TwoSingles x, TwoSingles y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }

// A bf16 is the upper half of an fp32: `a` has the even elements and `b` the odd ones, which costs no shuffle.
struct BFloat16 : Vectors<BFloat16, TwoSingles, 2> {
    static __m256i upper_halves() { return _mm256_set1_epi32(static_cast<int>(0xffff0000U)); }
    static Wide widen(__m256i v) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(v, upper_halves()))};
    }
    static __m256i narrow(Wide wide) {  // as in reduce_avx512.cpp
        const __m256i a = _mm256_castps_si256(wide.a);
        const __m256i b = _mm256_castps_si256(wide.b);
        const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
        const __m256i dropped = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
        const __m256i odd = _mm256_and_si256(kept, _mm256_set1_epi16(1));
        const __m256i addend = _mm256_or_si256(odd, _mm256_set1_epi16(0x7ffe));
        const __m256i carry = _mm256_srli_epi16(_mm256_avg_epu16(dropped, addend), 15);
        return _mm256_add_epi16(kept, carry);
    }
    static Wide add(Wide x, Wide y) { return add_two(x, y); }
};

struct Float16 : Vectors<Float16, TwoSingles, 2> {
    static Wide widen(__m256i v) {
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
    }
    static __m256i narrow(Wide wide) {
        constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return _mm256_set_m128i(_mm256_cvtps_ph(wide.b, kToNearest), _mm256_cvtps_ph(wide.a, kToNearest));
    }
    static Wide add(Wide x, Wide y) { return add_two(x, y); }
};

#include "reduce_loops.h"

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace tpk

#else

const tpk::Kernels* tpk::avx2_kernels() { return nullptr; }

#endif
