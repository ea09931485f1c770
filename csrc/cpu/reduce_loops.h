// The loops of the sums and copies, included by each reduce_<isa>.cpp inside its unnamed namespace, after that file has
// defined the vectors of its instruction set:
//
//   kVectorBytes, kCanStream, fence(), stream_bytes(dst, src): one vector, dst aligned
//   Float32, BFloat16, Float16, Float64, each with
//     kElementBytes; Wide: the fp32 or fp64 values of the elements in one vector of memory
//     load(from), load_first(from, bytes), add(a, b), store(to, wide), store_first(to, wide, bytes), stream(to, wide)
//
// The order of the values inside a Wide is the file's affair: loads and stores agree, and additions are elementwise.
// load_first and store_first touch no byte beyond the first `bytes`: the next one may be another rank's, or unmapped.

// Read by all parts before the block is written once: accumulators stay in registers, and out may be a part.
constexpr int kBlockVectors = 4;
constexpr std::int64_t kBlockBytes = kBlockVectors * kVectorBytes;

template <class T>
inline const char* row_of(const ConstRows& part, std::int64_t row) {
    return static_cast<const char*>(part.data) + row * part.stride * T::kElementBytes;
}

template <class T, bool kStream>
inline void write(char* to, typename T::Wide wide) {
    if constexpr (kStream) {
        T::stream(to, wide);
    } else {
        T::store(to, wide);
    }
}

// To the second level: parts that begin at equal offsets in their pages share few sets of the first, and would evict
// each other there. 64 parts of 2 MiB: 6.8 ms instead of 11.4, 16 parts: 1.15 ms instead of 1.3; up to 8 parts the
// hardware does better alone (AMD EPYC 9004 series, 2026-11).
inline void prefetch_block(const char* from) {
    constexpr std::int64_t kAheadBytes = 512;
    constexpr std::int64_t kLineBytes = 64;
    for (std::int64_t at = 0; at < kBlockBytes; at += kLineBytes) __builtin_prefetch(from + kAheadBytes + at, 0, 2);
}

// kVectors full vectors at byte `at` of a row.
// Inlined always, or GCC loads the constants anew for each block (0.92 us instead of 0.77 for 2 x 8192 bf16).
template <class T, int kVectors, bool kStream, bool kPrefetch>
[[gnu::always_inline]] inline void sum_vectors(const SumCall& call, std::int64_t row, char* out, std::int64_t at) {
    typename T::Wide sum[kVectors];
    const char* first = row_of<T>(call.parts[0], row) + at;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = T::load(first + v * kVectorBytes);
    for (std::int64_t p = 1; p < call.num_parts; ++p) {
        const char* part = row_of<T>(call.parts[p], row) + at;
        if constexpr (kPrefetch) prefetch_block(part);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[v] = T::add(sum[v], T::load(part + v * kVectorBytes));
    }
    if (call.bias != nullptr) {
        const char* bias = static_cast<const char*>(call.bias) + at;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[v] = T::add(sum[v], T::load(bias + v * kVectorBytes));
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) write<T, kStream>(out + at + v * kVectorBytes, sum[v]);
}

// Fewer bytes than a vector: the ends of a row.
template <class T>
inline void sum_first(const SumCall& call, std::int64_t row, char* out, std::int64_t at, std::int64_t bytes) {
    typename T::Wide sum = T::load_first(row_of<T>(call.parts[0], row) + at, bytes);
    for (std::int64_t p = 1; p < call.num_parts; ++p) {
        sum = T::add(sum, T::load_first(row_of<T>(call.parts[p], row) + at, bytes));
    }
    if (call.bias != nullptr) sum = T::add(sum, T::load_first(static_cast<const char*>(call.bias) + at, bytes));
    T::store_first(out + at, sum, bytes);
}

inline std::int64_t bytes_to_alignment(const char* address, std::int64_t at_most) {
    const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address) % kVectorBytes);
    const std::int64_t missing = past == 0 ? 0 : kVectorBytes - past;
    return missing < at_most ? missing : at_most;
}

template <class T, bool kStream, bool kPrefetch>
void sum_all(const SumCall& call) {
    const std::int64_t row_bytes = call.columns * T::kElementBytes;
    for (std::int64_t row = 0; row < call.rows; ++row) {
        char* out = static_cast<char*>(call.out) + row * call.out_stride * T::kElementBytes;
        std::int64_t at = 0;
        if constexpr (kStream) {
            at = bytes_to_alignment(out, row_bytes);
            if (at > 0) sum_first<T>(call, row, out, 0, at);
        }
        for (; at + kBlockBytes <= row_bytes; at += kBlockBytes) {
            sum_vectors<T, kBlockVectors, kStream, kPrefetch>(call, row, out, at);
        }
        for (; at + kVectorBytes <= row_bytes; at += kVectorBytes) {
            sum_vectors<T, 1, kStream, false>(call, row, out, at);
        }
        if (at < row_bytes) sum_first<T>(call, row, out, at, row_bytes - at);
    }
    if constexpr (kStream) fence();
}

// One loop for any number of parts: knowing at compile time that there are two gained nothing.
template <class T>
void sum(const SumCall& call) {
    if (call.stream) {
        call.prefetch ? sum_all<T, kCanStream, true>(call) : sum_all<T, kCanStream, false>(call);
    } else {
        call.prefetch ? sum_all<T, false, true>(call) : sum_all<T, false, false>(call);
    }
}

void copy_streaming(const char* src, char* dst, std::int64_t bytes) {
    std::int64_t at = bytes_to_alignment(dst, bytes);
    __builtin_memcpy(dst, src, static_cast<std::size_t>(at));
    for (; at + kVectorBytes <= bytes; at += kVectorBytes) stream_bytes(dst + at, src + at);
    __builtin_memcpy(dst + at, src + at, static_cast<std::size_t>(bytes - at));
    fence();
}

constexpr Kernels kKernels = {
    {sum<Float32>, sum<BFloat16>, sum<Float16>, sum<Float64>},
    kCanStream ? copy_streaming : nullptr,
};
