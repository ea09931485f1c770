// Ranks that are threads, their memory, and what every one contributes to every call.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/numbers.h"
#include "cuda/protocol.h"
#include "multicast.h"

using namespace tpk;
using Random = std::mt19937;

constexpr std::int64_t kMaxElements = 4096;

[[noreturn]] inline void wrong(const std::string& what) {
    std::fprintf(stderr, "WRONG: %s\n", what.c_str());
    std::_Exit(1);
}

inline long pick(Random& random, long least, long most) {
    return std::uniform_int_distribution<long>(least, most)(random);
}

// ------------------------------------------------------------------------------------------------- ranks and their
// memory

struct Rank {
    std::vector<Signal> pad = std::vector<Signal>(kPadWords);
    State state = {};
    Failure failure = {};
    // Slots, gathered data, results: 4 bytes per element do for every type.
    std::vector<float> slots[kSlots], gathered, partial, out;
    std::vector<std::uint32_t> flags = std::vector<std::uint32_t>(kMaxRanks * kMaxChunks);
    Random stragglers;
    Group group = {};

    void linger() {
        if (pick(stragglers, 0, 3) == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(pick(stragglers, 0, 400)));
    }
};

struct World {
    std::vector<std::unique_ptr<Rank>> ranks;
    void* multicast[kSlots];

    World(int size, unsigned seed, Epoch epoch, std::uint64_t timeout_ms) {
        for (int r = 0; r < size; ++r) {
            ranks.push_back(std::make_unique<Rank>());
            Rank& rank = *ranks.back();
            rank.stragglers.seed(seed * 100 + static_cast<unsigned>(r));
            for (auto* buffer : {&rank.slots[0], &rank.slots[1], &rank.gathered, &rank.partial, &rank.out}) {
                buffer->assign(kMaxElements, std::nanf(""));
            }
            for (Signal& word : rank.pad) word = epoch;
            rank.pad[kPoison] = 0;
            for (std::uint32_t& flag : rank.flags) flag = TPK_FLAG_RAISED;  // as the call before left them
            rank.state.current = epoch;
            for (Epoch& use : rank.state.last_use) use = epoch;
        }
        for (int r = 0; r < size; ++r) {
            Group& group = ranks[static_cast<std::size_t>(r)]->group;
            group.rank = r;
            group.world_size = size;
            for (int p = 0; p < size; ++p) group.pads[p] = ranks[static_cast<std::size_t>(p)]->pad.data();
            group.state = &ranks[static_cast<std::size_t>(r)]->state;
            group.failure = &ranks[static_cast<std::size_t>(r)]->failure;
            group.timeout_ns = timeout_ms * 1'000'000;
        }
        for (int slot = 0; slot < kSlots; ++slot) {
            std::vector<char*> memory;
            for (auto& rank : ranks) memory.push_back(reinterpret_cast<char*>(rank->slots[slot].data()));
            multicast[slot] = sim::multicast_window(kMaxElements * sizeof(float), std::move(memory));
        }
    }

    int size() const { return static_cast<int>(ranks.size()); }
    Rank& at(int rank) const { return *ranks[static_cast<std::size_t>(rank)]; }

    void run(const std::function<void(Rank&)>& body) {
        std::vector<std::thread> threads;
        for (auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
        for (std::thread& thread : threads) thread.join();
    }
};

// ---------------------------------------------------------------------------------------------------------------
// numbers

inline float reference_rounding(float value, const Bf16*) {
    const std::uint32_t low = float_to_bits(value) & 0xffff0000u;
    const float down = bits_to_float(low), up = bits_to_float(low + 0x10000u);
    if (std::isnan(value) || std::isinf(value) || down == value) return value;
    const double next = std::isinf(up) ? std::copysign(0x1p128, value) : up;
    const double below = std::fabs(static_cast<double>(value) - down), above = std::fabs(next - value);
    return below < above || (below == above && (low & 0x10000u) == 0) ? down : up;
}
inline float reference_rounding(float value, const Half*) { return static_cast<float>(static_cast<_Float16>(value)); }
inline float reference_rounding(float value, const float*) { return value; }

template <typename T>
void check_rounding(float value) {
    T rounded;
    narrow(value, rounded);
    const float got = widen(rounded), expected = reference_rounding(value, static_cast<const T*>(nullptr));
    if (std::isnan(value) ? !std::isnan(got) : float_to_bits(got) != float_to_bits(expected)) {
        wrong("rounding " + std::to_string(value) + " of bits " + std::to_string(float_to_bits(value)));
    }
}

template <typename T>
void check_numbers() {
    for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
        const T value = {static_cast<std::uint16_t>(bits)};
        T back;
        narrow(widen(value), back);
        if (back.bits != value.bits && !std::isnan(widen(value)))
            wrong("16 bits " + std::to_string(bits) + " do not survive");
    }
    for (std::uint64_t bits = 0; bits < 0x100000000ull; bits += 0x3fff) {
        check_rounding<T>(bits_to_float(static_cast<std::uint32_t>(bits)));
        check_rounding<T>(bits_to_float(static_cast<std::uint32_t>(bits) & 0xfffff000u));  // ties
    }
}

template <typename T>
T from_float(float value) {
    T result;
    narrow(value, result);
    return result;
}

// Element `i` of what `rank` contributes to call `call`: magnitudes far apart, so that the order of a sum shows.
template <typename T>
T value_of(int call, int rank, std::int64_t i) {
    std::uint32_t h = static_cast<std::uint32_t>(call) * 2654435761u ^ static_cast<std::uint32_t>(rank + 1) * 40503u ^
                      static_cast<std::uint32_t>(i) * 2246822519u;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    const float magnitude =
        std::ldexp(1.0f + static_cast<float>(h & 0xffffu) / 65536.0f, static_cast<int>(h >> 16 & 15) - 7);
    return from_float<T>((h >> 31) != 0 ? -magnitude : magnitude);
}

constexpr int kBiasRank = 1000;

template <typename In, typename Out>
Out expected_sum(int call, int ranks, std::int64_t i, std::int64_t column, bool bias) {
    float sum = widen(value_of<In>(call, 0, i));
    for (int rank = 1; rank < ranks; ++rank) sum += widen(value_of<In>(call, rank, i));
    if (bias) sum += widen(value_of<Out>(call, kBiasRank, column));
    return from_float<Out>(reference_rounding(sum, static_cast<const Out*>(nullptr)));
}

template <typename T>
void check_equal(const T& got, const T& expected, const char* op, int call, int rank, std::int64_t i) {
    if (std::memcmp(&got, &expected, sizeof(T)) == 0) return;
    wrong(std::string(op) + " call " + std::to_string(call) + " rank " + std::to_string(rank) + " element " +
          std::to_string(i) + ": " + std::to_string(widen(got)) + " instead of " + std::to_string(widen(expected)));
}
