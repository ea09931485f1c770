// GEMM of few rows of bf16 for CPUs with AMX. See few_rows_kernels.h for what this file must not define.
//
// Sixteen rows of w and 32 of their columns are a tile as they lie in memory, so nothing of the weight is repacked; x is
// the other operand, transposed in pairs, which is packed at each call and small. A product of tiles takes 16 cycles
// for 1 KiB of weight: memory is what counts. Denormals count as zeros.
#include "few_rows_kernels.h"

#if defined(__AMX_BF16__)

#include <immintrin.h>

// GCC 12's own headers, see reduce_avx512.cpp.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace tpk {
namespace {

#include "few_rows_numbers.h"

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kPairRows = 2 * kTileRows;  // rows of x that one pass over a block of w takes
constexpr std::int64_t kChunk = 32;                // elements of K in a tile
constexpr std::int64_t kPanel = 2048;              // bytes; as in few_rows_loops.h

struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// The compiler's own intrinsics do not say what they read.
inline void write_to_memory(const void* what) { __asm__ volatile("" : : "r"(what) : "memory"); }

inline std::int64_t lesser(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Rows of x that are the columns of one tile, at most 16, and where they are packed: by chunks of K, and in each by
// pairs along K, all rows side by side. The rows behind the valid ones are zeros.
struct Group {
    std::int64_t rows;
    std::int64_t valid;
    char* packed;
    std::int64_t pair_bytes() const { return rows * 4; }
    std::int64_t chunk_bytes() const { return kChunk / 2 * pair_bytes(); }
};

// Sixteen vectors of sixteen elements of 32 bits: to[c][r] = from[r][c].
inline void transpose(const __m512i* from, __m512i* to) {
    __m512i pairs[16];
    __m512i fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
    }
    // Of rows i to i + 3, quarter q of fours[i + j] is column 4 * q + j.
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512i even_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
        const __m512i odd_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
        to[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        to[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        to[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        to[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
}

// The whole chunks of sixteen rows; how many elements of each row that were.
std::int64_t pack_chunks(const FewRows& call, std::int64_t first_row, const Group& group) {
    const std::int64_t chunks = call.contraction / kChunk;
    const char* x = static_cast<const char*>(call.x) + first_row * call.x_stride * 2;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        __m512i rows[16];
        __m512i packed[16];
        for (int r = 0; r < 16; ++r) rows[r] = _mm512_loadu_si512(x + r * call.x_stride * 2 + chunk * kChunk * 2);
        transpose(rows, packed);
        char* to = group.packed + chunk * group.chunk_bytes();
        for (int pair = 0; pair < 16; ++pair) _mm512_storeu_si512(to + pair * group.pair_bytes(), packed[pair]);
    }
    return chunks * kChunk;
}

void pack(const FewRows& call, std::int64_t first_row, const Group& group) {
    const std::int64_t chunks = (call.contraction + kChunk - 1) / kChunk;
    const std::int64_t done = group.valid == kTileRows ? pack_chunks(call, first_row, group) : 0;
    if (group.valid < group.rows) {
        __builtin_memset(group.packed, 0, static_cast<std::size_t>(chunks * group.chunk_bytes()));
    }
    for (std::int64_t r = 0; r < group.valid; ++r) {
        const char* from = static_cast<const char*>(call.x) + (first_row + r) * call.x_stride * 2;
        std::int64_t k = done;
        char* to = group.packed + r * 4 + k / 2 * group.pair_bytes();
        for (; k + 2 <= call.contraction; k += 2, to += group.pair_bytes()) __builtin_memcpy(to, from + k * 2, 4);
        for (; k < chunks * kChunk; k += 2, to += group.pair_bytes()) {
            std::uint32_t last = 0;
            if (k < call.contraction) last = reinterpret_cast<const AnyHalf*>(from + k * 2)->v;
            __builtin_memcpy(to, &last, 4);
        }
    }
}

// Tiles 0 and 1 are the sums of the even and of the odd chunks for the first group, 2 and 3 for the second; 4 and 5 are
// of w, 6 and 7 of x.
void configure(std::int64_t block, const Group* groups) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
        const bool of_w = tile == 4 || tile == 5;
        const bool of_x = tile >= 6;
        const Group& group = of_x ? groups[tile - 6] : groups[tile / 2 % 2];
        if (!of_w && group.rows == 0) continue;
        config.row_bytes[tile] = static_cast<std::uint16_t>(of_w ? kChunk * 2 : group.pair_bytes());
        config.rows[tile] = static_cast<std::uint8_t>(of_x ? kChunk / 2 : block);
    }
    write_to_memory(&config);
    _tile_loadconfig(&config);
}

// To the second level, where the next block waits while this one is used: `ahead` bytes on, in each of its rows.
inline void prefetch(const char* w, std::int64_t stride, std::int64_t block, std::int64_t ahead) {
    for (std::int64_t row = 0; row < block; ++row) {
        const auto address = reinterpret_cast<std::uintptr_t>(w + row * stride) + static_cast<std::uintptr_t>(ahead);
        __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2);
    }
}

template <bool kTwoGroups>
inline void multiply_even(const char* w, std::int64_t stride, const Group* groups, std::int64_t chunk) {
    _tile_loadd(4, w, stride);
    _tile_loadd(6, groups[0].packed + chunk * groups[0].chunk_bytes(), groups[0].pair_bytes());
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoGroups) {
        _tile_loadd(7, groups[1].packed + chunk * groups[1].chunk_bytes(), groups[1].pair_bytes());
        _tile_dpbf16ps(2, 4, 7);
    }
}

