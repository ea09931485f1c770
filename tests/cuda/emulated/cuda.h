// The driver's names in csrc/cuda/pipeline.cu; there is no driver.
#pragma once

#include "cuda_runtime.h"

using CUresult = int;
using CUstream = cudaStream_t;
using CUdeviceptr = std::uintptr_t;
using cuuint32_t = std::uint32_t;
enum { CU_STREAM_WRITE_VALUE_DEFAULT = 0 };
