#include "cpu/collectives.h"

#include <array>
#include <numeric>
#include <stdexcept>
#include <string>

namespace tpk {

void reduce_slots(Channel& channel, const SlotRows& from, Epoch signals, const void* bias, void* out,
                  std::int64_t out_stride) {
    std::array<ConstRows, kMaxRanks> parts;
    channel.wait_for_all(signals);
    for (int rank = 0; rank < channel.size(); ++rank) {
        parts[static_cast<std::size_t>(rank)] = {channel.slot(rank) + from.offset, from.stride};
    }
    sum_rows(from.dtype, parts.data(), channel.size(), bias, out, out_stride, from.rows, from.columns);
}

void all_reduce(Channel& channel, std::uint64_t fingerprint, const std::string& text, Dtype dtype, const void* x,
                void* out, std::int64_t count) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(size_of(dtype));
    if (count < 0 || static_cast<std::size_t>(bytes) > channel.capacity()) {
        throw std::invalid_argument("an all-reduce of " + std::to_string(count) + " elements does not fit into " +
                                    std::to_string(channel.capacity()) + " bytes per call: grow first");
    }
    channel.begin(fingerprint, text);
    copy_rows(x, bytes, channel.slot(channel.rank()), bytes, 1, bytes);
    channel.signal();
    reduce_slots(channel, {dtype, 0, count, 1, count}, 1, nullptr, out, count);
    channel.end();
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
