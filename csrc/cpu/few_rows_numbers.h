// Single elements in memory, at any address; included by each few_rows_<isa>.cpp inside its unnamed namespace.

#include "bits.h"

// A 16-bit element where it lies. A packed struct, because clang drops aligned(1) from a `using`.
struct __attribute__((packed, may_alias)) AnyHalf {
    std::uint16_t v;
};
struct __attribute__((packed, may_alias)) AnySingle {
    float v;
};

struct OneFloat32 {
    static constexpr std::int64_t kElementBytes = 4;
    static float widen(const char* from) { return reinterpret_cast<const AnySingle*>(from)->v; }
    static void round_to(char* to, float value) { reinterpret_cast<AnySingle*>(to)->v = value; }
};

// Needs no test for NaN: see reduce_kernels.h.
struct OneBFloat16 {
    static constexpr std::int64_t kElementBytes = 2;
    static float widen(const char* from) {
        return float_of(std::uint32_t{reinterpret_cast<const AnyHalf*>(from)->v} << 16);
    }
    static void round_to(char* to, float value) {
        const std::uint32_t bits = bits_of(value);
        reinterpret_cast<AnyHalf*>(to)->v = static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
    }
};
