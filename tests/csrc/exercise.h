// What the drivers of the kernels' tests have in common: errors as return codes, numbers by arithmetic instead of bit
// tricks, and buffers of exactly the needed size, at either end of which lies an inaccessible page.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <random>

#include "reduce.h"

namespace {

using tpk::Dtype;

thread_local char last_error[512];

template <class Function>
int guarded(Function function) {
    try {
        function();
        return 0;
    } catch (const std::exception& error) {
        std::snprintf(last_error, sizeof(last_error), "%s", error.what());
        return -1;
    }
}

// ---------------------------------------------------------------- the reference: arithmetic, no bit tricks

inline double from_fields(std::uint32_t bits, int mantissa_bits, int bias, std::uint32_t max_exponent) {
    const std::uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
    const std::uint32_t exponent = (bits >> mantissa_bits) & max_exponent;
    const double sign = (bits >> 15) != 0 ? -1.0 : 1.0;
    if (exponent == max_exponent) {
        const double inf = std::numeric_limits<double>::infinity();
        return mantissa == 0 ? sign * inf : std::numeric_limits<double>::quiet_NaN();
    }
    const double unit = std::ldexp(1.0, -mantissa_bits);
    if (exponent == 0) return sign * std::ldexp(mantissa * unit, 1 - bias);
    return sign * std::ldexp(1.0 + mantissa * unit, static_cast<int>(exponent) - bias);
}

// Rounds to the grid of the format in double, which is exact, then reads the fields off.
inline std::uint16_t to_fields(double value, int mantissa_bits, int bias, std::uint32_t max_exponent) {
    const auto sign = static_cast<std::uint32_t>(std::signbit(value) ? 0x8000 : 0);
    const auto top = max_exponent << mantissa_bits;
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | top | (1U << (mantissa_bits - 1)));
    double magnitude = std::fabs(value);
    if (magnitude == 0) return static_cast<std::uint16_t>(sign);
    if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | top);
    const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
    // Steps from the bottom of this binade (or of the denormals); one binade's end is the next one's start.
    const auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    const auto below = static_cast<std::uint32_t>(exponent - (1 - bias)) << mantissa_bits;
    return static_cast<std::uint16_t>(sign | std::min(below + steps, top));
}

inline double read(Dtype dtype, const unsigned char* from) {
    if (dtype == Dtype::kFloat64) {
        double value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    }
    if (dtype == Dtype::kFloat32) {
        float value;
        std::memcpy(&value, from, sizeof(value));
        return static_cast<double>(value);
    }
    std::uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return dtype == Dtype::kBFloat16 ? from_fields(bits, 7, 127, 255) : from_fields(bits, 10, 15, 31);
}

inline void write(Dtype dtype, unsigned char* to, double value) {
    if (dtype == Dtype::kFloat64) {
        std::memcpy(to, &value, sizeof(value));
    } else if (dtype == Dtype::kFloat32) {
        const auto narrow = static_cast<float>(value);
        std::memcpy(to, &narrow, sizeof(narrow));
    } else {
        const std::uint16_t bits =
            dtype == Dtype::kBFloat16 ? to_fields(value, 7, 127, 255) : to_fields(value, 10, 15, 31);
        std::memcpy(to, &bits, sizeof(bits));
    }
}

// ---------------------------------------------------------------- buffers without a byte to spare

class Region {
public:
    // Begins after (0) or ends at (1) an inaccessible page, or lies on the heap (2), where the sanitizer watches both
    // ends. Begins `shift` bytes late, off the elements' alignment.
    Region(std::size_t bytes, unsigned where, std::size_t shift) : bytes_(bytes) {
        if (where == 2) {
            heap_.reset(new unsigned char[bytes + shift]);
            data_ = heap_.get() + shift;
            return;
        }
        const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
        const std::size_t inside = (bytes + shift + page - 1) / page * page;
        mapped_bytes_ = inside + 2 * page;
        void* mapped = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) std::abort();
        mapped_ = static_cast<unsigned char*>(mapped);
        if (inside != 0 && mprotect(mapped_ + page, inside, PROT_READ | PROT_WRITE) != 0) std::abort();
        data_ = where == 0 ? mapped_ + page + shift : mapped_ + page + inside - bytes;
    }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() {
        if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
    }
    unsigned char* data() { return data_; }
    std::size_t bytes() const { return bytes_; }

private:
    std::size_t bytes_;
    std::size_t mapped_bytes_ = 0;
    unsigned char* mapped_ = nullptr;
    unsigned char* data_ = nullptr;
    std::unique_ptr<unsigned char[]> heap_;
};

struct Random {
    std::mt19937_64 engine;
    std::int64_t below(std::int64_t limit) {
        return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(limit));
    }
    bool once_in(std::int64_t n) { return below(n) == 0; }
    // Any bits at all, or values near one another, so that sums are not all absorbed by their largest term.
    void fill(Dtype dtype, unsigned char* data, std::int64_t elements) {
        const bool any_bits = once_in(2);
        const auto size = static_cast<std::int64_t>(size_of(dtype));
        for (std::int64_t i = 0; i < elements; ++i) {
            if (any_bits) {
                const std::uint64_t bits = engine();
                std::memcpy(data + i * size, &bits, static_cast<std::size_t>(size));
            } else {
                write(dtype, data + i * size, static_cast<double>(below(4001) - 2000) / 256.0);
            }
        }
    }
};

struct Matrix {
    std::int64_t stride;
    std::unique_ptr<Region> region;
};

inline Matrix make_matrix(Random& random, Dtype dtype, std::int64_t rows, std::int64_t columns) {
    const std::int64_t stride = columns + (random.once_in(2) ? 0 : random.below(20));
    const std::int64_t elements = rows == 0 || columns == 0 ? 0 : (rows - 1) * stride + columns;
    const auto bytes = static_cast<std::size_t>(elements) * size_of(dtype);
    const auto where = static_cast<unsigned>(random.below(3));
    const auto shift = static_cast<std::size_t>(random.once_in(4) ? random.below(64) : 0);
    Matrix matrix{stride, std::make_unique<Region>(bytes, where, shift)};
    random.fill(dtype, matrix.region->data(), elements);
    return matrix;
}

}  // namespace
