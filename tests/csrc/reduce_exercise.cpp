// Drives csrc/cpu/reduce.h from tests: plain C functions for ctypes (test_reduce.py), and a main for sanitizers that
// runs random cases in buffers of exactly the needed size, at either end of which lies an inaccessible page.
#include "exercise.h"

#include <string>
#include <vector>

namespace {

using Bytes = std::vector<unsigned char>;

double add(Dtype dtype, double a, double b) {
    if (dtype == Dtype::kFloat64) return a + b;
    return static_cast<double>(static_cast<float>(a) + static_cast<float>(b));
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

int few_rows_cases(long cases);       // few_rows_exercise.cpp
int residual_norm_cases(long cases);  // residual_norm_exercise.cpp
int tree_sum_cases(long cases);       // tree_sum_exercise.cpp

int main(int argc, char** argv) {
    const long cases = argc > 1 ? std::atol(argv[1]) : 1000;
    const std::string kind = argc > 2 ? argv[2] : "reduce";
    if (kind == "few_rows") return few_rows_cases(cases);
    if (kind == "residual_norm") return residual_norm_cases(cases);
    if (kind == "tree_sum") return tree_sum_cases(cases);
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
