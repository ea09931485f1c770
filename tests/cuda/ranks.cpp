// Ranks as threads that run the CUDA kernels of csrc/cuda on each other's memory, for ThreadSanitizer and for values.
//
//   ranks calls W SEED COUNT EPOCH [TIMEOUT_MS [ONE_SLOT]]   random calls with stragglers; the epochs begin at EPOCH
//   ranks failures W SEED   a rank that does not come, one that stops half-way, one that calls something else
//   ranks numbers           every 16-bit value, and what lies between them
//
// The copy engine is a thread that copies; everything else is the kernels' own source.  Prints "fine", or what is
// wrong.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cuda/one_shot_kernels.h"
#include "cuda/one_shot_norm_kernels.h"
#include "cuda/reduce_kernel.h"
#include "cuda/sync_kernels.h"
#include "cuda/two_shot_kernels.h"
#include "calls.h"
#include "failures.h"
#include "simulator.h"
#include "world.h"

namespace {

void begin(Rank& me, const Call& call) {
    me.linger();
    std::uint32_t* const flags = me.flags.data();
    const int count = static_cast<int>(me.flags.size());
    sim::launch(1, kThreads, [&] { begin_call(me.group, call.op, call.slot, call.fingerprint, flags, count); });
}

std::int64_t shard_begin(const Call& call, int rank) {
    std::int64_t rows = 0;
    for (int r = 0; r < rank; ++r) rows += call.rows[static_cast<std::size_t>(r)];
    return rows;
}

// What a fused GEMM does with the chunks of its peers: wait for the flag of each, then read.
template <typename T>
void consume(Rank& me, const Call& call, const T* gathered, T* out) {
    const Signal current = me.group.state->current;
    const std::uint32_t raised = me.group.state->raised;
    for (int step = 1; step < me.group.world_size; ++step) {
        const int peer = peer_after(me.group.rank, me.group.world_size, step);
        const std::int64_t rows = call.rows[static_cast<std::size_t>(peer)];
        for (int chunk = 0; chunk < call.chunks; ++chunk) {
            if (chunk % static_cast<int>(num_blocks()) != static_cast<int>(block_index())) continue;
            const std::uint32_t* const flag = me.flags.data() + peer * kMaxChunks + chunk;
            bool failed = false;
            if (thread_index() == 0) failed = !wait_word(me.group, flag, raised, current, {call.op, peer, chunk});
            if (any_of_block(failed)) return;
            const std::int64_t first = (shard_begin(call, peer) + chunk_begin(rows, call.chunks, chunk)) * call.columns;
            const std::int64_t end =
                (shard_begin(call, peer) + chunk_begin(rows, call.chunks, chunk + 1)) * call.columns;
            for (std::int64_t i = first + thread_index(); i < end; i += num_threads()) out[i] = gathered[i];
        }
    }
}

template <typename T>
void all_gather(const World& world, Rank& me, const Call& call) {
    const int rank = me.group.rank, size = world.size();
    const std::int64_t columns = call.columns, mine = call.rows[static_cast<std::size_t>(rank)];
    begin(me, call);
    T* const staged = as<T>(me.slots[call.slot]);
    for (int chunk = 0; chunk < call.chunks; ++chunk) {
        const std::int64_t end = chunk_begin(mine, call.chunks, chunk + 1) * columns;
        for (std::int64_t i = chunk_begin(mine, call.chunks, chunk) * columns; i < end; ++i) {
            staged[i] = value_of<T>(call.number, rank, i);
        }
        sim::launch(1, kThreads, [&] { signal_chunk(me.group, ~bit(rank), chunk); });
    }
    std::thread lane([&] {
        for (int step = 1; step < size; ++step) {
            const int peer = peer_after(rank, size, step);
            const std::int64_t rows = call.rows[static_cast<std::size_t>(peer)];
            for (int chunk = 0; chunk < call.chunks; ++chunk) {
                sim::launch(1, kThreads, [&] { wait_chunk(me.group, bit(peer), chunk, call.op); });
                const std::int64_t first = chunk_begin(rows, call.chunks, chunk) * columns;
                const std::int64_t count = chunk_begin(rows, call.chunks, chunk + 1) * columns - first;
                std::memcpy(as<T>(me.gathered) + shard_begin(call, peer) * columns + first,
                            as<T>(world.at(peer).slots[call.slot]) + first,
                            static_cast<std::size_t>(count) * sizeof(T));
                sim::launch(1, 1, [&] { raise_flags(me.group, me.flags.data() + chunk, kMaxChunks, bit(peer)); });
            }
        }
    });
    sim::launch(kBlocks, kThreads, [&] { consume(me, call, as<T>(me.gathered), as<T>(me.out)); });
    lane.join();
    for (int peer = 0; peer < size; ++peer) {
        const std::int64_t rows = peer == rank ? 0 : call.rows[static_cast<std::size_t>(peer)];
        for (std::int64_t i = 0; i < rows * columns; ++i) {
            const T got = as<T>(me.out)[shard_begin(call, peer) * columns + i];
            check_equal(got, value_of<T>(call.number, peer, i), "all-gather", call.number, rank, i);
        }
    }
}

// What a fused GEMM does with its tiles: write the rows of each owner, remote ones first, and raise the chunk's flag.
template <typename In>
void produce(Rank& me, const Call& call, In* partial) {
    for (int step = 1; step <= me.group.world_size; ++step) {
        const int owner = peer_after(me.group.rank, me.group.world_size, step);
        const std::int64_t rows = call.rows[static_cast<std::size_t>(owner)],
                           shift = shard_begin(call, owner) * call.columns;
        for (int chunk = 0; chunk < call.chunks; ++chunk) {
            if (chunk % static_cast<int>(num_blocks()) != static_cast<int>(block_index())) continue;
            const std::int64_t end = chunk_begin(rows, call.chunks, chunk + 1) * call.columns;
            for (std::int64_t i = chunk_begin(rows, call.chunks, chunk) * call.columns + thread_index(); i < end;
                 i += num_threads()) {
                partial[shift + i] = value_of<In>(call.number, me.group.rank, i);
            }
            sync_block();
            if (thread_index() == 0) {
                store_release_system(me.flags.data() + owner * kMaxChunks + chunk, me.group.state->raised);
            }
        }
    }
}

template <typename In, typename Out>
void reduce_scatter(const World& world, Rank& me, const Call& call) {
    const int rank = me.group.rank, size = world.size();
    const std::int64_t columns = call.columns, mine = call.rows[static_cast<std::size_t>(rank)];
    constexpr std::int64_t kSlotElements = kMaxElements / 8;
    begin(me, call);
    std::thread lane([&] {
        Relay job = {};  // of the copy before: its signal, and the next one's wait, are one kernel
        job.op = call.op;
        job.flag_stride = kMaxChunks;
        for (int step = 1; step < size; ++step) {
            const int owner = peer_after(rank, size, step);
            const std::int64_t rows = call.rows[static_cast<std::size_t>(owner)];
            for (int chunk = 0; chunk < call.chunks; ++chunk) {
                job.flags = me.flags.data() + chunk;
                job.wait_ranks = bit(owner);
                job.wait_chunk = chunk;
                sim::launch(1, kThreads, [&] { relay(me.group, job); });
                const std::int64_t first = chunk_begin(rows, call.chunks, chunk) * columns;
                const std::int64_t count = chunk_begin(rows, call.chunks, chunk + 1) * columns - first;
                std::memcpy(as<In>(world.at(owner).slots[call.slot]) + rank * kSlotElements + first,
                            as<In>(me.partial) + shard_begin(call, owner) * columns + first,
                            static_cast<std::size_t>(count) * sizeof(In));
                job.signal_peers = bit(owner);
                job.signal_chunk = chunk;
            }
        }
        job.wait_ranks = 0;
        sim::launch(1, kThreads, [&] { relay(me.group, job); });
    });
    sim::launch(kBlocks, kThreads, [&] { produce(me, call, as<In>(me.partial)); });
    Reduction<In, Out> job = {};
    job.vectors = columns % 8 == 0 && shard_begin(call, rank) * columns % 8 == 0;
    for (int source = 0; source < size; ++source) {
        job.parts[source] = source == rank ? as<In>(me.partial) + shard_begin(call, rank) * columns
                                           : as<In>(me.slots[call.slot]) + source * kSlotElements;
        job.strides[source] = columns;
    }
    std::vector<Out> bias;
    for (std::int64_t i = 0; i < columns; ++i) bias.push_back(value_of<Out>(call.number, kBiasRank, i));
    job.bias = call.bias ? bias.data() : nullptr;
    job.out = as<Out>(me.out);
    job.out_stride = columns + call.padding;
    job.rows = mine;
    job.columns = columns;
    job.num_chunks = call.chunks;
    job.op = call.op;
    const int blocks = plan_strips(job, kThreadsOfStrips, kBlocks);
    me.linger();
    sim::launch(static_cast<unsigned>(blocks), kThreadsOfStrips, [&] { reduce<In, Out>(me.group, job); });
    lane.join();
    for (std::int64_t i = 0; i < mine * columns; ++i) {
        const Out expected = expected_sum<In, Out>(call.number, size, i, i % columns, call.bias);
        check_equal(job.out[i / columns * job.out_stride + i % columns], expected, "reduce-scatter", call.number, rank,
                    i);
    }
}

// Whoever multicasts, and whoever has rows that are not aligned, does so alone: peers see the same.
template <typename T>
void plan_exchange(const World& world, Rank& me, const Call& call, OneShot<T>& job, std::int64_t elements) {
    for (int peer = 0; peer < world.size(); ++peer) job.slots[peer] = as<T>(world.at(peer).slots[call.slot]);
    if (pick(me.stragglers, 0, 2) != 0) job.multicast = static_cast<T*>(world.multicast[call.slot]);
    job.fingerprint = call.fingerprint;
    job.slot = call.slot;
    job.op = call.op;
    plan_shares(job, elements, kBlocks);
}

template <typename T>
void launch_sum(Rank& me, const AllReduce<T>& job) {
    sim::launch(kBlocks, kThreads, [&] { all_reduce<T>(me.group, job); });
}
template <typename T>
void launch_sum(Rank& me, TwoShot<T>& job) {
    plan_parts(job, me.group.world_size);
    plan_shares(job, job.slot_elements, kBlocks);
    sim::launch(kBlocks, kThreads, [&] { all_reduce_two_shot<T>(me.group, job); });
}

template <typename T, typename Job>
void all_reduce_call(const World& world, Rank& me, const Call& call) {
    const int rank = me.group.rank, size = world.size();
    Job job = {};
    job.slot_elements = kMaxElements / 8;
    job.columns = static_cast<unsigned>(call.columns);
    job.elements = call.rows[0] * call.columns;
    std::vector<float> x(static_cast<std::size_t>(job.elements) + 4), bias(static_cast<std::size_t>(call.columns) + 4);
    for (std::int64_t i = 0; i < job.elements; ++i) as<T>(x)[i] = value_of<T>(call.number, rank, i);
    for (std::int64_t i = 0; i < call.columns; ++i) as<T>(bias)[i] = value_of<T>(call.number, kBiasRank, i);
    job.x = as<T>(x);
    job.bias = call.bias ? as<T>(bias) : nullptr;
    job.out = call.padding != 0 ? as<T>(x) : as<T>(me.out);  // in place, sometimes
    job.vectors = pick(me.stragglers, 0, 2) != 0 && (!call.bias || call.columns % 8 == 0);
    plan_exchange(world, me, call, job, job.elements);
    me.linger();
    launch_sum(me, job);
    for (std::int64_t i = 0; i < job.elements; ++i) {
        const T expected = expected_sum<T, T>(call.number, size, i, i % call.columns, call.bias);
        check_equal(job.out[i], expected, "all-reduce", call.number, rank, i);
    }
}

// Sums have exact bits; the scale is that of fp64 but for roundings, and the rest follows from it exactly.
template <typename T>
void all_reduce_norm_call(const World& world, Rank& me, const Call& call) {
    constexpr int kResidualRank = kBiasRank + 1, kWeightRank = kBiasRank + 2;
    const int rank = me.group.rank;
    AllReduceNorm<T> job = {};
    job.slot_elements = kMaxElements / 8;
    job.columns = static_cast<unsigned>(call.columns);
    const std::int64_t rows = call.rows[0];
    job.elements = rows * call.columns;
    const auto room = static_cast<std::size_t>(job.elements) + 4;
    std::vector<float> x(room), residual(room), normed(room, std::nanf("")), scales(static_cast<std::size_t>(rows) + 1);
    std::vector<float> bias(static_cast<std::size_t>(call.columns) + 4), weight(bias.size());
    for (std::int64_t i = 0; i < job.elements; ++i) {
        as<T>(x)[i] = value_of<T>(call.number, rank, i);
        as<T>(residual)[i] = value_of<T>(call.number, kResidualRank, i);
    }
    for (std::int64_t i = 0; i < call.columns; ++i) {
        as<T>(bias)[i] = value_of<T>(call.number, kBiasRank, i);
        as<T>(weight)[i] = value_of<T>(call.number, kWeightRank, i);
    }
    job.x = as<T>(x);
    job.bias = call.bias ? as<T>(bias) : nullptr;
    job.out = call.padding != 0 ? as<T>(x) : as<T>(me.out);
    job.residual = as<T>(residual);
    job.weight = as<T>(weight);
    job.normed = as<T>(normed);
    job.scales = scales.data();
    job.eps = 1e-5f;
    job.vectors = pick(me.stragglers, 0, 2) != 0 && call.columns % 8 == 0;
    plan_exchange(world, me, call, job, job.elements);
    job.unit = call.columns;
    job.shares = make_chunks(rows, kBlocks);
    me.linger();
    sim::launch(kBlocks, kThreads, [&] { all_reduce_norm<T>(me.group, job); });
    for (std::int64_t row = 0; row < rows; ++row) {
        double squares = 0;
        const float scale = scales[static_cast<std::size_t>(row)];
        for (std::int64_t column = 0; column < call.columns; ++column) {
            const std::int64_t i = row * call.columns + column;
            const float sum = widen(expected_sum<T, T>(call.number, world.size(), i, column, call.bias)) +
                              widen(value_of<T>(call.number, kResidualRank, i));
            const T expected = from_float<T>(reference_rounding(sum, static_cast<const T*>(nullptr)));
            check_equal(job.out[i], expected, "all-reduce and residual", call.number, rank, i);
            squares += static_cast<double>(widen(expected)) * static_cast<double>(widen(expected));
            const float product = widen(expected) * scale * widen(value_of<T>(call.number, kWeightRank, column));
            const T normed_there = from_float<T>(reference_rounding(product, static_cast<const T*>(nullptr)));
            check_equal(job.normed[i], normed_there, "all-reduce and norm", call.number, rank, i);
        }
        const double exact = 1 / std::sqrt(squares / static_cast<double>(call.columns) + 1e-5);
        if (std::fabs(static_cast<double>(scale) - exact) > 1e-6 * exact) {
            wrong("norm call " + std::to_string(call.number) + " row " + std::to_string(row) + ": scale " +
                  std::to_string(scale) + " instead of " + std::to_string(exact));
        }
    }
}

template <typename T>
void all_gather_call(const World& world, Rank& me, const Call& call) {
    const int rank = me.group.rank, size = world.size();
    const std::int64_t shift = pick(me.stragglers, 0, 2) == 0 ? 1 : 0;  // not aligned, sometimes
    AllGather<T> job = {};
    job.slot_elements = kMaxElements / 8;
    std::int64_t largest = 0;
    for (int peer = 0; peer < size; ++peer) {
        const std::int64_t count = call.rows[static_cast<std::size_t>(peer)] * call.columns;
        job.starts[peer + 1] = job.starts[peer] + count;
        largest = std::max(largest, count);
    }
    const std::int64_t mine = job.starts[rank + 1] - job.starts[rank];
    std::vector<float> x(static_cast<std::size_t>(mine) + 4);
    for (std::int64_t i = 0; i < mine; ++i) as<T>(x)[shift + i] = value_of<T>(call.number, rank, i);
    job.x = as<T>(x) + shift;
    job.out = as<T>(me.gathered) + shift;
    plan_exchange(world, me, call, job, largest);
    me.linger();
    sim::launch(kBlocks, kThreads, [&] { all_gather<T>(me.group, job); });
    for (int peer = 0; peer < size; ++peer) {
        for (std::int64_t i = 0; i < job.starts[peer + 1] - job.starts[peer]; ++i) {
            const T expected = value_of<T>(call.number, peer, i);
            check_equal(job.out[job.starts[peer] + i], expected, "all-gather at once", call.number, rank, i);
        }
    }
}

template <typename In, typename Out>
void run_call(const World& world, Rank& me, const Call& call) {
    switch (call.op) {
        case kBarrier:
            me.linger();
            return sim::launch(1, kThreads, [&] { meet(me.group, call.op, call.fingerprint); });
        case kGather:
            return all_gather<In>(world, me, call);
        case kScatter:
            return reduce_scatter<In, Out>(world, me, call);
        case kReduce:
            return all_reduce_call<In, AllReduce<In>>(world, me, call);
        case kReduceInTwo:
            return all_reduce_call<In, TwoShot<In>>(world, me, call);
        case kReduceAndNorm:
            return all_reduce_norm_call<In>(world, me, call);
        default:
            return all_gather_call<In>(world, me, call);
    }
}

void run_call(const World& world, Rank& me, const Call& call) {
    switch (call.type) {
        case 0:
            return run_call<float, float>(world, me, call);
        case 1:
            return run_call<Bf16, Bf16>(world, me, call);
        case 2:
            return run_call<Half, Half>(world, me, call);
        case 3:
            return run_call<float, Bf16>(world, me, call);
        case 4:
            return run_call<float, Half>(world, me, call);
        case 5:
            return run_call<Bf16, float>(world, me, call);
        default:
            return run_call<Half, float>(world, me, call);
    }
}

void calls(int size, unsigned seed, int count, Epoch epoch, std::uint64_t timeout_ms, bool one_slot) {
    World world(size, seed, epoch, timeout_ms);
    world.run([&](Rank& me) {
        Random random(seed);
        for (int number = 0; number < count; ++number) {
            run_call(world, me, next_call(random, number, size, one_slot));
            if (load_acquire_system(&me.failure.state) != 0) {
                wrong("call " + std::to_string(number) + " rank " + std::to_string(me.group.rank) + " failed: kind " +
                      std::to_string(me.failure.kind) + " peer " + std::to_string(me.failure.peer));
            }
        }
    });
}

}  // namespace

int main(int argc, char** argv) {
    const std::string scenario = argc > 1 ? argv[1] : "";
    const auto number = [&](int i) { return argc > i ? std::strtol(argv[i], nullptr, 0) : 0; };
    if (scenario == "calls") {
        const std::uint64_t timeout_ms = number(6) > 0 ? static_cast<std::uint64_t>(number(6)) : 30'000;
        calls(static_cast<int>(number(2)), static_cast<unsigned>(number(3)), static_cast<int>(number(4)),
              static_cast<Epoch>(number(5)), timeout_ms, number(7) != 0);
    } else if (scenario == "failures") {
        const int size = static_cast<int>(number(2));
        one_is_missing(size, static_cast<unsigned>(number(3)), false);
        one_is_missing(size, static_cast<unsigned>(number(3)), true);
        one_disagrees(size, static_cast<unsigned>(number(3)));
        copies_go_on_after_a_failure();
        one_kernel_gives_up(size, static_cast<unsigned>(number(3)));
    } else if (scenario == "numbers") {
        check_numbers<Bf16>();
        check_numbers<Half>();
    } else {
        return std::fprintf(stderr, "usage: see the top of ranks.cpp\n"), 2;
    }
    std::puts("fine");
    return 0;
}
