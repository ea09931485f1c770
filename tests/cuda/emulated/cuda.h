// The driver's names in csrc/cuda/stream_writes.cu; the functions are the emulated runtime's.
#pragma once

#include "cuda_runtime.h"
