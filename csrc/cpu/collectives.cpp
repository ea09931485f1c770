#include "cpu/collectives.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace tpk {

namespace {

// A large all-reduce goes piece by piece through two places of the slot: the pieces stay in the cache, and the slot
// stays small.  2 ranks, 16 MB bf16, AMD EPYC, 2026-11-20: 128 KiB to 1 MiB take the same 3 to 4 ms.
constexpr std::size_t kPieceBytes = 256 * 1024;
constexpr std::size_t kPiecesInFlight = 2;
// With more ranks, and from this size on, each rank sums its share of a piece and copies the others' sums; below, or
// with two ranks, everybody sums everything.
constexpr std::int64_t kShareBytes = 64 * 1024;

// One piece: stage, sum, and with many ranks spread.  `signals` counts those of the call.
//
// A place is written again two pieces later.  A rank stages piece j + 2 after it has waited for everybody's stage of
// j + 1, which everybody signals after having finished reading j.
//
// The places stay in the cache whatever the size of the call; `out` bypasses it where the whole is large.
void all_reduce_piece(Channel& channel, const SlotRows& place, const std::byte* x, std::byte* out, Epoch& signals,
                      std::int64_t whole_bytes) {
    const auto item = static_cast<std::int64_t>(size_of(place.dtype));
    const std::int64_t bytes = place.columns * item;
    copy_rows(x, bytes, channel.slot(channel.rank()) + place.offset, bytes, 1, bytes);
    channel.signal();
    ++signals;
    if (channel.size() == 2 || bytes < kShareBytes) {
        reduce_slots(channel, place, signals, nullptr, out, place.stride, whole_bytes);
        return;
    }
    const std::int64_t share = (place.columns + channel.size() - 1) / channel.size();
    const auto first = [&](int rank) { return std::min(place.columns, rank * share); };
    const auto at = [&](int rank, int share_of) {
        return channel.slot(rank) + place.offset + static_cast<std::size_t>(first(share_of) * item);
    };
    const auto length = [&](int rank) { return first(rank + 1) - first(rank); };
    const int own = channel.rank();
    // Nobody else reads our share of our own place before the next signal: the sum takes the addend's place.
    const SlotRows mine = {place.dtype, place.offset + static_cast<std::size_t>(first(own) * item), length(own), 1,
                           length(own)};
    reduce_slots(channel, mine, signals, nullptr, at(own, own), length(own));
    channel.signal();
    ++signals;
    for (int step = 0; step < channel.size(); ++step) {
        const int rank = (own + step) % channel.size();
        if (rank != own) channel.wait(rank, signals);
        const std::int64_t share_bytes = length(rank) * item;
        copy_rows(at(rank, rank), share_bytes, out + first(rank) * item, share_bytes, 1, share_bytes, whole_bytes);
    }
}

}  // namespace

void reduce_slots(Channel& channel, const SlotRows& from, Epoch signals, const void* bias, void* out,
                  std::int64_t out_stride, std::int64_t whole_bytes) {
    std::array<ConstRows, kMaxRanks> parts;
    channel.wait_for_all(signals);
    for (int rank = 0; rank < channel.size(); ++rank) {
        parts[static_cast<std::size_t>(rank)] = {channel.slot(rank) + from.offset, from.stride};
    }
    sum_rows(from.dtype, parts.data(), channel.size(), bias, out, out_stride, from.rows, from.columns, whole_bytes);
}

std::size_t all_reduce_bytes(std::size_t bytes) { return bytes <= kPieceBytes ? bytes : kPiecesInFlight * kPieceBytes; }

