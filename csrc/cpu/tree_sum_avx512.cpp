// The tree sums for CPUs with AVX-512 (F, BW, VL, DQ). See reduce_kernels.h for what this file must not define.
#include "tree_sum_kernels.h"

#if defined(__x86_64__)

namespace tpk {
namespace {

#include "tree_sum_loops.h"

}  // namespace

const TreeKernels* avx512_trees() { return &kKernels; }

}  // namespace tpk

#else

const tpk::TreeKernels* tpk::avx512_trees() { return nullptr; }

#endif
