// Random cases of csrc/cpu/residual_norm.h for the sanitizers, in buffers of exactly the needed size, at either end of
// which lies an inaccessible page. Every instruction set must give the bits of the portable one.
#include "residual_norm.h"

#include <vector>

#include "exercise.h"

namespace {

using Bytes = std::vector<unsigned char>;

// Not shifted off its elements: rows are torch's.
std::unique_ptr<Region> make_rows(Random& random, Dtype dtype, std::int64_t elements) {
    const auto bytes = static_cast<std::size_t>(elements) * size_of(dtype);
    auto region = std::make_unique<Region>(bytes, static_cast<unsigned>(random.below(3)), 0);
    random.fill(dtype, region->data(), elements);
    return region;
}

bool same(Dtype dtype, const Bytes& a, const Bytes& b) {
    const std::size_t size = size_of(dtype);
    for (std::size_t at = 0; at + size <= a.size(); at += size) {
        if (std::memcmp(&a[at], &b[at], size) == 0) continue;
        if (!std::isnan(read(dtype, &a[at])) || !std::isnan(read(dtype, &b[at]))) return false;
    }
    return a.size() == b.size();
}

Bytes bytes_of(Region& region) { return {region.data(), region.data() + region.bytes()}; }

// All results of one call in each direction.
std::vector<Bytes> results(std::uint64_t seed) {
    Random random{std::mt19937_64{seed}};
    const auto dtype = static_cast<Dtype>(random.below(4));
    const Dtype wide = dtype == Dtype::kFloat64 ? dtype : Dtype::kFloat32;
    const std::int64_t rows = random.below(5);
    const std::int64_t columns = random.once_in(8) ? random.below(1000) : random.below(70);
    const auto weight = make_rows(random, dtype, columns);
    const auto y = make_rows(random, dtype, rows * columns);
    const auto residual = make_rows(random, dtype, rows * columns);
    const auto normed = make_rows(random, dtype, rows * columns);
    const auto scales = make_rows(random, wide, rows);
    const auto dn = make_rows(random, dtype, rows * columns);
    const auto dr = make_rows(random, dtype, rows * columns);
    const auto dweight = make_rows(random, wide, columns);
    const tpk::ResidualNorm call = {dtype, rows, columns, weight->data(), 1e-5};
    tpk::residual_norm(call, y->data(), residual->data(), y->data(), normed->data(), scales->data());
    const bool has_dn = !random.once_in(4);
    const bool has_dr = !random.once_in(4);
    const bool has_dweight = !random.once_in(4);
    tpk::residual_norm_backward(call, has_dn ? dn->data() : nullptr, has_dr ? dr->data() : nullptr, y->data(),
                                scales->data(), residual->data(), has_dweight ? dweight->data() : nullptr);
    std::vector<Bytes> found = {bytes_of(*y), bytes_of(*normed), bytes_of(*residual)};
    // As doubles or floats: the judge reads all of them as elements of `dtype`, which is what they are not.
    if (columns > 0 && rows > 0 && wide == dtype) {
        found.push_back(bytes_of(*scales));
        if (has_dweight) found.push_back(bytes_of(*dweight));
    }
    return found;
}

Dtype dtype_of(std::uint64_t seed) {
    Random random{std::mt19937_64{seed}};
    return static_cast<Dtype>(random.below(4));
}

}  // namespace

int residual_norm_cases(long cases);

int residual_norm_cases(long cases) {
    std::vector<std::vector<Bytes>> expected;
    for (int isa = 0; isa <= static_cast<int>(tpk::best_isa()); ++isa) {
        tpk::force_isa(static_cast<tpk::Isa>(isa));
        for (long i = 0; i < cases; ++i) {
            const auto seed = static_cast<std::uint64_t>(20260101 + i);
            const std::vector<Bytes> found = results(seed);
            if (isa == 0) expected.push_back(found);
            const std::vector<Bytes>& wanted = expected[static_cast<std::size_t>(i)];
            for (std::size_t part = 0; part < found.size(); ++part) {
                if (same(dtype_of(seed), found[part], wanted[part])) continue;
                std::printf("%s: case %ld differs in part %zu\n", tpk::name_of(tpk::active_isa()), i, part);
                return 1;
            }
        }
        std::printf("%s: %ld cases\n", tpk::name_of(tpk::active_isa()), cases);
    }
    return 0;
}
