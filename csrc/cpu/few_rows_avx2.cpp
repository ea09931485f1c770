// GEMM of few rows for CPUs with AVX2, FMA and F16C. See few_rows_kernels.h for what this file must not define.
#include "few_rows_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace tpk {
namespace {

#include "few_rows_numbers.h"

constexpr int kColumnsOfOneRow = 4;
constexpr int kColumnsOfRows = 2;

struct OneSum {
    using Sum = __m256;
    static Sum zero() { return _mm256_setzero_ps(); }
    static float total(Sum sum) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }
};

// AVX2 cannot mask elements of 16 bits.
inline __m256i load_first_bytes(const char* from, std::int64_t bytes) {
    alignas(32) char buffer[32] = {};
    for (std::int64_t i = 0; i < bytes; ++i) buffer[i] = from[i];
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
}

inline __m256i load_bytes(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void store_singles(char* to, __m256 v) { _mm256_store_ps(reinterpret_cast<float*>(to), v); }
inline __m256 load_singles(const char* from) { return _mm256_load_ps(reinterpret_cast<const float*>(from)); }

struct Float32 : OneFloat32, OneSum {
    static constexpr std::int64_t kStep = 8;
    static constexpr std::int64_t kPackedBytes = 32;
    using Wide = __m256;
    static Wide load(const char* from) { return _mm256_castsi256_ps(load_bytes(from)); }
    static Wide load_first(const char* from, std::int64_t elements) {
        return _mm256_castsi256_ps(load_first_bytes(from, elements * 4));
    }
    static void pack(char* to, Wide wide) { store_singles(to, wide); }
    static Wide unpack(const char* from) { return load_singles(from); }
    static Sum add_products(Sum sum, Wide a, Wide b) { return _mm256_fmadd_ps(a, b, sum); }
};

template <class Format>
struct Halves : OneSum {
    static constexpr std::int64_t kStep = 16;
    static constexpr std::int64_t kPackedBytes = 64;
    struct Wide {
        __m256 a, b;
    };
    static Wide load(const char* from) { return Format::widen_vector(load_bytes(from)); }
    static Wide load_first(const char* from, std::int64_t elements) {
        return Format::widen_vector(load_first_bytes(from, elements * 2));
    }
    static void pack(char* to, Wide wide) {
        store_singles(to, wide.a);
        store_singles(to + 32, wide.b);
    }
    static Wide unpack(const char* from) { return {load_singles(from), load_singles(from + 32)}; }
    static Sum add_products(Sum sum, Wide x, Wide y) {
        return _mm256_fmadd_ps(x.b, y.b, _mm256_fmadd_ps(x.a, y.a, sum));
    }
};

// The even elements and the odd ones, which costs no shuffle.
struct BFloat16 : OneBFloat16, Halves<BFloat16> {
    static Wide widen_vector(__m256i v) {
        const __m256i upper_halves = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), _mm256_castsi256_ps(_mm256_and_si256(v, upper_halves))};
    }
};

struct Float16 : Halves<Float16> {
    static constexpr std::int64_t kElementBytes = 2;
    static Wide widen_vector(__m256i v) {
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
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

const FewRowsKernels* avx2_few_rows() { return &kKernels; }

}  // namespace tpk

#else

const tpk::FewRowsKernels* tpk::avx2_few_rows() { return nullptr; }

#endif
