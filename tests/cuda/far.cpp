// Rows, parts and slots that lie so far apart that offsets pass 2^31 elements, in memory that is reserved and not there.
//
//   far FAULT      prints "fine", or what is wrong; FAULT is 0, or the number of a seeded fault (test_far.py)
//
// Below everything lie 2^31 elements that nobody may touch: an offset that was computed in 32 bits finds them, or other
// rows, instead of ending the program.
#include <sys/mman.h>

#include <cstdlib>

#include "calls.h"
#include "cuda/one_shot_kernels.h"
#include "cuda/reduce_kernel.h"
#include "cuda/two_shot_kernels.h"
#include "simulator.h"

namespace {

constexpr std::int64_t kWrapped = std::int64_t{1} << 31;

// `elements` of them, zeros; kept for good.
template <typename T>
T* far_memory(std::int64_t elements) {
    const std::size_t bytes = static_cast<std::size_t>(kWrapped + elements) * sizeof(T);
    void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) wrong("no address space for " + std::to_string(bytes) + " bytes");
    madvise(base, bytes, MADV_NOHUGEPAGE);
    return static_cast<T*>(base) + kWrapped;
}

// Sums of 4 rows, the third and fourth past 2^31 elements, in packs and one by one.
template <typename In, typename Out>
void far_reduce(bool vectors) {
    constexpr std::int64_t kRows = 4, kColumns = 19, kStride = (std::int64_t{1} << 30) + 8, kRanks = 2;
    World world(kRanks, 1, 0, 1000);
    Reduction<In, Out> job = {};
    for (int rank = 0; rank < kRanks; ++rank) {
        In* const part = far_memory<In>(kRows * kStride);
        for (std::int64_t row = 0; row < kRows; ++row) {
            for (std::int64_t i = 0; i < kColumns; ++i) {
                part[row * kStride + i] = value_of<In>(1, rank, row * kColumns + i);
            }
        }
        job.parts[rank] = part;
        job.strides[rank] = kStride;
    }
    job.out = far_memory<Out>(kRows * kStride);
    job.out_stride = kStride;
    job.rows = kRows;
    job.columns = kColumns;
    job.vectors = vectors;
    const int blocks = plan_strips(job, kThreadsOfStrips, kBlocks);
    sim::launch(static_cast<unsigned>(blocks), kThreadsOfStrips, [&] { reduce<In, Out>(world.at(0).group, job); });
    for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
        const Out expected = expected_sum<In, Out>(1, kRanks, i, i % kColumns, false);
        check_equal(job.out[i / kColumns * kStride + i % kColumns], expected, "far reduce", 1, 0, i);
    }
}

