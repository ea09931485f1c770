// Ranks that do not come, stop half-way or call something else: who reports what, and what stays as it was.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "calls.h"
#include "cuda/one_shot_kernels.h"
#include "cuda/reduce_kernel.h"
#include "cuda/sync_kernels.h"
#include "simulator.h"
#include "world.h"

inline const Failure& failure_of(Rank& rank, const char* scenario) {
    if (load_acquire_system(&rank.failure.state) != 1) {
        wrong(std::string(scenario) + ": rank " + std::to_string(rank.group.rank) + " has no failure");
    }
    return rank.failure;
}

inline void expect(bool holds, const char* scenario, const Failure& f) {
    if (holds) return;
    wrong(std::string(scenario) + ": rank " + std::to_string(f.rank) + " reports kind " + std::to_string(f.kind) +
          " peer " + std::to_string(f.peer) + " chunk " + std::to_string(f.chunk) + " op " + std::to_string(f.op) +
          " epoch " + std::to_string(f.epoch) + " expected " + std::to_string(f.expected) + " got " +
          std::to_string(f.got));
}

constexpr std::uint64_t kShortTimeout = 700'000'000;

// The last rank does not come to the second call, or comes and never sends chunk 1.
inline void one_is_missing(int size, unsigned seed, bool comes) {
    const char* const scenario = comes ? "a chunk never comes" : "a rank never comes";
    World world(size, seed, 6, 30'000);
    std::atomic<int> timed_out{0}, met{0};
    world.run([&](Rank& me) {
        sim::launch(1, kThreads, [&] { meet(me.group, 7, 1); });
        ++met;
        while (met != size) std::this_thread::yield();  // who is slow here is not who is missing
        me.group.timeout_ns = kShortTimeout;
        const bool culprit = me.group.rank == size - 1;
        if (culprit && !comes) return;
        if (!comes) {
            sim::launch(1, kThreads, [&] { meet(me.group, 8, 2); });
        } else {
            sim::launch(1, kThreads, [&] { begin_call(me.group, 8, 0, 2, nullptr, 0); });
            if (culprit) return;
            sim::launch(1, kThreads, [&] { wait_chunk(me.group, bit(size - 1), 1, 8); });
        }
        const Failure& f = failure_of(me, scenario);
        if (f.kind == TPK_TIMEOUT) {
            ++timed_out;
            expect(f.peer == size - 1 && f.chunk == (comes ? 1 : -1) && f.expected == 8 && reached(7, f.got), scenario,
                   f);
            expect(f.waited_ns >= kShortTimeout, scenario, f);
        } else {
            expect(f.kind == TPK_POISONED && f.peer != size - 1 && f.peer != f.rank, scenario, f);
        }
        expect(f.op == 8 && f.epoch == 8 && f.rank == me.group.rank, scenario, f);
        // All that is enqueued behind ends at once, writes nothing, and the first failure stays.
        const Failure first = f;
        AllReduce<float> job = {};
        job.elements = job.columns = 4;
        job.x = me.out.data();
        job.out = me.gathered.data();
        for (int peer = 0; peer < size; ++peer) job.slots[peer] = world.at(peer).slots[0].data();
        job.slot_elements = 4;
        plan_shares(job, 4, kBlocks);
        sim::launch(kBlocks, kThreads, [&] { all_reduce<float>(me.group, job); });
        sim::launch(1, kThreads, [&] { begin_call(me.group, 9, 1, 3, nullptr, 0); });
        sim::launch(1, kThreads, [&] { signal_chunk(me.group, ~std::uint64_t{0}, 5); });
        expect(std::isnan(me.gathered[0]) && std::memcmp(&first, &me.failure, sizeof(first)) == 0, scenario, f);
        expect(epoch_of(load_relaxed_system(me.pad.data() + chunk_word(me.group.rank, 5))) == 6, scenario, f);
    });
    if (timed_out == 0) wrong(std::string(scenario) + ": nobody saw it");
}

inline void one_disagrees(int size, unsigned seed) {
    World world(size, seed, 0xfffffffeu, 4000);
    std::atomic<int> mismatches{0};
    world.run([&](Rank& me) {
        sim::launch(1, kThreads, [&] { meet(me.group, 1, 5); });
        const std::uint32_t fingerprint = me.group.rank == size - 1 ? 66 : 6;
        sim::launch(1, kThreads, [&] { begin_call(me.group, 2, 0, fingerprint, nullptr, 0); });
        sim::launch(1, kThreads, [&] { signal_chunk(me.group, ~std::uint64_t{0}, 0); });
        sim::launch(1, kThreads, [&] { wait_chunk(me.group, ~std::uint64_t{0}, 0, 2); });
        const Failure& f = failure_of(me, "a rank calls something else");
        if (f.kind != TPK_MISMATCH) return expect(f.kind == TPK_POISONED, "a rank calls something else", f);
        ++mismatches;
        const bool odd = f.rank == size - 1;
        expect((f.peer == size - 1) != odd && f.fingerprint == (odd ? 6u : 66u), "a rank calls something else", f);
    });
    if (mismatches == 0) wrong("a rank calls something else: nobody saw it");
}

// Another kernel of rank 0 gives up: rank 0 notices at its next wait, its peers by its poison, and neither waits long.
inline void one_kernel_gives_up(int size, unsigned seed) {
    const char* const scenario = "another kernel gives up";
    World world(size, seed, 0, 4000);
    std::uint64_t alarms[kMaxRanks] = {};
    world.run([&](Rank& me) {
        me.group.alarm = &alarms[me.group.rank];
        sim::launch(1, kThreads, [&] { begin_call(me.group, 3, 0, 4, nullptr, 0); });
        if (me.group.rank == 0) store_release_system(me.group.alarm, std::uint64_t{2});
        sim::launch(1, kThreads, [&] { wait_chunk(me.group, bit((me.group.rank + 1) % size), 2, 3); });
        const Failure& f = failure_of(me, scenario);
        expect(f.kind == (me.group.rank == 0 ? TPK_ALARM : TPK_POISONED) && f.waited_ns < 3'000'000'000, scenario, f);
        expect(load_relaxed_system(me.group.alarm) == (me.group.rank == 0 ? 2u : 1u), scenario, f);
    });
}

// Rank 0 fails while rank 1 has not yet read the last call, and what it had enqueued goes on: it overwrites rank 1's
// slot.
inline void copies_go_on_after_a_failure() {
    const char* const scenario = "copies go on after a failure";
    World world(2, 1, 0, 30'000);
    std::atomic<bool> overwritten{false};
    world.run([&](Rank& me) {
        sim::launch(1, kThreads, [&] { begin_call(me.group, 2, 0, 1, nullptr, 0); });
        sim::launch(1, kThreads, [&] { signal_chunk(me.group, ~bit(me.group.rank), 0); });
        if (me.group.rank == 0) {
            me.group.timeout_ns = kShortTimeout;
            sim::launch(1, kThreads, [&] { begin_call(me.group, 3, 0, 2, nullptr, 0); });
            expect(failure_of(me, scenario).kind == TPK_TIMEOUT, scenario, me.failure);
            world.at(1).slots[0][0] = 5;
            overwritten = true;
            return;
        }
        while (!overwritten) std::this_thread::yield();
        Reduction<float, float> job = {};
        for (int source = 0; source < 2; ++source) job.parts[source] = me.slots[0].data();
        job.out = me.out.data();
        job.rows = job.columns = job.num_chunks = 1;
        const int blocks = plan_strips(job, kThreadsOfStrips, 1);
        sim::launch(static_cast<unsigned>(blocks), kThreadsOfStrips, [&] { reduce<float, float>(me.group, job); });
        const Failure& f = failure_of(me, scenario);
        expect(f.kind == TPK_POISONED && f.peer == 0 && f.epoch == 1, scenario, f);
    });
}
