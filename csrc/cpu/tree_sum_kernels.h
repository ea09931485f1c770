// What the dispatcher (tree_sum.cpp) knows of an instruction set; the rules of reduce_kernels.h hold here, too.
#pragma once

#include "tree_sum.h"

namespace tpk {

struct TreeCall {
    const ConstRows* parts;
    int blocks;  // a power of two
    int terms;   // parts of a block
    const void* bias;
    void* out;
    std::int64_t out_stride;
    std::int64_t rows;
    std::int64_t columns;
};

// Both by Dtype.
struct TreeKernels {
    void (*products[4])(const TreeCall& call);
    void (*sums[4])(const TreeCall& call);
};

// Null where the compiler's target does not have them.
const TreeKernels* portable_trees();
const TreeKernels* avx2_trees();
const TreeKernels* avx512_trees();

}  // namespace tpk
