// Drives csrc/cpu/reduce.h from tests: plain C functions for ctypes (test_reduce.py), and a main for sanitizers that
// runs random cases in buffers of exactly the needed size, at either end of which lies an inaccessible page.
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
#include <vector>

#include "reduce.h"

namespace {

using tpk::Dtype;
using Bytes = std::vector<unsigned char>;

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

double from_fields(std::uint32_t bits, int mantissa_bits, int bias, std::uint32_t max_exponent) {
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
std::uint16_t to_fields(double value, int mantissa_bits, int bias, std::uint32_t max_exponent) {
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

double read(Dtype dtype, const unsigned char* from) {
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

void write(Dtype dtype, unsigned char* to, double value) {
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

double add(Dtype dtype, double a, double b) {
    if (dtype == Dtype::kFloat64) return a + b;
    return static_cast<double>(static_cast<float>(a) + static_cast<float>(b));
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

Matrix make_matrix(Random& random, Dtype dtype, std::int64_t rows, std::int64_t columns) {
    const std::int64_t stride = columns + (random.once_in(2) ? 0 : random.below(20));
    const std::int64_t elements = rows == 0 || columns == 0 ? 0 : (rows - 1) * stride + columns;
    const auto bytes = static_cast<std::size_t>(elements) * size_of(dtype);
    const auto where = static_cast<unsigned>(random.below(3));
    const auto shift = static_cast<std::size_t>(random.once_in(4) ? random.below(64) : 0);
    Matrix matrix{stride, std::make_unique<Region>(bytes, where, shift)};
    random.fill(dtype, matrix.region->data(), elements);
    return matrix;
}

bool same(Dtype dtype, const unsigned char* a, const unsigned char* b) {
    if (std::memcmp(a, b, size_of(dtype)) == 0) return true;
    return std::isnan(read(dtype, a)) && std::isnan(read(dtype, b));
}

bool sum_case(Random& random) {
    const auto dtype = static_cast<Dtype>(random.below(4));
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t rows = random.below(5);
    const std::int64_t columns = random.once_in(8) ? random.below(3000) : random.below(150);
    const int num_parts = static_cast<int>(random.once_in(10) ? 64 : 1 + random.below(6));
    std::vector<Matrix> matrices;
    std::vector<tpk::ConstRows> parts;
    for (int p = 0; p < num_parts; ++p) {
        matrices.push_back(make_matrix(random, dtype, rows, columns));
        parts.push_back({matrices.back().region->data(), matrices.back().stride});
    }
    Matrix bias = make_matrix(random, dtype, 1, columns);
    const bool has_bias = random.once_in(2);
    Matrix fresh = make_matrix(random, dtype, rows, columns);
    const bool in_place = random.once_in(3);
    Matrix& out = in_place ? matrices[static_cast<std::size_t>(random.below(num_parts))] : fresh;
    tpk::force_streaming_threshold(random.once_in(2) ? 0 : std::numeric_limits<std::int64_t>::max());

    // What lies between the rows must stay as it is.
    Bytes expected(out.region->data(), out.region->data() + out.region->bytes());
    for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
            double sum = 0;
            for (int p = 0; p < num_parts; ++p) {
                Matrix& part = matrices[static_cast<std::size_t>(p)];
                const double value = read(dtype, part.region->data() + (i * part.stride + j) * size);
                sum = p == 0 ? value : add(dtype, sum, value);
            }
            if (has_bias) sum = add(dtype, sum, read(dtype, bias.region->data() + j * size));
            write(dtype, expected.data() + (i * out.stride + j) * size, sum);
        }
    }
    tpk::sum_rows(dtype, parts.data(), num_parts, has_bias ? bias.region->data() : nullptr, out.region->data(),
                  out.stride, rows, columns);
    for (std::size_t at = 0; at < expected.size(); at += static_cast<std::size_t>(size)) {
        if (same(dtype, expected.data() + at, out.region->data() + at)) continue;
        std::printf("%s: dtype %u, %d parts, %ld x %ld, bias %d, in place %d: byte %zu is %.17g, expected %.17g\n",
                    tpk::name_of(tpk::active_isa()), static_cast<unsigned>(dtype), num_parts, static_cast<long>(rows),
                    static_cast<long>(columns), has_bias, in_place, at, read(dtype, out.region->data() + at),
                    read(dtype, expected.data() + at));
        return false;
    }
    return true;
}

bool copy_case(Random& random) {
    const std::int64_t rows = random.below(4);
    const std::int64_t row_bytes = random.once_in(4) ? random.below(9000) : random.below(300);
    const Dtype whatever = Dtype::kFloat16;  // an even count of bytes per element; the last byte may stay unused
    Matrix src = make_matrix(random, whatever, rows, (row_bytes + 1) / 2);
    Matrix dst = make_matrix(random, whatever, rows, (row_bytes + 1) / 2);
    tpk::force_streaming_threshold(random.once_in(2) ? 0 : std::numeric_limits<std::int64_t>::max());
    Bytes expected(dst.region->data(), dst.region->data() + dst.region->bytes());
    for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < row_bytes; ++j) {
            expected[static_cast<std::size_t>(i * dst.stride * 2 + j)] = src.region->data()[i * src.stride * 2 + j];
        }
    }
    tpk::copy_rows(src.region->data(), src.stride * 2, dst.region->data(), dst.stride * 2, rows, row_bytes);
    if (expected.empty() || std::memcmp(expected.data(), dst.region->data(), expected.size()) == 0) return true;
    std::printf("%s: copy of %ld x %ld bytes differs\n", tpk::name_of(tpk::active_isa()), static_cast<long>(rows),
                static_cast<long>(row_bytes));
    return false;
}

}  // namespace

extern "C" {

const char* reduce_test_error() { return last_error; }

int reduce_test_sum(unsigned dtype, const void* const* data, const std::int64_t* strides, int num_parts,
                    const void* bias, void* out, std::int64_t out_stride, std::int64_t rows, std::int64_t columns) {
    return guarded([&] {
        std::vector<tpk::ConstRows> parts;
        for (int p = 0; p < num_parts; ++p) parts.push_back({data[p], strides[p]});
        tpk::sum_rows(static_cast<Dtype>(dtype), parts.data(), num_parts, bias, out, out_stride, rows, columns);
    });
}

int reduce_test_copy(const void* src, std::int64_t src_stride, void* dst, std::int64_t dst_stride, std::int64_t rows,
                     std::int64_t row_bytes) {
    return guarded([&] { tpk::copy_rows(src, src_stride, dst, dst_stride, rows, row_bytes); });
}

int reduce_test_force_isa(int isa) {
    return guarded([&] { tpk::force_isa(static_cast<tpk::Isa>(isa)); });
}

void reduce_test_force_streaming_threshold(std::int64_t bytes) { tpk::force_streaming_threshold(bytes); }
std::int64_t reduce_test_streaming_threshold() { return tpk::streaming_threshold_bytes(); }
int reduce_test_best_isa() { return static_cast<int>(tpk::best_isa()); }
int reduce_test_active_isa() { return static_cast<int>(tpk::active_isa()); }
}

int main(int argc, char** argv) {
    const long cases = argc > 1 ? std::atol(argv[1]) : 1000;
    for (int isa = 0; isa <= static_cast<int>(tpk::best_isa()); ++isa) {
        tpk::force_isa(static_cast<tpk::Isa>(isa));
        Random random{std::mt19937_64{20260101}};
        for (long i = 0; i < cases; ++i) {
            if (!sum_case(random) || !copy_case(random)) {
                std::printf("case %ld failed\n", i);
                return 1;
            }
        }
        std::printf("%s: %ld cases\n", tpk::name_of(tpk::active_isa()), cases);
    }
    return 0;
}
