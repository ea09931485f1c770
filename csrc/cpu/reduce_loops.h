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

// kVectors full vectors at byte `at` of a row. kParts: number of parts where the compiler may know it, else 0.
template <class T, int kVectors, int kParts, bool kStream>
inline void sum_vectors(const SumCall& call, std::int64_t row, char* out, std::int64_t at) {
    typename T::Wide sum[kVectors];
    const char* first = row_of<T>(call.parts[0], row) + at;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = T::load(first + v * kVectorBytes);
    const std::int64_t num_parts = kParts != 0 ? kParts : call.num_parts;
    for (std::int64_t p = 1; p < num_parts; ++p) {
        const char* part = row_of<T>(call.parts[p], row) + at;
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

template <class T, int kParts, bool kStream>
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
            sum_vectors<T, kBlockVectors, kParts, kStream>(call, row, out, at);
        }
        for (; at + kVectorBytes <= row_bytes; at += kVectorBytes) {
            sum_vectors<T, 1, kParts, kStream>(call, row, out, at);
        }
        if (at < row_bytes) sum_first<T>(call, row, out, at, row_bytes - at);
    }
    if constexpr (kStream) fence();
}

template <class T>
void sum(const SumCall& call) {
    if (call.num_parts == 2) return sum_all<T, 2, false>(call);
    sum_all<T, 0, false>(call);
}

template <class T>
void sum_large(const SumCall& call) {
    sum_all<T, 0, kCanStream>(call);
}

void copy_large(const char* src, char* dst, std::int64_t bytes) {
    std::int64_t at = bytes_to_alignment(dst, bytes);
    __builtin_memcpy(dst, src, static_cast<std::size_t>(at));
    for (; at + kVectorBytes <= bytes; at += kVectorBytes) stream_bytes(dst + at, src + at);
    __builtin_memcpy(dst + at, src + at, static_cast<std::size_t>(bytes - at));
    fence();
}

constexpr Kernels kKernels = {
    {sum<Float32>, sum<BFloat16>, sum<Float16>, sum<Float64>},
    {sum_large<Float32>, sum_large<BFloat16>, sum_large<Float16>, sum_large<Float64>},
    kCanStream ? copy_large : nullptr,
};
