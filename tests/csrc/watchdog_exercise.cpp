// The watchdog, for the sanitizers: groups that come and go in several threads while processes die.
//
//   watchdog_exercise <threads> <rounds>
//
// Prints what is wrong and exits with 1.
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/segment.h"
#include "cpu/sleep.h"
#include "cpu/watchdog.h"

using namespace tpk;

namespace {

constexpr double kGraceS = 0.05;
constexpr double kPatienceS = 20.0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "WRONG: %s\n", what);
    std::_Exit(1);
}

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// A process that sleeps until it is killed.
class Sleeper {
public:
    Sleeper() {
        char name[] = "sleep", seconds[] = "100";
        char* arguments[] = {name, seconds, nullptr};
        expect(posix_spawnp(&pid_, name, nullptr, nullptr, arguments, environ) == 0, "no process");
    }
    ~Sleeper() {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
    }
    int pid() const { return pid_; }
    void die() const { kill(pid_, SIGKILL); }  // and stay a zombie

private:
    pid_t pid_ = 0;
};

// The two ends of a connection; one is this rank's.
struct Ends {
    Ends() {
        int pair[2];
        expect(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "no sockets");
        mine = Descriptor(pair[0]);
        theirs = Descriptor(pair[1]);
    }
    Connection connection() const { return {mine.get(), cookie_of(mine.get())}; }
    bool works() const {
        char byte = 1;
        return send(mine.get(), &byte, 1, MSG_NOSIGNAL) == 1 && recv(theirs.get(), &byte, 1, 0) == 1;
    }

    Descriptor mine, theirs;
};

// What a wait in gloo does: it ends with its connection, and so does the peer's.
void wait_until_ended(const Ends& ends) {
    char byte = 0;
    expect(recv(ends.mine.get(), &byte, 1, 0) == 0, "the wait did not end");
    expect(recv(ends.theirs.get(), &byte, 1, 0) == 0, "the peer's wait did not end");
}

void come_and_go(int alive, int dying, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const Ends ends;
        Watch watch({{1, alive}, {2, dying}}, {ends.connection()}, kGraceS);
        for (int call = 0; call < 20; ++call) {
            watch.enter();
            watch.leave();
        }
        // Once somebody is dead, a call that a busy machine draws out may be ended.
        const bool was_ended = watch.ended() != 0;
        expect(!was_ended || !watch.deaths().empty(), "a call of living ranks was ended");
        expect(was_ended || ends.works() || !watch.deaths().empty(), "a connection was shut down without a reason");
    }
}

void a_death_ends_calls_in_flight_alone(int alive, const Sleeper& dying, bool dies_here) {
    const Ends busy, idle, foreign;
    const Connection renamed{foreign.mine.get(), foreign.connection().cookie + 1};
    Watch with_call({{1, alive}, {2, dying.pid()}}, {busy.connection(), renamed}, kGraceS);
    Watch without({{2, dying.pid()}}, {idle.connection()}, kGraceS);
    with_call.enter();
    const double start = now_s();
    if (dies_here) {
        pause_ms(3 * static_cast<int>(1e3 * kGraceS));
        {
            const Watch other({}, {}, kGraceS);
        }  // has the thread look
        pause_ms(50);
        expect(with_call.ended() == 0 && busy.works(), "a call of living ranks was ended");
        dying.die();
    }
    wait_until_ended(busy);
    expect(now_s() - start < kPatienceS, "the wait ended late");
    while (with_call.ended() == 0) pause_ms(1);
    const auto deaths = with_call.deaths();
    expect(deaths.size() == 1 && deaths[0].first == 2 && deaths[0].second <= with_call.ended_at(), "who died");
    expect(with_call.ended_at() - deaths[0].second >= kGraceS, "the monitor was given no time");
    pause_ms(3 * static_cast<int>(1e3 * kGraceS));
    expect(with_call.ended() == 1, "a call was ended twice");
    expect(foreign.works(), "a socket that has the number of another one was shut down");
    expect(without.ended() == 0 && idle.works(), "a group without a call was shut down");
    without.enter();
    wait_until_ended(idle);
    without.leave();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    const int count = std::atoi(argv[1]), rounds = std::atoi(argv[2]);
    const Sleeper alive, dying;
    std::vector<std::thread> threads;
    for (int number = 0; number < count; ++number) {
        threads.emplace_back([&] { come_and_go(alive.pid(), dying.pid(), rounds); });
    }
    a_death_ends_calls_in_flight_alone(alive.pid(), dying, true);
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    for (int number = 0; number < count; ++number) {
        threads.emplace_back([&] { a_death_ends_calls_in_flight_alone(alive.pid(), dying, false); });
    }
    for (std::thread& thread : threads) thread.join();
    std::puts("fine");
    return 0;
}
