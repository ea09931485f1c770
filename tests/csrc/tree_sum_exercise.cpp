// Random cases of csrc/cpu/tree_sum.h for the sanitizers, in buffers of exactly the needed size, at either end of which
// lies an inaccessible page. Every instruction set must give the bits of the portable one.
#include "tree_sum.h"

#include <vector>

#include "exercise.h"

namespace {

// Not shifted off its elements: rows are torch's.
Matrix make_rows(Random& random, Dtype dtype, std::int64_t rows, std::int64_t columns) {
    const std::int64_t stride = columns + (random.once_in(2) ? 0 : random.below(20));
    const std::int64_t elements = rows == 0 || columns == 0 ? 0 : (rows - 1) * stride + columns;
    const auto bytes = static_cast<std::size_t>(elements) * size_of(dtype);
    Matrix matrix{stride, std::make_unique<Region>(bytes, static_cast<unsigned>(random.below(3)), 0)};
    random.fill(dtype, matrix.region->data(), elements);
    return matrix;
}

// The rows of one call; a NaN is written as one pattern, for its payload is nobody's promise.
std::vector<unsigned char> sums_of(std::uint64_t seed) {
    Random random{std::mt19937_64{seed}};
    const auto dtype = static_cast<Dtype>(random.below(4));
    const Dtype wide = dtype == Dtype::kFloat64 ? dtype : Dtype::kFloat32;
    const std::int64_t rows = random.below(5);
    const std::int64_t columns = random.once_in(8) ? random.below(1500) : random.below(70);
    const int blocks = 1 << random.below(5);
    const bool of_products = random.once_in(2);
    const int terms = of_products ? static_cast<int>(1 + random.below(3)) : 1;
    std::vector<Matrix> matrices;
    std::vector<tpk::ConstRows> parts;
    for (int part = 0; part < blocks * terms; ++part) {
        matrices.push_back(make_rows(random, of_products ? dtype : wide, rows, columns));
        parts.push_back({matrices.back().region->data(), matrices.back().stride});
    }
    const Dtype to = of_products ? wide : dtype;
    const Matrix out = make_rows(random, to, rows, columns);
    const Matrix bias = make_rows(random, dtype, 1, columns);
    if (of_products) {
        tpk::tree_of_products(dtype, parts.data(), blocks * terms, terms, out.region->data(), out.stride, rows,
                              columns);
    } else {
        tpk::tree_of_sums(dtype, parts.data(), blocks, random.once_in(2) ? nullptr : bias.region->data(),
                          out.region->data(), out.stride, rows, columns);
    }
    const std::size_t size = size_of(to);
    std::vector<unsigned char> found(out.region->data(), out.region->data() + out.region->bytes());
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            unsigned char* at = found.data() + static_cast<std::size_t>(row * out.stride + column) * size;
            if (std::isnan(read(to, at))) write(to, at, std::numeric_limits<double>::quiet_NaN());
        }
    }
    return found;  // with what lies between the rows
}

}  // namespace

int tree_sum_cases(long cases);

int tree_sum_cases(long cases) {
    std::vector<std::vector<unsigned char>> expected;
    for (int isa = 0; isa <= static_cast<int>(tpk::best_isa()); ++isa) {
        tpk::force_isa(static_cast<tpk::Isa>(isa));
        for (long i = 0; i < cases; ++i) {
            std::vector<unsigned char> found = sums_of(static_cast<std::uint64_t>(20260101 + i));
            if (isa == 0) expected.push_back(found);
            if (found == expected[static_cast<std::size_t>(i)]) continue;
            std::printf("%s: case %ld differs\n", tpk::name_of(tpk::active_isa()), i);
            return 1;
        }
        std::printf("%s: %ld cases\n", tpk::name_of(tpk::active_isa()), cases);
    }
    return 0;
}
