// Ranks as threads of one process, for the sanitizers: random calls with stragglers, payloads checked, and failures.
//
//   races <scenario> <ranks> <spin_us> <seed> <calls>
//
// All ranks use one mapping of each segment: ThreadSanitizer knows memory by its address, and would not see that two
// mappings are the same pages.  It does not see the kernel order locks and futexes either, and need not: no plain data
// relies on them.  Epochs start so that they wrap during the run.  Prints what is wrong and exits with 1.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/channel.h"
#include "cpu/collectives.h"
#include "cpu/few_rows.h"
#include "cpu/reduce.h"

using namespace tpk;

namespace {

constexpr Epoch kFirst = 0xfffffff0u;
// Small: what is to be found lies between the calls, and the test shrinks the pieces of an all-reduce to match.
constexpr std::int64_t kMaxCount = 700;

[[noreturn]] void wrong(const std::string& what) {
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
    std::_Exit(1);
}

void expect(bool condition, const std::string& what) {
    if (!condition) wrong(what);
}

struct Group {
    explicit Group(int size) : size(size), control(make_control(size, kFirst)) {
        memory.control = std::make_shared<Mapping>(control.get(), Control::bytes_for(size), true);
        for (int rank = 0; rank < size; ++rank) {
            files.push_back(make_data_file());
            memory.data.push_back(std::make_shared<Mapping>(files.back().get(), kSegmentBytes, true));
        }
    }

    std::unique_ptr<Channel> join(int rank, Patience patience) const {
        Memory mine;
        mine.control = memory.control;
        mine.data = memory.data;
        mine.own_file = duplicate(files[static_cast<std::size_t>(rank)].get());
        return std::make_unique<Channel>(rank, size, std::move(mine), std::make_unique<Liveness>(control.get(), rank),
                                         std::move(patience));
    }

    int size;
    Descriptor control;
    std::vector<Descriptor> files;
    Memory memory;
};

// One rank's part of the random calls.
class Player {
public:
    Player(Channel& channel, unsigned seed)
        : channel_(channel), common_(seed), own_(seed * 64 + static_cast<unsigned>(channel.rank())) {}

    void play(int calls) {
        reserve(kMaxCount / 4);
        for (int i = 0; i < calls; ++i) {
            const std::int64_t count = static_cast<std::int64_t>(common_() % kMaxCount);
            reserve(count);
            straggle();
            switch (common_() % 6) {
                case 0:
                    all_reduce_in_one_step(count);
                    break;
                case 5:
                    sum_again(count);
                    break;
                case 1:
                    gather(count);
                    break;
                case 2:
                    reduce_scatter(count);
                    break;
                case 3:
                    all_reduce_in_place(count);
                    break;
                default:
                    gather_nothing_from_the_last(count);
                    break;
            }
        }
    }

private:
    static float value(int rank, std::int64_t index, std::uint64_t call) {
        return static_cast<float>((static_cast<std::uint64_t>(rank * 131 + index * 7) + call * 17) % 4096);
    }

    float value(int rank, std::int64_t index) const { return value(rank, index, channel_.call()); }

    float sum(std::int64_t index) const {
        float result = 0;
        for (int rank = 0; rank < channel_.size(); ++rank) result += value(rank, index);
        return result;
    }

    void check(float seen, float expected, const char* what) const {
        if (seen == expected) return;
        wrong(std::string(what) + " call " + std::to_string(channel_.call()) + " rank " +
              std::to_string(channel_.rank()) + ": " + std::to_string(seen) + " for " + std::to_string(expected));
    }

    float* slot(int rank) const { return reinterpret_cast<float*>(channel_.slot(rank)); }
    int after(int step) const { return (channel_.rank() + step) % channel_.size(); }
    // Elements [first(owner), first(owner + 1)) of `count` belong to `owner`; some own none.
    std::int64_t first(int owner, std::int64_t count) const { return count * owner / channel_.size(); }
    void begin(const char* text) { channel_.begin(std::hash<std::string>()(text), text); }

    void straggle() {
        if (own_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 300));
    }

    void reserve(std::int64_t count) { reserve_bytes(static_cast<std::size_t>(count) * sizeof(float)); }

    void reserve_bytes(std::size_t bytes) {
        if (bytes > channel_.capacity()) expect(channel_.grow(bytes).empty(), "no memory");
    }

    void all_reduce_in_one_step(std::int64_t count) {
        reserve_bytes(all_reduce_bytes(static_cast<std::size_t>(count) * sizeof(float)));
        const std::uint64_t call = channel_.call() + 1;  // begun below
        std::vector<float> x(static_cast<std::size_t>(count)), out(x.size());
        for (std::int64_t i = 0; i < count; ++i) x[static_cast<std::size_t>(i)] = value(channel_.rank(), i, call);
        all_reduce(channel_, 5, "all_reduce", Dtype::kFloat32, x.data(), out.data(), count);
        for (std::int64_t i = 0; i < count; ++i) check(out[static_cast<std::size_t>(i)], sum(i), "all_reduce");
    }