void all_reduce(Channel& channel, std::uint64_t fingerprint, const std::string& text, Dtype dtype, const void* x,
                void* out, std::int64_t count) {
    const auto item = static_cast<std::int64_t>(size_of(dtype));
    const auto needed = all_reduce_bytes(static_cast<std::size_t>(count * item));
    if (count < 0 || needed > channel.capacity()) {
        throw std::invalid_argument("an all-reduce of " + std::to_string(count) + " elements stages " +
                                    std::to_string(needed) + " bytes, the channel has " +
                                    std::to_string(channel.capacity()) + ": grow first");
    }
    channel.begin(fingerprint, text);
    const std::int64_t whole_bytes = x == out ? 0 : 2 * count * item;  // in place, its lines are in the cache already
    const std::int64_t piece = static_cast<std::int64_t>(kPieceBytes) / item;
    Epoch signals = 0;
    std::size_t place = 0;
    for (std::int64_t start = 0; start == 0 || start < count; start += piece) {
        const std::int64_t length = std::min(piece, count - start);
        all_reduce_piece(channel, {dtype, place * kPieceBytes, length, 1, length},
                         static_cast<const std::byte*>(x) + start * item, static_cast<std::byte*>(out) + start * item,
                         signals, whole_bytes);
        place = (place + 1) % kPiecesInFlight;
    }
    channel.end();
}

RepeatedSum::RepeatedSum(Channel& channel, std::uint64_t fingerprint, std::string text, const SlotRows& matrix)
    : channel_(channel), fingerprint_(fingerprint), text_(std::move(text)), matrix_(matrix) {
    const auto bytes = static_cast<std::size_t>(matrix.rows * matrix.columns) * size_of(matrix.dtype);
    if (matrix.rows < 0 || matrix.columns < 0 || matrix.offset != 0 || matrix.stride != matrix.columns ||
        bytes > channel.capacity()) {
        throw std::invalid_argument("a sum of " + std::to_string(bytes) + " bytes at " + std::to_string(matrix.offset) +
                                    ", the channel has " + std::to_string(channel.capacity()) + ": grow first");
    }
}

bool RepeatedSum::start(void* x, const void* bias) {
    const std::int64_t bytes = matrix_.rows * matrix_.columns * static_cast<std::int64_t>(size_of(matrix_.dtype));
    channel_.begin(fingerprint_, text_);
    copy_rows(x, bytes, channel_.slot(channel_.rank()), bytes, 1, bytes);
    return sum_if_all_come(x, bias);
}

bool RepeatedSum::start(const void* x, const void* w, std::int64_t w_stride, std::int64_t contraction, void* out,
                        const void* bias) {
    channel_.begin(fingerprint_, text_);
    multiply_few_rows({matrix_.dtype, x, contraction, w, w_stride, nullptr, channel_.slot(channel_.rank()),
                       matrix_.columns, matrix_.rows, matrix_.columns, contraction});
    return sum_if_all_come(out, bias);
}

bool RepeatedSum::sum_if_all_come(void* out, const void* bias) {
    channel_.signal();
    if (!channel_.spin_for_all(1)) return false;
    finish(out, bias);
    return true;
}

void RepeatedSum::finish(void* x, const void* bias) {
    reduce_slots(channel_, matrix_, 1, bias, x, matrix_.columns);
    channel_.end();
}

void gather_slots(Channel& channel, const GatherPlan& plan, const void* own, void* out) {
    const std::int64_t stride = std::accumulate(plan.row_bytes.begin(), plan.row_bytes.end(), std::int64_t{0});
    const auto lay = [&](int rank, const void* from) {
        const auto first = plan.row_bytes.begin();
        const std::int64_t offset = std::accumulate(first, first + rank, std::int64_t{0});
        const std::int64_t row_bytes = plan.row_bytes[static_cast<std::size_t>(rank)];
        copy_rows(from, row_bytes, static_cast<std::byte*>(out) + offset, stride, plan.rows, row_bytes);
    };
    lay(channel.rank(), own);
    for (int step = 1; step < channel.size(); ++step) {
        const int peer = (channel.rank() + step) % channel.size();
        channel.wait(peer, 1);
        lay(peer, channel.slot(peer));
    }
}

}  // namespace tpk