// Two ranks whose parts of a slot are 2^31 elements apart; an all-gather's result begins there, too.
template <typename T>
void far_one_shot() {
    constexpr std::int64_t kFar = kWrapped + 64, kCount = 21;
    World world(2, 1, 0, 30'000);
    T* const slots[2] = {far_memory<T>(2 * kFar), far_memory<T>(2 * kFar)};
    world.run([&](Rank& me) {
        const int rank = me.group.rank;
        std::vector<T> x;
        for (std::int64_t i = 0; i < kCount; ++i) x.push_back(value_of<T>(2, rank, i));
        const auto fill = [&](OneShot<T>& job) {
            for (int peer = 0; peer < 2; ++peer) job.slots[peer] = slots[peer];
            job.slot_elements = kFar;
            plan_shares(job, kCount, kBlocks);
        };
        AllGather<T> gather = {};
        fill(gather);
        gather.x = x.data();
        gather.out = far_memory<T>(kFar + 2 * kCount);
        gather.starts[0] = kFar, gather.starts[1] = kFar + kCount, gather.starts[2] = kFar + 2 * kCount;
        sim::launch(kBlocks, kThreads, [&] { all_gather<T>(me.group, gather); });
        AllReduce<T> sum = {};
        fill(sum);
        sum.slot = 1;  // of the protocol; the memory is that of before, which the other rank still may read
        for (int peer = 0; peer < 2; ++peer) sum.slots[peer] += 1024;
        sum.x = x.data();
        sum.out = as<T>(me.out);
        sum.elements = kCount;
        sum.columns = kCount;
        sum.vectors = true;
        sim::launch(kBlocks, kThreads, [&] { all_reduce<T>(me.group, sum); });
        for (std::int64_t i = 0; i < 2 * kCount; ++i) {
            const T expected = value_of<T>(2, static_cast<int>(i / kCount), i % kCount);
            check_equal(gather.out[kFar + i], expected, "far all-gather", 2, rank, i);
        }
        for (std::int64_t i = 0; i < kCount; ++i) {
            check_equal(sum.out[i], expected_sum<T, T>(2, 2, i, i, false), "far all-reduce", 2, rank, i);
        }
    });
}

// Two ranks whose parts, of what they sum and of their slots, are 2^31 elements apart; of each only the first are there.
template <typename T>
void far_two_shot() {
    constexpr std::int64_t kFar = kWrapped + 64, kCount = 21;
    World world(2, 1, 0, 30'000);
    T* const slots[2] = {far_memory<T>(4 * kFar), far_memory<T>(4 * kFar)};
    world.run([&](Rank& me) {
        T *const x = far_memory<T>(kFar + kCount), *const out = far_memory<T>(kFar + kCount);
        const auto contribution = [&](int rank, int part, std::int64_t i) { return value_of<T>(4 + part, rank, i); };
        TwoShot<T> job = {};
        for (int part = 0; part < 2; ++part) {
            for (std::int64_t i = 0; i < kCount; ++i) x[part * kFar + i] = contribution(me.group.rank, part, i);
            job.slots[part] = slots[part];
        }
        job.x = x;
        job.out = out;
        job.elements = kFar + kCount;
        job.columns = 1 << 30;
        job.slot_elements = kFar;
        job.vectors = true;
        plan_shares(job, kCount, kBlocks);
        sim::launch(kBlocks, kThreads, [&] { all_reduce_two_shot<T>(me.group, job); });
        for (std::int64_t i = 0; i < 2 * kCount; ++i) {
            const int part = static_cast<int>(i / kCount);
            const T expected = expected_sum<T, T>(4 + part, 2, i % kCount, 0, false);
            check_equal(out[part * kFar + i % kCount], expected, "far all-reduce in two steps", 4, me.group.rank, i);
        }
    });
}

// What a block does with a share that begins past 2^31 elements of one contribution.
template <typename T>
void far_units() {
    constexpr std::int64_t kBegin = kWrapped + 16, kCount = 21;
    T *const from = far_memory<T>(kBegin + kCount), *const to = far_memory<T>(kBegin + kCount);
    for (std::int64_t i = 0; i < kCount; ++i) from[kBegin + i] = value_of<T>(3, 0, i);
    sim::launch(1, kThreads, [&] {
        for_each_unit<T>(kBegin, kBegin + kCount, true, [&](auto width, std::int64_t i) {
            constexpr int count = decltype(width)::count;
            store_pack(to + i, load_pack<T, count>(from + i));
        });
    });
    for (std::int64_t i = 0; i < kCount; ++i) {
        check_equal(to[kBegin + i], value_of<T>(3, 0, i), "far units", 3, 0, i);
    }
    if (make_chunks((std::int64_t{1} << 40) + 3, 7).begin(5) != 5 * (((std::int64_t{1} << 40) + 3) / 7) + 5) {
        wrong("the fifth of seven chunks of 2^40 + 3 rows");
    }
}

}  // namespace

int main(int, char** argv) {
    seeded_fault = std::atoi(argv[1]);
    far_reduce<Bf16, Bf16>(true);
    far_reduce<float, Half>(false);
    far_one_shot<float>();
    far_two_shot<Bf16>();
    far_units<Half>();
    std::puts("fine");
    return 0;
}