    void sum_again(std::int64_t count) {
        RepeatedSum sum_over_ranks(channel_, 6, "sum again", {Dtype::kFloat32, 0, count, 1, count});
        const std::uint64_t call = channel_.call() + 1;  // begun below
        std::vector<float> x(static_cast<std::size_t>(count)), bias(x.size(), 3.0F);
        for (std::int64_t i = 0; i < count; ++i) x[static_cast<std::size_t>(i)] = value(channel_.rank(), i, call);
        const float one = 1.0F;
        const std::vector<float> w = x;  // x = one * w^T
        const bool multiplies = (call + static_cast<std::uint64_t>(channel_.rank())) % 2 == 0;
        const bool ended = multiplies ? sum_over_ranks.start(&one, w.data(), 1, 1, x.data(), bias.data())
                                      : sum_over_ranks.start(x.data(), bias.data());
        if (!ended) {
            straggle();
            sum_over_ranks.finish(x.data(), bias.data());
        }
        for (std::int64_t i = 0; i < count; ++i) check(x[static_cast<std::size_t>(i)], sum(i) + 3.0F, "sum again");
    }

    void fill(std::int64_t start, std::int64_t stop) {
        float* mine = slot(channel_.rank());
        for (std::int64_t i = start; i < stop; ++i) mine[i] = value(channel_.rank(), i);
    }

    void gather(std::int64_t count) {
        begin("gather");
        fill(0, count);
        channel_.signal();
        std::vector<float> own(slot(channel_.rank()), slot(channel_.rank()) + count);
        std::vector<float> whole(static_cast<std::size_t>(count * channel_.size()));
        const std::vector<std::int64_t> bytes(static_cast<std::size_t>(channel_.size()),
                                              count * static_cast<std::int64_t>(sizeof(float)));
        gather_slots(channel_, {1, bytes}, own.data(), whole.data());
        for (int rank = 0; rank < channel_.size(); ++rank) {
            for (std::int64_t i = 0; i < count; ++i) {
                check(whole[static_cast<std::size_t>(rank * count + i)], value(rank, i), "gather");
            }
        }
        channel_.end();
    }

    void gather_nothing_from_the_last(std::int64_t count) {
        const int last = channel_.size() - 1;
        begin("gather uneven");
        if (channel_.rank() != last) fill(0, count);
        channel_.signal();
        for (int step = 1; step < channel_.size(); ++step) {
            const int peer = after(step);
            channel_.wait(peer, 1);
            if (peer == last) continue;
            straggle();
            for (std::int64_t i = 0; i < count; ++i) check(slot(peer)[i], value(peer, i), "gather in place");
        }
        channel_.end();
    }

    // The n-th signal is for the n-th rank after us.
    Epoch signals_for_us(int producer) const {
        return static_cast<Epoch>((channel_.rank() - producer + channel_.size()) % channel_.size());
    }

    void produce(std::int64_t count) {
        for (int step = 1; step < channel_.size(); ++step) {
            fill(first(after(step), count), first(after(step) + 1, count));
            straggle();
            channel_.signal();
        }
        fill(first(channel_.rank(), count), first(channel_.rank() + 1, count));
    }

    void sum_own(std::int64_t count, float* out) {
        const std::int64_t start = first(channel_.rank(), count), stop = first(channel_.rank() + 1, count);
        std::vector<ConstRows> parts;
        for (int step = 1; step < channel_.size(); ++step) channel_.wait(after(step), signals_for_us(after(step)));
        for (int rank = 0; rank < channel_.size(); ++rank) parts.push_back({slot(rank) + start, stop - start});
        sum_rows(Dtype::kFloat32, parts.data(), channel_.size(), nullptr, out, stop - start, 1, stop - start);
    }

    void reduce_scatter(std::int64_t count) {
        begin("reduce_scatter");
        produce(count);
        const std::int64_t start = first(channel_.rank(), count), stop = first(channel_.rank() + 1, count);
        std::vector<float> out(static_cast<std::size_t>(stop - start));
        sum_own(count, out.data());
        for (std::int64_t i = start; i < stop; ++i) {
            check(out[static_cast<std::size_t>(i - start)], sum(i), "reduce_scatter");
        }
        channel_.end();
    }

    void all_reduce_in_place(std::int64_t count) {
        begin("all_reduce in place");
        produce(count);
        sum_own(count, slot(channel_.rank()) + first(channel_.rank(), count));
        channel_.signal();
        for (int step = 1; step < channel_.size(); ++step) {
            const int peer = after(step);
            channel_.wait(peer, static_cast<Epoch>(channel_.size()));
            for (std::int64_t i = first(peer, count); i < first(peer + 1, count); ++i) {
                check(slot(peer)[i], sum(i), "all_reduce in place");
            }
        }
        channel_.end();
    }

    Channel& channel_;
    std::mt19937 common_;  // equal on all ranks
    std::mt19937 own_;
};

using Part = std::function<void(int rank, std::unique_ptr<Channel>& channel)>;

