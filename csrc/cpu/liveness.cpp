#include "cpu/liveness.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>

namespace tpk {

namespace {

// Every live Liveness of this process, for the fork handlers.  Never destroyed: handlers may run during exit.
std::mutex& registry_mutex() {
    static std::mutex* mutex = new std::mutex;
    return *mutex;
}

std::set<Liveness*>& registry() {
    static std::set<Liveness*>* members = new std::set<Liveness*>;
    return *members;
}

void before_fork() { registry_mutex().lock(); }

void after_fork_in_parent() { registry_mutex().unlock(); }

void after_fork_in_child() {
    for (Liveness* member : registry()) member->after_fork_in_child();
    registry_mutex().unlock();
}

void install_fork_handlers() {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
}

struct flock byte_of(int rank, short type) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

}  // namespace

Liveness::Liveness(int control_fd, int rank) {
    install_fork_handlers();
    // A duplicate would share the description, and with it the locks, of whoever sent us the descriptor.
    const std::string path = "/proc/self/fd/" + std::to_string(control_fd);
    const std::lock_guard<std::mutex> guard(registry_mutex());
    file_ = Descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file_.get() < 0) {
        throw std::system_error(errno, std::generic_category(), "cannot open the control segment again (" + path + ")");
    }
    struct flock lock = byte_of(rank, F_WRLCK);
    if (fcntl(file_.get(), F_OFD_SETLK, &lock) != 0) {
        if (errno == EACCES || errno == EAGAIN) {
            throw std::runtime_error("another process is rank " + std::to_string(rank) + " of this group");
        }
        throw std::system_error(errno, std::generic_category(), "cannot lock this rank's byte of the control segment");
    }
    registry().insert(this);
}

Liveness::~Liveness() {
    const std::lock_guard<std::mutex> guard(registry_mutex());
    registry().erase(this);
    file_ = Descriptor();  // under the lock: a child that is born now must not inherit it
}

bool Liveness::is_alive(int rank) const {
    struct flock lock = byte_of(rank, F_WRLCK);
    if (fcntl(file_.get(), F_OFD_GETLK, &lock) != 0) return true;  // no evidence: the time-out decides
    return lock.l_type != F_UNLCK;
}

void Liveness::after_fork_in_child() {
    forked_.store(true, std::memory_order_relaxed);
    file_ = Descriptor();
}

}  // namespace tpk