template <bool kTwoGroups>
inline void multiply_odd(const char* w, std::int64_t stride, const Group* groups, std::int64_t chunk) {
    _tile_loadd(5, w, stride);
    _tile_loadd(6, groups[0].packed + chunk * groups[0].chunk_bytes(), groups[0].pair_bytes());
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTwoGroups) {
        _tile_loadd(7, groups[1].packed + chunk * groups[1].chunk_bytes(), groups[1].pair_bytes());
        _tile_dpbf16ps(3, 5, 7);
    }
}

// The last columns of `block` rows of w, behind them zeros: what follows in memory may be anything, or unmapped.
void copy_rest(const char* w, std::int64_t stride, std::int64_t block, std::int64_t rest, char* to) {
    for (std::int64_t row = 0; row < block; ++row) {
        for (std::int64_t i = 0; i < kChunk * 2; ++i) to[row * kChunk * 2 + i] = i < rest * 2 ? w[row * stride + i] : 0;
    }
}

void add_transposed(const float* even, const float* odd, std::int64_t block, std::int64_t rows, float* sums,
                    std::int64_t sums_stride) {
    if (block == kTileRows && rows >= 4) {  // what lies behind the rows is anything, and stays where it is
        __m512i columns[16];
        __m512i of_rows[16];
        for (int c = 0; c < 16; ++c) {
            const __m512 sum = _mm512_add_ps(_mm512_load_ps(even + c * 16), _mm512_load_ps(odd + c * 16));
            columns[c] = _mm512_castps_si512(sum);
        }
        transpose(columns, of_rows);
        for (std::int64_t r = 0; r < rows; ++r) _mm512_storeu_si512(sums + r * sums_stride, of_rows[r]);
        return;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < block; ++c) {
            sums[r * sums_stride + c] = even[c * kTileRows + r] + odd[c * kTileRows + r];
        }
    }
}

