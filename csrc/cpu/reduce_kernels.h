// What the dispatcher (reduce.cpp) knows of an instruction set: one table of functions per file of kernels.
//
// The files of kernels are compiled for CPUs that the machine may not have. Nothing compiled there may be shared with
// the rest of the program: the linker keeps one copy of an inline function, and could keep theirs. So they define
// nothing outside an unnamed namespace but their table's getter, use no std:: function, and need no initialisation
// before main.
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
};

struct Kernels {
    using Sum = void (*)(const SumCall&);
    using Copy = void (*)(const char* src, char* dst, std::int64_t bytes);

    Sum sum[4];        // by Dtype
    Sum sum_large[4];  // the same with streaming stores; out must be none of the parts, aligned to its elements
    Copy copy_large;   // with streaming stores; null: memcpy does
};

// Null where the compiler's target does not have them.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace tpk
