// Collectives over a Channel's slots, in one native call each where latency counts.
//
// Each function is a whole call of the protocol or the part of one after the caller's own work; all ranks make the same
// call with the same sizes.  Sums run in rank order, in fp32 (fp64 for fp64), rounded once: equal bits on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/channel.h"
#include "cpu/few_rows.h"
#include "cpu/reduce.h"

namespace tpk {

// A matrix in every rank's slot, at the same place: rows of `columns` elements, `stride` elements apart.
struct SlotRows {
    Dtype dtype;
    std::size_t offset;  // bytes from the start of the slot
    std::int64_t stride;
    std::int64_t rows;
    std::int64_t columns;
};

// What each rank contributes to a gathered matrix of `rows` rows: `row_bytes` consecutive bytes of each.
struct GatherPlan {
    std::int64_t rows;
    std::vector<std::int64_t> row_bytes;  // by rank
};

// out = sum over ranks of their slots' rows + bias; waits for signal `signals` of every peer.  `whole_bytes`: sum_rows'.
void reduce_slots(Channel& channel, const SlotRows& from, Epoch signals, const void* bias, void* out,
                  std::int64_t out_stride, std::int64_t whole_bytes = 0);

// What all_reduce of so many bytes needs of a slot.
std::size_t all_reduce_bytes(std::size_t bytes);

// out = sum over ranks of x: a whole call.
void all_reduce(Channel& channel, std::uint64_t fingerprint, const std::string& text, Dtype dtype, const void* x,
                void* out, std::int64_t count);

// A call that sums a small matrix over the ranks in place, made again and again: all but the addresses is settled.
// In two parts, so that the caller may hold a lock while the peers are expected at any moment, and not for long.
class RepeatedSum {
public:
    // Throws std::invalid_argument for a matrix that the channel has no room for.
    RepeatedSum(Channel& channel, std::uint64_t fingerprint, std::string text, const SlotRows& matrix);
    // Stage x, signal, spin a little.  True: x is the sum over the ranks + bias and the call has ended.  False: finish.
    bool start(void* x, const void* bias);
    // The same for x · w^T of few rows (few_rows.h), computed where it is staged: out is the sum.  x has contiguous rows of
    // `contraction` elements, back to back, w as many rows as the matrix has columns.  Takes as long as that product.
    bool start(const void* x, const void* w, std::int64_t w_stride, std::int64_t contraction, void* out,
               const void* bias);
    void finish(void* x, const void* bias);
    const SlotRows& matrix() const { return matrix_; }

private:
    bool sum_if_all_come(void* out, const void* bias);

    Channel& channel_;
    const std::uint64_t fingerprint_;
    const std::string text_;
    const SlotRows matrix_;
};

// Lay every rank's slot into `out`, whose rows are those of all ranks side by side; waits for one signal of every peer.
// Our own part comes from `own`.
void gather_slots(Channel& channel, const GatherPlan& plan, const void* own, void* out);

}  // namespace tpk
