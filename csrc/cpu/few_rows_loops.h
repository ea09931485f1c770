// The loops of the vector instruction sets, included by each few_rows_<isa>.cpp inside its unnamed namespace, after
// that file has defined
//
//   kColumnsOfOneRow, kColumnsOfRows: how many rows of w a block takes, by how many rows of x it has
//   for each dtype a struct with
//     kElementBytes, kStep: elements of one vector of memory; Wide: their values, in any order
//     load(from), load_first(from, elements): the rest are zeros, and no byte beyond is touched
//     kPackedBytes, pack(to, wide), unpack(from)
//     Sum; zero(), add_products(sum, a, b), total(sum)
//     round_to(to, value), widen(from): one element
//
// x is widened once, into `packed`. Each row of x and w has one Sum, so that the order of additions is the same for
// every number of rows and every block.

// Of a block, before the next one's first panel is read. Between a prefetch and its use pass as many bytes as a block
// has rows, times this: well below the first-level cache.
constexpr std::int64_t kPanelBytes = 2048;

inline std::int64_t lesser(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

template <class T>
void pack_rows(const FewRows& call, char* packed, std::int64_t packed_row_bytes) {
    for (std::int64_t row = 0; row < call.rows; ++row) {
        const char* from = static_cast<const char*>(call.x) + row * call.x_stride * T::kElementBytes;
        char* to = packed + row * packed_row_bytes;
        std::int64_t k = 0;
        for (; k + T::kStep <= call.contraction; k += T::kStep, to += T::kPackedBytes) {
            T::pack(to, T::load(from + k * T::kElementBytes));
        }
        if (k < call.contraction) T::pack(to, T::load_first(from + k * T::kElementBytes, call.contraction - k));
    }
}

// The hardware follows few streams, and none across the ends of short rows; without prefetching, one row of bf16 takes
// half again as long (505 us instead of 333 for 4 MiB of weight, Xeon with AMX at 2 GHz, 2026-11). An address, not a
// pointer: it may lie behind the weight, where nothing is touched.
inline void prefetch(const char* from, std::int64_t ahead) {
    __builtin_prefetch(
        reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + static_cast<std::uintptr_t>(ahead)), 0,
        3);
}

// Products of kRows packed rows with kColumns rows of w that begin at `w`, `stride` bytes apart.
template <class T, int kRows, int kColumns>
[[gnu::always_inline]] inline void block(const char* w, std::int64_t stride, std::int64_t contraction,
                                         const char* packed, std::int64_t packed_row_bytes, float* sums,
                                         std::int64_t sums_stride, bool fetch) {
    typename T::Sum sum[kRows][kColumns];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sum[r][c] = T::zero();
    }
    const std::int64_t row_bytes = contraction / T::kStep * T::kStep * T::kElementBytes;
    constexpr std::int64_t kStepBytes = T::kStep * T::kElementBytes;
    const std::int64_t num_panels = (row_bytes + kPanelBytes - 1) / kPanelBytes;
    const std::int64_t panel =
        num_panels == 0 ? 0 : (row_bytes / kStepBytes + num_panels - 1) / num_panels * kStepBytes;
    const char* x = packed;
    std::int64_t at = 0;
    while (at < row_bytes) {
        const std::int64_t end = lesser(at + panel, row_bytes);
        const std::int64_t ahead = !fetch ? 0 : end < row_bytes ? panel : kColumns * stride - at;
        for (; at < end; at += kStepBytes, x += T::kPackedBytes) {
            typename T::Wide wide[kColumns];
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
                const char* from = w + c * stride + at;
                prefetch(from, ahead);
                wide[c] = T::load(from);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const typename T::Wide of_x = T::unpack(x + r * packed_row_bytes);
#pragma GCC unroll 8
                for (int c = 0; c < kColumns; ++c) sum[r][c] = T::add_products(sum[r][c], of_x, wide[c]);
            }
        }
    }
    const std::int64_t rest = contraction - row_bytes / T::kElementBytes;
    if (rest > 0) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            const typename T::Wide wide = T::load_first(w + c * stride + at, rest);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                sum[r][c] = T::add_products(sum[r][c], T::unpack(x + r * packed_row_bytes), wide);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sums[r * sums_stride + c] = T::total(sum[r][c]);
    }
}

// kColumns rows of w with all rows of x; the first block of these fetches what comes next.
template <class T, int kColumns>
void all_rows(const FewRows& call, const char* w, std::int64_t stride, const char* packed,
              std::int64_t packed_row_bytes, float* sums) {
    const auto x = [&](std::int64_t row) { return packed + row * packed_row_bytes; };
    const auto y = [&](std::int64_t row) { return sums + row * call.columns; };
    const std::int64_t k = call.contraction;
    std::int64_t row = 0;
    for (; row + 4 <= call.rows; row += 4) {
        block<T, 4, kColumns>(w, stride, k, x(row), packed_row_bytes, y(row), call.columns, row == 0);
    }
    for (; row + 2 <= call.rows; row += 2) {
        block<T, 2, kColumns>(w, stride, k, x(row), packed_row_bytes, y(row), call.columns, row == 0);
    }
    if (row < call.rows) block<T, 1, kColumns>(w, stride, k, x(row), packed_row_bytes, y(row), call.columns, row == 0);
}

template <class T, int kColumns>
std::int64_t whole_blocks(const FewRows& call, const char* packed, std::int64_t packed_row_bytes, float* sums,
                          std::int64_t column) {
    const std::int64_t stride = call.w_stride * T::kElementBytes;
    for (; column + kColumns <= call.columns; column += kColumns) {
        const char* w = static_cast<const char*>(call.w) + column * stride;
        all_rows<T, kColumns>(call, w, stride, packed, packed_row_bytes, sums + column);
    }
    return column;
}

template <class T>
void multiply(const FewRows& call, char* packed, float* sums) {
    const std::int64_t packed_row_bytes = (call.contraction + T::kStep - 1) / T::kStep * T::kPackedBytes;
    pack_rows<T>(call, packed, packed_row_bytes);
    const std::int64_t column = call.rows == 1
                                    ? whole_blocks<T, kColumnsOfOneRow>(call, packed, packed_row_bytes, sums, 0)
                                    : whole_blocks<T, kColumnsOfRows>(call, packed, packed_row_bytes, sums, 0);
    whole_blocks<T, 1>(call, packed, packed_row_bytes, sums, column);
}

template <class T>
void finish(const float* sums, const char* bias, char* y, std::int64_t columns) {
    if (bias == nullptr) {
        for (std::int64_t n = 0; n < columns; ++n) T::round_to(y + n * T::kElementBytes, sums[n]);
    } else {
        for (std::int64_t n = 0; n < columns; ++n) {
            T::round_to(y + n * T::kElementBytes, sums[n] + T::widen(bias + n * T::kElementBytes));
        }
    }
}
