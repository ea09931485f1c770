// Sums and copies for CPUs with AVX-512 F, BW, VL, DQ. See reduce_kernels.h for what this file must not define.
#include "reduce_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// GCC 12's own headers start some intrinsics from `__m512i y = y` and warn of it wherever they are inlined (GCC bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace tpk {
namespace {

constexpr std::int64_t kVectorBytes = 64;
constexpr bool kCanStream = true;

inline void fence() { _mm_sfence(); }
inline void stream_bytes(char* dst, const char* src) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

// Masked loads and stores never touch what is masked out, not even when it is unmapped.
inline __mmask32 first_halves(std::int64_t bytes) { return (__mmask32{1} << (bytes / 2)) - 1; }
inline __mmask16 first_words(std::int64_t bytes) { return static_cast<__mmask16>((1U << (bytes / 4)) - 1); }
inline __mmask8 first_doubles(std::int64_t bytes) { return static_cast<__mmask8>((1U << (bytes / 8)) - 1); }

struct Float32 {
    static constexpr std::int64_t kElementBytes = 4;
    using Wide = __m512;
    static Wide load(const char* from) { return _mm512_loadu_ps(from); }
    static Wide load_first(const char* from, std::int64_t bytes) {
        return _mm512_maskz_loadu_ps(first_words(bytes), from);
    }
    static Wide add(Wide a, Wide b) { return _mm512_add_ps(a, b); }
    static void store(char* to, Wide wide) { _mm512_storeu_ps(to, wide); }
    static void store_first(char* to, Wide wide, std::int64_t bytes) {
        _mm512_mask_storeu_ps(to, first_words(bytes), wide);
    }
    static void stream(char* to, Wide wide) { _mm512_stream_ps(reinterpret_cast<float*>(to), wide); }
};

struct Float64 {
    static constexpr std::int64_t kElementBytes = 8;
    using Wide = __m512d;
    static Wide load(const char* from) { return _mm512_loadu_pd(from); }
    static Wide load_first(const char* from, std::int64_t bytes) {
        return _mm512_maskz_loadu_pd(first_doubles(bytes), from);
    }
    static Wide add(Wide a, Wide b) { return _mm512_add_pd(a, b); }
    static void store(char* to, Wide wide) { _mm512_storeu_pd(to, wide); }
    static void store_first(char* to, Wide wide, std::int64_t bytes) {
        _mm512_mask_storeu_pd(to, first_doubles(bytes), wide);
    }
    static void stream(char* to, Wide wide) { _mm512_stream_pd(reinterpret_cast<double*>(to), wide); }
};

// The two formats of 16 bits differ in how 32 of them become two vectors of fp32, and back.
template <class Format>
struct Halves {
    static constexpr std::int64_t kElementBytes = 2;
    struct Wide {
        __m512 a, b;
    };
    static Wide load(const char* from) { return Format::widen(_mm512_loadu_si512(from)); }
    static Wide load_first(const char* from, std::int64_t bytes) {
        return Format::widen(_mm512_maskz_loadu_epi16(first_halves(bytes), from));
    }
    static Wide add(Wide x, Wide y) { return {_mm512_add_ps(x.a, y.a), _mm512_add_ps(x.b, y.b)}; }
    static void store(char* to, Wide wide) { _mm512_storeu_si512(to, Format::narrow(wide)); }
    static void store_first(char* to, Wide wide, std::int64_t bytes) {
        _mm512_mask_storeu_epi16(to, first_halves(bytes), Format::narrow(wide));
    }
    static void stream(char* to, Wide wide) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), Format::narrow(wide));
    }
};

// A bf16 is the upper half of an fp32: `a` has the even elements and `b` the odd ones, which costs no shuffle.
// vcvtneps2bf16 would be shorter, but flushes denormals.
struct BFloat16 : Halves<BFloat16> {
    static __m512i upper_halves() { return _mm512_set1_epi32(static_cast<int>(0xffff0000U)); }
    static Wide widen(__m512i v) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(v, upper_halves()))};
    }
    // kept + carry of (dropped + 0x7fff + lowest kept bit), in 16-bit lanes; the average of two lanes is their sum with
    // the carry in bit 15. Per-word additions with a test for NaN took 0.77 us where this takes 0.56 (2 x 8192
    // elements, AMD EPYC 9004 series at 2.6 GHz, 2026-11). See reduce_kernels.h for why no test is needed.
    static __m512i narrow(Wide wide) {
        const __m512i a = _mm512_castps_si512(wide.a);
        const __m512i b = _mm512_castps_si512(wide.b);
        const __m512i kept = _mm512_mask_blend_epi16(0xaaaaaaaaU, _mm512_srli_epi32(a, 16), b);
        const __m512i dropped = _mm512_mask_blend_epi16(0xaaaaaaaaU, a, _mm512_slli_epi32(b, 16));
        constexpr int kAAndBOrC = 0xea;
        const __m512i addend =
            _mm512_ternarylogic_epi32(kept, _mm512_set1_epi16(1), _mm512_set1_epi16(0x7ffe), kAAndBOrC);
        const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(dropped, addend), 15);
        return _mm512_add_epi16(kept, carry);
    }
};

struct Float16 : Halves<Float16> {
    static Wide widen(__m512i v) {
        return {_mm512_cvtph_ps(_mm512_castsi512_si256(v)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1))};
    }
    static __m512i narrow(Wide wide) {
        constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(wide.a, kToNearest));
        return _mm512_inserti64x4(low, _mm512_cvtps_ph(wide.b, kToNearest), 1);
    }
};

#include "reduce_loops.h"

}  // namespace

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace tpk

#else

const tpk::Kernels* tpk::avx512_kernels() { return nullptr; }

#endif