template <bool kTwoGroups>
void multiply_block(const FewRows& call, const char* w, std::int64_t block, const Group* groups, float* sums,
                    bool fetch) {
    const std::int64_t stride = call.w_stride * 2;
    const std::int64_t chunks = call.contraction / kChunk;
    const std::int64_t panels = (chunks * kChunk * 2 + kPanel - 1) / kPanel;
    const std::int64_t panel = panels == 0 ? 0 : (chunks + panels - 1) / panels;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwoGroups) {
        _tile_zero(2);
        _tile_zero(3);
    }
    std::int64_t chunk = 0;
    while (chunk < chunks) {
        const std::int64_t end = lesser(chunk + panel, chunks);
        const std::int64_t ahead = (end < chunks ? panel * kChunk * 2 : block * stride - chunk * kChunk * 2);
        for (; chunk < end; ++chunk) {
            const char* from = w + chunk * kChunk * 2;
            if (fetch) prefetch(from, stride, block, ahead);
            if (chunk % 2 == 0) {
                multiply_even<kTwoGroups>(from, stride, groups, chunk);
            } else {
                multiply_odd<kTwoGroups>(from, stride, groups, chunk);
            }
        }
    }
    const std::int64_t rest = call.contraction - chunks * kChunk;
    alignas(64) char last[kTileRows * kChunk * 2];
    if (rest > 0) {
        copy_rest(w + chunks * kChunk * 2, stride, block, rest, last);
        write_to_memory(last);
        multiply_even<kTwoGroups>(last, kChunk * 2, groups, chunks);
    }
    alignas(64) float even[kTileRows * kTileRows];
    alignas(64) float odd[kTileRows * kTileRows];
    _tile_stored(0, even, kTileRows * 4);
    _tile_stored(1, odd, kTileRows * 4);
    write_to_memory(even);
    add_transposed(even, odd, block, groups[0].valid, sums, call.columns);
    if constexpr (kTwoGroups) {
        _tile_stored(2, even, kTileRows * 4);
        _tile_stored(3, odd, kTileRows * 4);
        write_to_memory(even);
        add_transposed(even, odd, block, groups[1].valid, sums + kTileRows * call.columns, call.columns);
    }
}

void multiply(const FewRows& call, char* packed, float* sums) {
    const std::int64_t chunks = (call.contraction + kChunk - 1) / kChunk;
    const std::int64_t num_pairs = (call.rows + kPairRows - 1) / kPairRows;
    Group pairs[kMaxFewRows / kPairRows][2];
    for (std::int64_t row = 0; row < num_pairs * kPairRows; row += kTileRows) {
        const std::int64_t valid = lesser(call.rows - lesser(row, call.rows), kTileRows);
        // Of several pairs all tiles are full, so that one configuration serves them.
        Group& group = pairs[row / kPairRows][row / kTileRows % 2];
        group = {num_pairs > 1 ? kTileRows : valid, valid, packed};
        pack(call, row, group);
        packed += chunks * group.chunk_bytes();
    }
    write_to_memory(pairs[0][0].packed);
    const std::int64_t block = lesser(call.columns, kTileRows);
    configure(block, pairs[0]);
    for (std::int64_t column = 0; column < call.columns; column += block) {
        // The last block ends where the columns do, and computes some of them a second time.
        const std::int64_t first = lesser(column, call.columns - block);
        const char* w = static_cast<const char*>(call.w) + first * call.w_stride * 2;
        // The first pair brings the block of w into the first level, where the others find it.
        for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
            float* to = sums + pair * kPairRows * call.columns + first;
            if (pairs[pair][1].rows == 0) {
                multiply_block<false>(call, w, block, pairs[pair], to, pair == 0);
            } else {
                multiply_block<true>(call, w, block, pairs[pair], to, pair == 0);
            }
        }
    }
    _tile_release();
}

// As OneBFloat16::round_to does.
inline __m256i round_all(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i raised = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(raised, 16));
}

inline __m512 widen_all(const char* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

void finish(const float* sums, const char* bias, char* y, std::int64_t columns) {
    std::int64_t n = 0;
    for (; n + 16 <= columns; n += 16) {
        __m512 values = _mm512_loadu_ps(sums + n);
        if (bias != nullptr) values = _mm512_add_ps(values, widen_all(bias + n * 2));
        _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(y + n * 2), round_all(values));
    }
    for (; n < columns; ++n) {
        OneBFloat16::round_to(y + n * 2, bias == nullptr ? sums[n] : sums[n] + OneBFloat16::widen(bias + n * 2));
    }
}

constexpr FewRowsKernels kKernels = {
    {nullptr, multiply, nullptr, nullptr},
    {nullptr, finish, nullptr, nullptr},
};

}  // namespace

const FewRowsKernels* amx_few_rows() { return &kKernels; }

}  // namespace tpk

#else

const tpk::FewRowsKernels* tpk::amx_few_rows() { return nullptr; }

#endif
