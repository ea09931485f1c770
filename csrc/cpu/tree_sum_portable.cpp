// The tree sums for any CPU; the vectors are those of the target's baseline (SSE2 on x86-64, NEON on aarch64).
#include "tree_sum_kernels.h"

namespace tpk {
namespace {

#include "tree_sum_loops.h"

}  // namespace

const TreeKernels* portable_trees() { return &kKernels; }

}  // namespace tpk
