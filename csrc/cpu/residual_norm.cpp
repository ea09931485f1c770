// Checks at the door, which kernels run (those of reduce.h's instruction set), and room for the rows they widen.
#include "residual_norm.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "residual_norm_kernels.h"

namespace tpk {
namespace {

constexpr std::uintptr_t kAlignment = 64;

const ResidualNormKernels& active_kernels() {
    switch (active_isa()) {
        case Isa::kPortable:
            break;
        case Isa::kAvx2:
            return *avx2_residual_norm();
        case Isa::kAvx512:
            return *avx512_residual_norm();
    }
    return *portable_residual_norm();
}

void check_count(const char* name, std::int64_t value) {
    if (value >= 0) return;
    throw std::invalid_argument(std::string(name) + " must be at least 0, got " + std::to_string(value));
}

bool is_empty(const ResidualNorm& call) {
    check_count("rows", call.rows);
    check_count("columns", call.columns);
    return call.rows == 0 || call.columns == 0;
}

// Kept by the thread for its next call: fresh pages would cost as much as a row.
void* aligned_room(const ResidualNorm& call) {
    constexpr std::size_t kWidest = 8;
    const std::size_t bytes = static_cast<std::size_t>(kRoomRows * call.columns) * kWidest;
    thread_local std::vector<char> room;
    if (room.size() < bytes + kAlignment) room.resize(bytes + kAlignment);
    const auto address = reinterpret_cast<std::uintptr_t>(room.data());
    return room.data() + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace

void residual_norm(const ResidualNorm& call, const void* y, const void* residual, void* sums, void* normed,
                   void* scales) {
    const auto dtype = static_cast<std::size_t>(call.dtype);
    size_of(call.dtype);  // refuses what is no dtype
    if (is_empty(call)) return;
    active_kernels().forward[dtype](call, y, residual, sums, normed, scales, aligned_room(call));
}

void residual_norm_backward(const ResidualNorm& call, const void* dn, const void* dr, const void* sums,
                            const void* scales, void* d, void* dweight) {
    const auto dtype = static_cast<std::size_t>(call.dtype);
    const std::size_t wide_bytes = size_of(call.dtype) == 8 ? 8 : 4;
    if (is_empty(call)) {
        if (dweight != nullptr) {
            char* const bytes = static_cast<char*>(dweight);
            for (std::size_t i = 0; i < static_cast<std::size_t>(call.columns) * wide_bytes; ++i) bytes[i] = 0;
        }
        return;
    }
    active_kernels().backward[dtype](call, dn, dr, sums, scales, d, dweight, aligned_room(call));
}

}  // namespace tpk
