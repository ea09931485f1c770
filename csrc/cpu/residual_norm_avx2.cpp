// The residual norm for CPUs with AVX2. See reduce_kernels.h for what this file must not define.
#include "residual_norm_kernels.h"

#if defined(__x86_64__)

namespace tpk {
namespace {

#include "residual_norm_loops.h"

}  // namespace

const ResidualNormKernels* avx2_residual_norm() { return &kKernels; }

}  // namespace tpk

#else

const tpk::ResidualNormKernels* tpk::avx2_residual_norm() { return nullptr; }

#endif
