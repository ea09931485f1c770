// The loops of the residual norm, included by each residual_norm_<isa>.cpp inside its unnamed namespace: plain loops over
// fp32 (fp64) that the compiler makes vectors of, because the order of every sum is written down.

#include "plain_numbers.h"

constexpr int kLanes = 16;

// a_j * b_j summed in lanes, column j in lane j mod 16, and the lanes in halves.
template <class Wide>
inline Wide dot(const Wide* __restrict a, const Wide* __restrict b, std::int64_t columns) {
    Wide lanes[kLanes] = {};
    std::int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += a[j + lane] * b[j + lane];
    }
    for (int lane = 0; j < columns; ++j, ++lane) lanes[lane] += a[j] * b[j];
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
}

template <class T>
inline void widen_row(const typename T::Stored* from, typename T::Wide* __restrict to, std::int64_t columns) {
    for (std::int64_t j = 0; j < columns; ++j) to[j] = T::widen(from[j]);
}

inline float root(float value) { return __builtin_sqrtf(value); }
inline double root(double value) { return __builtin_sqrt(value); }

template <class T>
void forward(const ResidualNorm& call, const void* y, const void* residual, void* sums, void* normed, void* scales,
             void* room) {
    using Wide = typename T::Wide;
    using Stored = typename T::Stored;
    const std::int64_t columns = call.columns;
    Wide* const weight = static_cast<Wide*>(room);
    Wide* const row = weight + columns;
    widen_row<T>(static_cast<const Stored*>(call.weight), weight, columns);
    for (std::int64_t i = 0; i < call.rows; ++i) {
        const Stored* const of_y = static_cast<const Stored*>(y) + i * columns;
        const Stored* const of_residual = static_cast<const Stored*>(residual) + i * columns;
        Stored* const of_sums = static_cast<Stored*>(sums) + i * columns;
        Stored* const of_normed = static_cast<Stored*>(normed) + i * columns;
        // Elementwise and in order: an output may be an input. So is what the compiler checks before it vectorises.
#pragma GCC ivdep
        for (std::int64_t j = 0; j < columns; ++j) {
            const Stored sum = T::narrow(T::widen(of_y[j]) + T::widen(of_residual[j]));
            of_sums[j] = sum;
            row[j] = T::widen(sum);
        }
        const Wide mean = dot(row, row, columns) / static_cast<Wide>(columns);
        const Wide scale = Wide{1} / root(mean + static_cast<Wide>(call.eps));
        for (std::int64_t j = 0; j < columns; ++j) of_normed[j] = T::narrow(row[j] * scale * weight[j]);
        if (scales != nullptr) static_cast<Wide*>(scales)[i] = scale;
    }
}

template <class T>
void backward(const ResidualNorm& call, const void* dn, const void* dr, const void* sums, const void* scales, void* d,
              void* dweight, void* room) {
    using Wide = typename T::Wide;
    using Stored = typename T::Stored;
    const std::int64_t columns = call.columns;
    Wide* const weight = static_cast<Wide*>(room);
    Wide* const of_weight = static_cast<Wide*>(dweight);
    Wide* const g = weight + columns;  // r * scale
    Wide* const h = g + columns;       // dn, then dn * weight
    Wide* const result = h + columns;  // dr, then d
    widen_row<T>(static_cast<const Stored*>(call.weight), weight, columns);
    if (of_weight != nullptr) {
        for (std::int64_t j = 0; j < columns; ++j) of_weight[j] = Wide{0};
    }
    for (std::int64_t i = 0; i < call.rows; ++i) {
        const Wide scale = static_cast<const Wide*>(scales)[i];
        if (dr == nullptr) {
            for (std::int64_t j = 0; j < columns; ++j) result[j] = Wide{0};
        } else {
            widen_row<T>(static_cast<const Stored*>(dr) + i * columns, result, columns);
        }
        if (dn != nullptr) {
            const Stored* const of_dn = static_cast<const Stored*>(dn) + i * columns;
            const Stored* const of_sums = static_cast<const Stored*>(sums) + i * columns;
            for (std::int64_t j = 0; j < columns; ++j) g[j] = T::widen(of_sums[j]) * scale;
            for (std::int64_t j = 0; j < columns; ++j) h[j] = T::widen(of_dn[j]);
            if (of_weight != nullptr) {
                for (std::int64_t j = 0; j < columns; ++j) of_weight[j] += h[j] * g[j];
            }
            for (std::int64_t j = 0; j < columns; ++j) h[j] *= weight[j];
            const Wide mean = dot(h, g, columns) / static_cast<Wide>(columns);
            for (std::int64_t j = 0; j < columns; ++j) result[j] += scale * (h[j] - g[j] * mean);
        }
        Stored* const of_d = static_cast<Stored*>(d) + i * columns;
        for (std::int64_t j = 0; j < columns; ++j) of_d[j] = T::narrow(result[j]);
    }
}

constexpr ResidualNormKernels kKernels = {
    {forward<Float32>, forward<BFloat16>, forward<Float16>, forward<Float64>},
    {backward<Float32>, backward<BFloat16>, backward<Float16>, backward<Float64>},
};
