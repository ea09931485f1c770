// Element types of the reducing kernels: widening to fp32, and rounding to nearest even, once.
//
// In memory a bf16 is a Bf16, an fp16 a Half; both are bits.  nvcc and g++ round equally (tests/cuda compare with an
// exact reference), except that the payload of a NaN is nobody's business.
#pragma once

#include "cuda/device.h"

namespace tpk {

// Threads of a block of these kernels: there are few blocks (tpk_group.max_blocks), so each is large.
constexpr int kReduceThreads = 512;

struct Bf16 {
    std::uint16_t bits;
};
struct Half {
    std::uint16_t bits;
};

TPK_DEVICE float widen(float value) { return value; }

TPK_DEVICE void narrow(float value, float& out) { out = value; }

#if defined(__CUDACC__)

TPK_DEVICE float widen(Half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}
TPK_DEVICE float widen(Bf16 value) {
    float wide;  // not a shift: for that the assembler takes more registers
    asm("mov.b32 %0, {%1, %2};" : "=f"(wide) : "h"(std::uint16_t{0}), "h"(value.bits));
    return wide;
}
TPK_DEVICE void narrow(float value, Half& out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value)); }
TPK_DEVICE void narrow(float value, Bf16& out) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value)); }

#else

TPK_DEVICE float widen(Bf16 value) { return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16); }
TPK_DEVICE void narrow(float value, Bf16& out) {
    const std::uint32_t bits = float_to_bits(value);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = nan ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    out.bits = static_cast<std::uint16_t>(rounded >> 16);
}

TPK_DEVICE float widen(Half value) {
    const std::uint32_t sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest >= 0x400u) return bits_to_float(sign | ((rest << 13) + 0x38000000u));
    const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // exact: fewer than 11 bits
    return sign != 0 ? -magnitude : magnitude;
}
TPK_DEVICE void narrow(float value, Half& out) {
    const std::uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    std::uint32_t half;
    if (rest > 0x7f800000u) {
        half = 0x7fffu;
    } else if (rest >= 0x477ff000u) {  // 65520 and more round to infinity
        half = 0x7c00u;
    } else if (rest >= 0x38800000u) {
        half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    } else {  // adding 0.5 leaves the bits of a subnormal half, rounded by the addition itself
        half = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u;
    }
    out.bits = static_cast<std::uint16_t>(sign | half);
}

#endif

// `kCount` consecutive elements: one, or some that are moved 16 bytes at a time.
template <typename T, int kCount>
struct alignas(kCount == 1 ? sizeof(T) : 16) Pack {
    static_assert(kCount == 1 || sizeof(T) * kCount % 16 == 0);
    T element[kCount];
};

template <typename T, int kCount>
TPK_DEVICE Pack<T, kCount> load_pack(const T* from) {
    if constexpr (kCount == 1) {
        return {{*from}};
    } else {
        union {
            Bytes16 bytes[sizeof(T) * kCount / 16];
            Pack<T, kCount> pack;
        } both;
        TPK_UNROLL
        for (int i = 0; i < static_cast<int>(sizeof(both) / 16); ++i) {
            both.bytes[i] = load16(reinterpret_cast<const char*>(from) + 16 * i);
        }
        return both.pack;
    }
}

template <typename T, int kCount>
TPK_DEVICE void store_pack(T* to, const Pack<T, kCount>& pack) {
    if constexpr (kCount == 1) {
        *to = pack.element[0];
    } else {
        union {
            Pack<T, kCount> pack;
            Bytes16 bytes[sizeof(T) * kCount / 16];
        } both = {pack};
        TPK_UNROLL
        for (int i = 0; i < static_cast<int>(sizeof(both) / 16); ++i) {
            store16(reinterpret_cast<char*>(to) + 16 * i, both.bytes[i]);
        }
    }
}

// A pack to a multicast address.
template <typename T, int kCount>
TPK_DEVICE void multicast_pack(T* to, const Pack<T, kCount>& pack) {
    union {
        Pack<T, kCount> pack;
        Bytes16 bytes[sizeof(T) * kCount / 16];
    } both = {pack};
    TPK_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof(both) / 16); ++i) {
        multicast16(reinterpret_cast<char*>(to) + 16 * i, both.bytes[i]);
    }
}

// The sum of pack `at(rank)` over all ranks, and of the bias if there is one: fp32, in this order, rounded once.  Loads
// go out four at a time; the order of the additions does not depend on that.
template <typename In, typename Out, int kCount, typename At>
TPK_DEVICE Pack<Out, kCount> sum_over_ranks(int world_size, const At& at, const Out* bias) {
    constexpr int kBatch = 4;
    float sum[kCount];
    const Pack<In, kCount> first = load_pack<In, kCount>(at(0));
    TPK_UNROLL
    for (int i = 0; i < kCount; ++i) sum[i] = widen(first.element[i]);
    TPK_DO_NOT_UNROLL
    for (int rank = 1; rank < world_size; rank += kBatch) {
        Pack<In, kCount> part[kBatch];
        TPK_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (rank + j < world_size) part[j] = load_pack<In, kCount>(at(rank + j));
        }
        TPK_UNROLL
        for (int j = 0; j < kBatch; ++j) {
            if (rank + j >= world_size) break;
            TPK_UNROLL
            for (int i = 0; i < kCount; ++i) sum[i] = add(sum[i], widen(part[j].element[i]));
        }
    }
    Pack<Out, kCount> rounded;
    TPK_UNROLL
    for (int i = 0; i < kCount; ++i) {
        if (bias != nullptr) sum[i] = add(sum[i], widen(bias[i]));
        narrow(sum[i], rounded.element[i]);
    }
    return rounded;
}

}  // namespace tpk
