// GEMM of few rows for CPUs with AVX-512 F, BW, VL, DQ. See few_rows_kernels.h for what this file must not define.
#include "few_rows_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// GCC 12's own headers, see reduce_avx512.cpp.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace tpk {
namespace {

#include "few_rows_numbers.h"

constexpr int kColumnsOfOneRow = 8;
constexpr int kColumnsOfRows = 4;

struct OneSum {
    using Sum = __m512;
    static Sum zero() { return _mm512_setzero_ps(); }
    static float total(Sum sum) { return _mm512_reduce_add_ps(sum); }
};

struct Float32 : OneFloat32, OneSum {
    static constexpr std::int64_t kStep = 16;
    static constexpr std::int64_t kPackedBytes = 64;
    using Wide = __m512;
    static Wide load(const char* from) { return _mm512_loadu_ps(from); }
    static Wide load_first(const char* from, std::int64_t elements) {
        return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << elements) - 1), from);
    }
    static void pack(char* to, Wide wide) { _mm512_store_ps(to, wide); }
    static Wide unpack(const char* from) { return _mm512_load_ps(from); }
    static Sum add_products(Sum sum, Wide a, Wide b) { return _mm512_fmadd_ps(a, b, sum); }
};

// The two formats of 16 bits differ in how 32 of them become two vectors of fp32.
template <class Format>
struct Halves : OneSum {
    static constexpr std::int64_t kStep = 32;
    static constexpr std::int64_t kPackedBytes = 128;
    struct Wide {
        __m512 a, b;
    };
    static Wide load(const char* from) { return Format::widen_vector(_mm512_loadu_si512(from)); }
    static Wide load_first(const char* from, std::int64_t elements) {
        const auto first = static_cast<__mmask32>((1U << elements) - 1);
        return Format::widen_vector(_mm512_maskz_loadu_epi16(first, from));
    }
    static void pack(char* to, Wide wide) {
        _mm512_store_ps(to, wide.a);
        _mm512_store_ps(to + 64, wide.b);
    }
    static Wide unpack(const char* from) { return {_mm512_load_ps(from), _mm512_load_ps(from + 64)}; }
    static Sum add_products(Sum sum, Wide x, Wide y) {
        return _mm512_fmadd_ps(x.b, y.b, _mm512_fmadd_ps(x.a, y.a, sum));
    }
};

// The even elements and the odd ones, which costs no shuffle.
struct BFloat16 : OneBFloat16, Halves<BFloat16> {
    static Wide widen_vector(__m512i v) {
        const __m512i upper_halves = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_castsi512_ps(_mm512_and_si512(v, upper_halves))};
    }
};

struct Float16 : Halves<Float16> {
    static constexpr std::int64_t kElementBytes = 2;
    static Wide widen_vector(__m512i v) {
        return {_mm512_cvtph_ps(_mm512_castsi512_si256(v)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1))};
    }
    static float widen(const char* from) { return _cvtsh_ss(reinterpret_cast<const AnyHalf*>(from)->v); }
    static void round_to(char* to, float value) {
        constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        reinterpret_cast<AnyHalf*>(to)->v = _cvtss_sh(value, kToNearest);
    }
};

#include "few_rows_loops.h"

constexpr FewRowsKernels kKernels = {
    {multiply<Float32>, multiply<BFloat16>, multiply<Float16>, nullptr},
    {finish<Float32>, finish<BFloat16>, finish<Float16>, nullptr},
};

}  // namespace

const FewRowsKernels* avx512_few_rows() { return &kKernels; }

}  // namespace tpk

#else

const tpk::FewRowsKernels* tpk::avx512_few_rows() { return nullptr; }

#endif
