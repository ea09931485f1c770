// Drives csrc/cpu/few_rows.h from tests: plain C functions for ctypes (test_few_rows.py), and random cases for
// the sanitizers, in buffers of exactly the needed size, at either end of which lies an inaccessible page.
#include "few_rows.h"

#include <vector>

#include "exercise.h"

namespace {

struct Operand {
    Dtype dtype;
    Matrix matrix;
    std::vector<double> values;  // row by row, without gaps
};

// Small integers: their sums are exact in fp32, in any order, so that only the last rounding is left to compare.
Operand make_operand(Random& random, Dtype dtype, std::int64_t rows, std::int64_t columns) {
    Operand operand{dtype, make_matrix(random, dtype, rows, columns), {}};
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            unsigned char* to = operand.matrix.region->data() + (row * operand.matrix.stride + column) * size;
            operand.values.push_back(static_cast<double>(random.below(15) - 7));
            write(dtype, to, operand.values.back());
        }
    }
    return operand;
}

bool multiply_case(Random& random) {
    const auto dtype = static_cast<Dtype>(random.below(3));
    if (tpk::few_rows_isa_of(dtype) == nullptr) return true;
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t rows = random.once_in(4) ? random.below(tpk::kMaxFewRows + 1) : random.below(6);
    const std::int64_t columns = random.below(40);
    const std::int64_t contraction = random.once_in(16) ? random.below(2500) : random.below(130);
    const Operand x = make_operand(random, dtype, rows, contraction);
    const Operand w = make_operand(random, dtype, columns, contraction);
    const Operand bias = make_operand(random, dtype, 1, columns);
    const bool has_bias = random.once_in(2);
    Matrix y = make_matrix(random, dtype, rows, columns);
    std::vector<unsigned char> expected(y.region->data(), y.region->data() + y.region->bytes());
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::int64_t n = 0; n < columns; ++n) {
            double sum = has_bias ? bias.values.data()[n] : 0;
            const double* of_x = x.values.data() + m * contraction;
            const double* of_w = w.values.data() + n * contraction;
            for (std::int64_t k = 0; k < contraction; ++k) sum += of_x[k] * of_w[k];
            write(dtype, expected.data() + (m * y.stride + n) * size, sum);
        }
    }
    tpk::multiply_few_rows({dtype, x.matrix.region->data(), x.matrix.stride, w.matrix.region->data(), w.matrix.stride,
                            has_bias ? bias.matrix.region->data() : nullptr, y.region->data(), y.stride, rows, columns,
                            contraction});
    if (expected.empty() || std::memcmp(expected.data(), y.region->data(), expected.size()) == 0) return true;
    std::printf("%s: dtype %u, %ld x %ld x %ld, bias %d differs\n", tpk::few_rows_isa_of(dtype),
                static_cast<unsigned>(dtype), static_cast<long>(rows), static_cast<long>(columns),
                static_cast<long>(contraction), has_bias);
    return false;
}

}  // namespace

extern "C" {

const char* few_rows_test_error() { return last_error; }

int few_rows_test_multiply(unsigned dtype, const void* x, std::int64_t x_stride, const void* w, std::int64_t w_stride,
                           const void* bias, void* y, std::int64_t y_stride, std::int64_t rows, std::int64_t columns,
                           std::int64_t contraction) {
    return guarded([&] {
        tpk::multiply_few_rows(
            {static_cast<Dtype>(dtype), x, x_stride, w, w_stride, bias, y, y_stride, rows, columns, contraction});
    });
}

int few_rows_test_force_isa(int isa) {
    return guarded([&] { tpk::force_few_rows_isa(static_cast<tpk::FewRowsIsa>(isa)); });
}

int few_rows_test_best_isa() { return static_cast<int>(tpk::best_few_rows_isa()); }
const char* few_rows_test_isa_of(unsigned dtype) { return tpk::few_rows_isa_of(static_cast<Dtype>(dtype)); }
}

int few_rows_cases(long cases);

int few_rows_cases(long cases) {
    for (int isa = 0; isa <= static_cast<int>(tpk::best_few_rows_isa()); ++isa) {
        tpk::force_few_rows_isa(static_cast<tpk::FewRowsIsa>(isa));
        Random random{std::mt19937_64{20260101}};
        for (long i = 0; i < cases; ++i) {
            if (!multiply_case(random)) {
                std::printf("case %ld failed\n", i);
                return 1;
            }
        }
        std::printf("%s: %ld cases\n", tpk::few_rows_isa_of(Dtype::kBFloat16), cases);
    }
    return 0;
}
