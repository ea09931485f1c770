// What a rank makes of a control segment in which anything may stand: libFuzzer's target, and a program without it.
//
// The bytes are what the other ranks have written (headers, epochs, whom they wait for) and the poison; the first says
// who of them lives and what this rank then does. Every outcome is an error that the bindings translate, or a result;
// never a crash, undefined behaviour, or a wait beyond the time-out; where a wait was long, the same bytes are played
// again, because the machine may have been busy. Without libFuzzer (TPK_STANDALONE) the program plays the files that it
// is given, and so many random changes of each.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/channel.h"
#include "cpu/collectives.h"

using namespace tpk;

namespace {

constexpr int kSize = 3;
constexpr double kTimeoutS = 0.002;
// The time-out, a writer's grace, the wait for other sides of a mismatch, and a machine that is busy.
constexpr double kLongestS = 10.0;
// Together less than the time-out that libFuzzer is given for one input.
constexpr int kPlays = 3;

struct Group {
    Group() : control(make_control(kSize, 0)) {
        memory.control = std::make_shared<Mapping>(control.get(), Control::bytes_for(kSize), true);
        for (int rank = 0; rank < kSize; ++rank) {
            files.push_back(make_data_file());
            memory.data.push_back(std::make_shared<Mapping>(files.back().get(), kSegmentBytes, true));
            if (reserve(files.back().get(), 0, 65536) != 0 || reserve(files.back().get(), kSlotBytes, 65536) != 0) {
                std::abort();
            }
        }
        pristine.assign(memory.control->data(), memory.control->data() + Control::bytes_for(kSize));
    }

    std::unique_ptr<Channel> join() const {
        Memory mine;
        mine.control = memory.control;
        mine.data = memory.data;
        mine.own_file = duplicate(files[0].get());
        return std::make_unique<Channel>(0, kSize, std::move(mine), std::make_unique<Liveness>(control.get(), 0),
                                         Patience{kTimeoutS, 0.0, nullptr});
    }

    Descriptor control;
    std::vector<Descriptor> files;
    Memory memory;
    std::vector<std::byte> pristine;
};

// Everything but this rank's own lines, which nobody else writes.
void overwrite(Group& group, const std::uint8_t* bytes, std::size_t count) {
    std::byte* control = group.memory.control->data();
    std::memcpy(control, group.pristine.data(), group.pristine.size());
    const std::size_t poison = offsetof(Control, poison), others = offsetof(Control, ranks) + sizeof(RankState);
    const std::size_t of_others = std::min(count, group.pristine.size() - others);
    std::memcpy(control + others, bytes, of_others);
    std::memcpy(control + poison, bytes + of_others, std::min(count - of_others, sizeof(Poison)));
}

void act(Channel& channel, int what) {
    std::vector<float> x(64, 1.0f), out(64);
    switch (what) {
        case 0:
            channel.begin(7, "a call");
            channel.signal();
            channel.wait_for_all(1);
            channel.end();
            break;
        case 1:
            channel.grow(1 << 16);
            break;
        case 2:
            channel.grow(1 << 14);
            all_reduce(channel, 7, "all_reduce", Dtype::kFloat32, x.data(), out.data(), 64);
            break;
        case 3:
            channel.poison(Failure::kOther, 2, "it failed");
            break;
        case 4:
            channel.begin(7, "a call");
            channel.signal();
            channel.spin_for_all(1);
            channel.wait(2, 3);
            break;
        default:
            channel.begin(7, std::string(3000, 'x'));
            channel.signal();
            channel.wait(1, 1);
    }
}

// How many seconds it took.
double play_once(const std::uint8_t* bytes, std::size_t count) {
    static Group group;
    const int first = count == 0 ? 0 : bytes[0];
    overwrite(group, bytes + (count != 0), count - (count != 0));
    std::unique_ptr<Liveness> second, third;
    if ((first & 1) != 0) second = std::make_unique<Liveness>(group.control.get(), 1);
    if ((first & 2) != 0) third = std::make_unique<Liveness>(group.control.get(), 2);
    const auto start = std::chrono::steady_clock::now();
    try {
        const auto channel = group.join();
        for (int step = 0; step < 2; ++step) act(*channel, (first >> 2) % 6);
    } catch (const ChannelError& error) {
        // What the bindings do with it.
        std::string text = error.what();
        for (int rank = 0; rank < kMaxRanks; ++rank) {
            if ((error.blamed >> rank & 1) != 0 && rank >= kSize) std::abort();  // there is no such rank
        }
    } catch (const std::logic_error&) {
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void play(const std::uint8_t* bytes, std::size_t count) {
    for (int plays = 0; play_once(bytes, count) > kLongestS;) {
        if (++plays == kPlays) std::abort();
    }
}

}  // namespace

#ifndef TPK_STANDALONE
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t count) {
    play(bytes, count);
    return 0;
}
#else
int main(int argc, char** argv) {
    std::uint64_t state = 88172645463325252ull;
    const auto random = [&state] {
        state ^= state << 13;
        state ^= state >> 7;
        return state ^= state << 17;
    };
    const int changes = std::atoi(argv[1]);
    for (int index = 2; index < argc; ++index) {
        std::FILE* file = std::fopen(argv[index], "rb");
        if (file == nullptr) return 2;
        std::vector<std::uint8_t> bytes(1 << 16);
        bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file));
        std::fclose(file);
        play(bytes.data(), bytes.size());
        for (int change = 0; change < changes && !bytes.empty(); ++change) {
            auto changed = bytes;
            for (int byte = 0; byte < 4; ++byte)
                changed[random() % changed.size()] = static_cast<std::uint8_t>(random());
            play(changed.data(), changed.size());
        }
    }
    std::puts("fine");
}
#endif
