// The all-reduce in one step with what follows it in a model: the residual is added, and each row normalised.
#pragma once

#include "cuda/one_shot_kernels.h"

namespace tpk {

// Shares are of rows: a block sums a row and then knows its mean.
template <typename T>
struct AllReduceNorm : AllReduce<T> {
    const T* residual;
    const T* weight;
    T* normed;
    float* scales;  // of each row: 1 / sqrt(mean of squares + eps)
    float eps;
};

constexpr unsigned kLanes = 32;
constexpr unsigned kRoomOfBlock = kReduceThreads + kLanes;

// All threads of the block: the sum of what each has, in an order that the number of threads alone decides.
TPK_DEVICE float sum_of_block(float mine) {
    float* const room = room_of_block<kRoomOfBlock>();
    const unsigned threads = num_threads(), lanes = threads < kLanes ? threads : kLanes, thread = thread_index();
    room[thread] = mine;
    sync_block();
    if (thread < lanes) {
        float sum = room[thread];
        for (unsigned other = thread + lanes; other < threads; other += lanes) sum = add(sum, room[other]);
        room[threads + thread] = sum;
    }
    sync_block();
    float sum = room[threads];
    for (unsigned lane = 1; lane < lanes; ++lane) sum = add(sum, room[threads + lane]);
    return sum;
}

// Rounded where the single ops round: the sum over the ranks, the one with the residual, the result.
template <typename T, int kCount>
TPK_DEVICE float add_residual_at(const Group& group, const AllReduceNorm<T>& job, std::int64_t element) {
    const Pack<T, kCount> y = summed_at<T, kCount>(group, job, element);
    const Pack<T, kCount> residual = load_pack<T, kCount>(job.residual + element);
    Pack<T, kCount> sum;
    float squares = 0;
    TPK_UNROLL
    for (int i = 0; i < kCount; ++i) {
        narrow(add(widen(y.element[i]), widen(residual.element[i])), sum.element[i]);
        const float wide = widen(sum.element[i]);
        squares = add(squares, multiply(wide, wide));
    }
    store_pack(job.out + element, sum);
    return squares;
}

template <typename T, int kCount>
TPK_DEVICE void normalise_at(const AllReduceNorm<T>& job, std::int64_t element, std::int64_t column, float scale) {
    const Pack<T, kCount> sum = load_pack<T, kCount>(job.out + element);
    const Pack<T, kCount> weight = load_pack<T, kCount>(job.weight + column);
    Pack<T, kCount> normed;
    TPK_UNROLL
    for (int i = 0; i < kCount; ++i) {
        narrow(multiply(multiply(widen(sum.element[i]), scale), widen(weight.element[i])), normed.element[i]);
    }
    store_pack(job.normed + element, normed);
}

template <typename T>
TPK_KERNEL_OF(kReduceThreads)
all_reduce_norm(TPK_ARGUMENT Group group, TPK_ARGUMENT AllReduceNorm<T> job) {
    const auto push = [&](std::int64_t begin, std::int64_t end) {
        for_each_unit<T>(begin, end, job.vectors,
                         [&](auto width, std::int64_t i) { push_at<T, decltype(width)::count>(group, job, job.x, i); });
    };
    const auto finish = [&](std::int64_t begin, std::int64_t end) {
        TPK_DO_NOT_UNROLL
        for (std::int64_t first = begin; first < end; first += job.columns) {
            const std::int64_t last = first + job.columns;
            float squares = 0;
            for_each_unit<T>(first, last, job.vectors, [&](auto width, std::int64_t i) {
                squares = add(squares, add_residual_at<T, decltype(width)::count>(group, job, i));
            });
            const float mean = divide(sum_of_block(squares), static_cast<float>(job.columns));
            const float scale = divide(1.0f, square_root(add(mean, job.eps)));
            // Each thread reads again what it has written itself.
            for_each_unit<T>(first, last, job.vectors, [&](auto width, std::int64_t i) {
                normalise_at<T, decltype(width)::count>(job, i, i - first, scale);
            });
            if (thread_index() == 0) job.scales[first / job.columns] = scale;
        }
    };
    exchange_share(group, job, push, finish);
}

}  // namespace tpk