void on_all_ranks(int size, Patience patience, const Part& part) {
    const Group group(size);
    std::vector<std::unique_ptr<Channel>> channels;
    for (int rank = 0; rank < size; ++rank) channels.push_back(group.join(rank, patience));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                part(rank, channels[static_cast<std::size_t>(rank)]);
            } catch (const std::exception& error) {
                wrong("rank " + std::to_string(rank) + ": " + error.what());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// Calls of which one must fail; returns the failure.
ChannelError failing_call(Channel& channel, std::uint64_t fingerprint = 1) {
    try {
        for (int i = 0; i < 30000; ++i) {
            channel.begin(fingerprint, "call " + std::to_string(fingerprint));
            channel.signal();
            channel.wait_for_all(1);
            channel.end();
        }
    } catch (const ChannelError& error) {
        return error;
    }
    wrong("no failure");
}

void expect_failure(const ChannelError& error, Failure kind, std::uint64_t blamed) {
    expect(error.kind == kind && error.blamed == blamed,
           std::string("unexpected failure: ") + error.what() + ", blamed " + std::to_string(error.blamed));
}

void a_rank_dies(int size, double spin_us, unsigned seed) {
    std::atomic<int> playing{size};  // relaxed, as below: a rank that is still at it would be told of the death there
    on_all_ranks(size, {20.0, spin_us, {}}, [&](int rank, std::unique_ptr<Channel>& channel) {
        Player(*channel, seed).play(3);
        playing.fetch_sub(1, std::memory_order_relaxed);
        if (rank == size - 1) {
            while (playing.load(std::memory_order_relaxed) > 0) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            channel.reset();  // drops the lock, as the kernel does for a process that is gone
        } else {
            expect_failure(failing_call(*channel), Failure::kPeerLost, std::uint64_t{1} << (size - 1));
        }
    });
}

void a_rank_makes_another_call(int size, double spin_us) {
    on_all_ranks(size, {20.0, spin_us, {}}, [&](int rank, std::unique_ptr<Channel>& channel) {
        const ChannelError error = failing_call(*channel, rank == size - 1 ? 2 : 1);
        expect(error.kind == Failure::kMismatch && error.blamed != 0, std::string("no mismatch: ") + error.what());
        expect(std::strstr(error.what(), "call 1") != nullptr && std::strstr(error.what(), "call 2") != nullptr,
               std::string("not both sides: ") + error.what());
    });
}

void a_rank_does_not_come(int size, double spin_us) {
    on_all_ranks(size, {0.3, spin_us, {}}, [&](int rank, std::unique_ptr<Channel>& channel) {
        if (rank == size - 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(900));
        } else {
            expect_failure(failing_call(*channel), Failure::kTimeout, std::uint64_t{1} << (size - 1));
        }
    });
}

void another_thread_interrupts_and_poisons(int size, double spin_us) {
    std::atomic<bool> interrupted{false};  // relaxed: it orders nothing that a sanitizer is to find unordered
    on_all_ranks(size, {20.0, spin_us, {}}, [&](int rank, std::unique_ptr<Channel>& channel) {
        if (rank == 0) {
            std::thread other([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(5));
                channel->interrupt();
            });
            expect_failure(failing_call(*channel), Failure::kInterrupted, 0);
            other.join();
            interrupted.store(true, std::memory_order_relaxed);
        } else if (rank == size - 1) {
            while (!interrupted.load(std::memory_order_relaxed)) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            std::thread other([&] { channel->poison(Failure::kOther, 1, "by another thread"); });
            expect_failure(failing_call(*channel), Failure::kOther, 1);
            other.join();
        } else {
            expect_failure(failing_call(*channel), Failure::kOther, 1);
        }
    });
}

// Many failures at once: one wins, everybody ends, and whoever reads the poison reads all of it.
void all_ranks_fail(int size, double spin_us) {
    on_all_ranks(size, {20.0, spin_us, {}}, [&](int rank, std::unique_ptr<Channel>& channel) {
        channel->poison(Failure::kOther, std::uint64_t{1} << rank, "rank " + std::to_string(rank));
        const ChannelError error = failing_call(*channel);
        expect(error.kind == Failure::kOther && (error.blamed & (error.blamed - 1)) == 0, "a torn poison");
    });
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 6) return 2;
    const std::string scenario = argv[1];
    const int size = std::atoi(argv[2]), calls = std::atoi(argv[5]);
    const double spin_us = std::atof(argv[3]);
    const auto seed = static_cast<unsigned>(std::atoi(argv[4]));
    force_isa(Isa::kPortable);  // intrinsics hide their accesses from ThreadSanitizer
    force_few_rows_isa(FewRowsIsa::kPortable);
    if (scenario == "calls") {
        on_all_ranks(size, {20.0, spin_us, {}},
                     [&](int, std::unique_ptr<Channel>& channel) { Player(*channel, seed).play(calls); });
    } else if (scenario == "failures") {
        a_rank_dies(size, spin_us, seed);
        a_rank_makes_another_call(size, spin_us);
        a_rank_does_not_come(size, spin_us);
        another_thread_interrupts_and_poisons(size, spin_us);
        all_ranks_fail(size, spin_us);
    } else {
        return 2;
    }
    std::puts("fine");
    return 0;
}
