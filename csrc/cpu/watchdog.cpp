#include "cpu/watchdog.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "cpu/segment.h"
#include "cpu/sleep.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

namespace tpk {

namespace {

// While a peer is dead and its group goes on: how often calls are looked at.
constexpr int kLookEveryMs = 20;

}  // namespace

// A process of this host, shared by all groups that it is in.  A process that is gone has no descriptor.
class Process {
public:
    explicit Process(int pid) : descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
        if (descriptor_.get() >= 0) return;
        if (errno != ESRCH) throw std::system_error(errno, std::generic_category(), "cannot watch a process");
        died_at_.store(now_s(), std::memory_order_relaxed);
    }

    int descriptor() const { return descriptor_.get(); }
    // 0 while it lives, as far as that was looked at.
    double died_at() const { return died_at_.load(std::memory_order_relaxed); }

    void look() {
        if (died_at() != 0.0) return;
        pollfd one{descriptor_.get(), POLLIN, 0};
        if (poll(&one, 1, 0) == 1) died_at_.store(now_s(), std::memory_order_relaxed);
    }

private:
    const Descriptor descriptor_;
    std::atomic<double> died_at_{0.0};
};

struct Watch::State {
    std::vector<std::pair<int, std::shared_ptr<Process>>> peers;  // by rank
    std::vector<Connection> connections;
    double grace_s = 0.0;
    std::atomic<double> in_flight_since{0.0};  // 0: no call is
    std::atomic<bool> has_lost{false};         // a peer; written by the thread
    std::atomic<double> ended_at{0.0};
    std::atomic<std::uint64_t> ended{0};

    double first_death() const {
        double first = 0.0;
        for (const auto& [rank, process] : peers) {
            const double at = process->died_at();
            if (at != 0.0 && (first == 0.0 || at < first)) first = at;
        }
        return first;
    }

    // Shut the connections down if a call has been in flight for too long after a death.
    void look(double now) {
        const double death = first_death(), since = in_flight_since.load(std::memory_order_acquire);
        has_lost.store(death != 0.0, std::memory_order_seq_cst);
        const bool was_ended = ended_at.load(std::memory_order_relaxed) >= since;
        if (death == 0.0 || since == 0.0 || was_ended || now < std::max(death, since) + grace_s) return;
        for (const Connection& connection : connections) end(connection);
        ended_at.store(now_s(), std::memory_order_relaxed);
        ended.fetch_add(1, std::memory_order_relaxed);
    }

    // Through a descriptor of our own: gloo may close its one any time, and another file may then have its number.
    static void end(const Connection& connection) {
        const Descriptor mine(fcntl(connection.fd, F_DUPFD_CLOEXEC, 0));
        if (mine.get() >= 0 && cookie_of(mine.get()) == connection.cookie) shutdown(mine.get(), SHUT_RDWR);
    }
};

// The thread, and what it looks at.  Never destroyed: it runs until the process is gone.
class Watchdog {
public:
    static Watchdog& instance() {
        static Watchdog* watchdog = new Watchdog;
        return *watchdog;
    }

    std::shared_ptr<Process> process(int pid) {
        const std::lock_guard<std::mutex> guard(mutex_);
        for (auto one = processes_.begin(); one != processes_.end();) {
            one = one->second.expired() ? processes_.erase(one) : std::next(one);
        }
        std::weak_ptr<Process>& known = processes_[pid];
        std::shared_ptr<Process> process = known.lock();
        // One that has died is another one's number by now.
        if (process == nullptr || process->died_at() != 0.0) known = process = std::make_shared<Process>(pid);
        return process;
    }

    void add(const std::shared_ptr<Watch::State>& state) {
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            states_.push_back(state);
            if (wake_.get() < 0) start();
        }
        wake();
    }

    void remove(const std::shared_ptr<Watch::State>& state) {
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            states_.erase(std::remove(states_.begin(), states_.end(), state), states_.end());
        }
        wake();
    }

    void wake() const {
        if (wake_.get() >= 0) eventfd_write(wake_.get(), 1);  // a full counter wakes it as well
    }

private:
    Watchdog() { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

    static void before_fork() { instance().mutex_.lock(); }
    static void after_fork_in_parent() { instance().mutex_.unlock(); }
    static void after_fork_in_child() {
        Watchdog& own = instance();
        own.states_.clear();  // the parent's groups; its descriptors close with what holds them
        own.wake_ = Descriptor();
        own.mutex_.unlock();
    }

    void start() {
        wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (wake_.get() < 0) throw std::system_error(errno, std::generic_category(), "cannot start the watchdog");
        // The program's signals are not this thread's: they must reach the threads that wait for them.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread([this] { run(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run() {
        pthread_setname_np(pthread_self(), "tpk-watchdog");
        while (true) {
            std::vector<pollfd> awaited;
            std::vector<std::shared_ptr<Process>> kept;  // their descriptors stay open while they are polled
            bool is_urgent = false;
            {
                const std::lock_guard<std::mutex> guard(mutex_);
                awaited.push_back({wake_.get(), POLLIN, 0});
                const double now = now_s();
                for (const std::shared_ptr<Watch::State>& state : states_) {
                    for (const auto& [rank, process] : state->peers) {
                        process->look();
                        if (process->died_at() != 0.0) continue;
                        awaited.push_back({process->descriptor(), POLLIN, 0});
                        kept.push_back(process);
                    }
                    state->look(now);
                    // After has_lost was written: see Watch::enter.
                    const bool in_flight = state->in_flight_since.load(std::memory_order_seq_cst) != 0.0;
                    is_urgent = is_urgent || (in_flight && state->has_lost.load(std::memory_order_relaxed));
                }
            }
            poll(awaited.data(), awaited.size(), is_urgent ? kLookEveryMs : -1);
            eventfd_t count = 0;
            eventfd_read(awaited.front().fd, &count);  // until the next wake(), if there was one
        }
    }

    std::mutex mutex_;
    Descriptor wake_;
    std::vector<std::shared_ptr<Watch::State>> states_;
    std::map<int, std::weak_ptr<Process>> processes_;
};

std::uint64_t cookie_of(int fd) {
    std::uint64_t cookie = 0;
    socklen_t size = sizeof(cookie);
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

Watch::Watch(const std::vector<Peer>& peers, std::vector<Connection> connections, double grace_s)
    : state_(std::make_shared<State>()) {
    for (const Peer& peer : peers) state_->peers.emplace_back(peer.rank, Watchdog::instance().process(peer.pid));
    state_->connections = std::move(connections);
    state_->grace_s = grace_s;
    Watchdog::instance().add(state_);
}

Watch::~Watch() { Watchdog::instance().remove(state_); }

void Watch::enter() {
    state_->in_flight_since.store(now_s(), std::memory_order_seq_cst);
    // Either we see the death here, or the thread, which looks at all calls when it sees one, sees ours.
    if (state_->has_lost.load(std::memory_order_seq_cst)) Watchdog::instance().wake();
}

void Watch::leave() { state_->in_flight_since.store(0.0, std::memory_order_release); }

std::vector<std::pair<int, double>> Watch::deaths() const {
    std::vector<std::pair<int, double>> found;
    for (const auto& [rank, process] : state_->peers) {
        if (process->died_at() != 0.0) found.emplace_back(rank, process->died_at());
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    return found;
}

double Watch::ended_at() const { return state_->ended_at.load(std::memory_order_relaxed); }

std::uint64_t Watch::ended() const { return state_->ended.load(std::memory_order_relaxed); }

}  // namespace tpk
