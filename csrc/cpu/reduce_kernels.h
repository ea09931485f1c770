// What the dispatcher (reduce.cpp) knows of an instruction set: one table of functions per file of kernels.
//
// The files of kernels are compiled for CPUs that the machine may not have. Nothing compiled there may be shared with
// the rest of the program: the linker keeps one copy of an inline function, and could keep theirs. So they define
// nothing outside an unnamed namespace but their table's getter, use no std:: function, and need no initialisation
// before main.
//
// Rounding to bf16 needs no test for NaN, which integer rounding could carry into infinity or zero: a sum of widened
// bf16 is NaN only with the payload of a bf16, or with the CPU's default one, so that the dropped bits are zeros.
#pragma once

#include "reduce.h"

namespace tpk {

struct SumCall {
    const ConstRows* parts;
    std::int64_t num_parts;
    const void* bias;
    void* out;
    std::int64_t out_stride;
    std::int64_t rows;
    std::int64_t columns;
    bool stream;    // write around the caches; out is none of the parts, and aligned to its elements
    bool prefetch;  // more parts than the hardware follows, and too large for the caches
};

struct Kernels {
    void (*sum[4])(const SumCall&);                                          // by Dtype
    void (*copy_streaming)(const char* src, char* dst, std::int64_t bytes);  // null: memcpy does
};

// Null where the compiler's target does not have them.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace tpk
