// The residual norm for any CPU; the vectors are those of the target's baseline (SSE2 on x86-64, NEON on aarch64).
#include "residual_norm_kernels.h"

namespace tpk {
namespace {

#include "residual_norm_loops.h"

}  // namespace

const ResidualNormKernels* portable_residual_norm() { return &kKernels; }

}  // namespace tpk
