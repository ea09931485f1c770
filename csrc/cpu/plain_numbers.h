// Formats of numbers for plain loops that the compiler makes vectors of; included within an unnamed namespace.

#include "bits.h"

// Elements as they lie in memory; ThreadSanitizer and the aliasing rules see what they are.
using Half = std::uint16_t __attribute__((may_alias));
using Single = float __attribute__((may_alias));
using Double = double __attribute__((may_alias));

struct Float32 {
    using Stored = Single;
    using Wide = float;
    static Wide widen(float v) { return v; }
    static float narrow(Wide v) { return v; }
    static float narrow_any(Wide v) { return v; }
};

struct Float64 {
    using Stored = Double;
    using Wide = double;
    static Wide widen(double v) { return v; }
    static double narrow(Wide v) { return v; }
    static double narrow_any(Wide v) { return v; }
};

// A NaN of a widened bf16, or the CPU's own, has zeros where rounding drops bits: see reduce_kernels.h.
struct BFloat16 {
    using Stored = Half;
    using Wide = float;
    static Wide widen(std::uint16_t v) { return float_of(std::uint32_t{v} << 16); }
    static std::uint16_t narrow(Wide v) {
        const std::uint32_t bits = bits_of(v);
        return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
    }
    // Of an fp32 that need not be the sum of bf16: a NaN becomes one of bf16, whatever it carries.
    static std::uint16_t narrow_any(Wide v) {
        const std::uint32_t magnitude = bits_of(v) & 0x7fffffffU;
        const std::uint32_t is_nan = 0U - ((0x7f800000U - magnitude) >> 31);
        return static_cast<std::uint16_t>((0x7fc0U & is_nan) | (narrow(v) & ~is_nan));
    }
};

// Masks instead of branches, so that loops become vectors: after Fabian Giesen's public-domain half_to_float_fast5 and
// float_to_half_fast3_rtne, as in reduce_portable.cpp. Magnitudes are below 2^31.
struct Float16 {
    using Stored = Half;
    using Wide = float;
    static std::uint32_t above(std::uint32_t magnitude, std::uint32_t limit) {
        return 0U - ((limit - magnitude) >> 31);
    }
    static std::uint32_t select(std::uint32_t mask, std::uint32_t yes, std::uint32_t no) {
        return (yes & mask) | (no & ~mask);
    }
    static Wide widen(std::uint16_t v) {
        const std::uint32_t sign = (std::uint32_t{v} & 0x8000U) << 16;
        const std::uint32_t magnitude = (std::uint32_t{v} & 0x7fffU) << 13;
        const std::uint32_t normal = magnitude + (112U << 23);
        const std::uint32_t not_finite = magnitude + (224U << 23);
        const std::uint32_t denormal = bits_of(float_of(magnitude + (113U << 23)) - float_of(113U << 23));
        const std::uint32_t finite = select(above(magnitude, 0x007fffffU), normal, denormal);
        return float_of(select(above(magnitude, 0x0f7fffffU), not_finite, finite) | sign);
    }
    static std::uint16_t narrow(Wide v) {
        const std::uint32_t bits = bits_of(v);
        const std::uint32_t magnitude = bits & 0x7fffffffU;
        const std::uint32_t normal = (magnitude - (112U << 23) + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
        const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5F) - 0x3f000000U;
        const std::uint32_t finite = select(above(magnitude, (113U << 23) - 1U), normal, denormal);
        const std::uint32_t large = select(above(magnitude, 0x7f800000U), 0x7e00U, 0x7c00U);
        const std::uint32_t half = select(above(magnitude, (143U << 23) - 1U), large, finite);
        return static_cast<std::uint16_t>(half | bits >> 31 << 15);
    }
    static std::uint16_t narrow_any(Wide v) { return narrow(v); }
};
