// Checks at the door, and which kernels run: those of reduce.h's instruction set.
#include "tree_sum.h"

#include <stdexcept>
#include <string>

#include "tree_sum_kernels.h"

namespace tpk {
namespace {

const TreeKernels& active_kernels() {
    switch (active_isa()) {
        case Isa::kPortable:
            break;
        case Isa::kAvx2:
            return *avx2_trees();
        case Isa::kAvx512:
            return *avx512_trees();
    }
    return *portable_trees();
}

// Whether there is anything to add; rows that lie back to back become one long row.
bool prepare(TreeCall& call, int num_parts) {
    if (call.terms < 1 || call.blocks < 1 || call.blocks * call.terms != num_parts ||
        (call.blocks & (call.blocks - 1)) != 0) {
        throw std::invalid_argument("num_parts must be a power of two of blocks of terms, got " +
                                    std::to_string(num_parts) + " parts in blocks of " + std::to_string(call.terms));
    }
    if (call.rows < 0 || call.columns < 0) {
        throw std::invalid_argument("rows and columns must be at least 0, got " + std::to_string(call.rows) + " x " +
                                    std::to_string(call.columns));
    }
    bool back_to_back = call.bias == nullptr && call.out_stride == call.columns;
    for (int p = 0; p < num_parts; ++p) back_to_back = back_to_back && call.parts[p].stride == call.columns;
    if (back_to_back) {
        call.columns *= call.rows;
        call.rows = 1;
    }
    return call.rows != 0 && call.columns != 0;
}

}  // namespace

void tree_of_products(Dtype dtype, const ConstRows* parts, int num_parts, int terms, void* sums,
                      std::int64_t sums_stride, std::int64_t rows, std::int64_t columns) {
    size_of(dtype);  // refuses what is no dtype
    TreeCall call{parts, terms < 1 ? 0 : num_parts / terms, terms, nullptr, sums, sums_stride, rows, columns};
    if (prepare(call, num_parts)) active_kernels().products[static_cast<std::size_t>(dtype)](call);
}

void tree_of_sums(Dtype dtype, const ConstRows* parts, int num_parts, const void* bias, void* out,
                  std::int64_t out_stride, std::int64_t rows, std::int64_t columns) {
    size_of(dtype);
    TreeCall call{parts, num_parts, 1, bias, out, out_stride, rows, columns};
    if (prepare(call, num_parts)) active_kernels().sums[static_cast<std::size_t>(dtype)](call);
}

}  // namespace tpk
