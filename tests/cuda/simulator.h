// Runs CUDA kernels as ordinary threads: one per CUDA thread, blocks with barriers.  A launch returns when all are
// done, so what one thread launches one after the other is a stream.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/device.h"

namespace sim {

class Block {
public:
    explicit Block(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
    ~Block() { pthread_barrier_destroy(&barrier_); }
    Block(const Block&) = delete;

    static bool vote(void* self, bool mine) {
        auto& block = *static_cast<Block*>(self);
        if (mine) block.any_.store(true, std::memory_order_relaxed);
        pthread_barrier_wait(&block.barrier_);
        const bool any = block.any_.load(std::memory_order_relaxed);
        const bool one = pthread_barrier_wait(&block.barrier_) == PTHREAD_BARRIER_SERIAL_THREAD;
        if (any) {
            if (one) block.any_.store(false, std::memory_order_relaxed);
            pthread_barrier_wait(&block.barrier_);
        }
        return any;
    }

    float room[1024];

private:
    pthread_barrier_t barrier_;
    std::atomic<bool> any_{false};
};

template <typename Kernel>
void launch(unsigned blocks, unsigned threads, const Kernel& kernel) {
    std::vector<std::unique_ptr<Block>> states;
    std::vector<std::thread> all;
    for (unsigned block = 0; block < blocks; ++block) {
        states.push_back(std::make_unique<Block>(threads));
        for (unsigned thread = 0; thread < threads; ++thread) {
            all.emplace_back([=, &kernel, state = states.back().get()] {
                tpk::simulated = {thread, block, threads, blocks, Block::vote, state, state->room};
                kernel();
            });
        }
    }
    for (std::thread& thread : all) thread.join();
}

}  // namespace sim
