// Whether a peer's process still lives: each rank holds one byte of the control file with an open-file-description
// lock, which the kernel drops the moment the process is gone, reaped or not, however it died.
//
// A forked child shares its parent's open file descriptions and would keep the parent's byte locked after the parent's
// death.  Children therefore close theirs as they are born (pthread_atfork), and can not use the group.
#pragma once

#include <atomic>

#include "cpu/segment.h"

namespace tpk {

class Liveness {
public:
    // Takes the lock of `rank` on the file behind `control_fd`, through a description of its own.
    // Throws std::system_error, or std::runtime_error when another process holds that rank's lock.
    Liveness(int control_fd, int rank);
    ~Liveness();
    Liveness(const Liveness&) = delete;
    Liveness& operator=(const Liveness&) = delete;

    bool is_alive(int rank) const;
    // Whether this process is a child of the one that joined the group.
    bool forked() const { return forked_.load(std::memory_order_relaxed); }

    // For the fork handlers only.
    void after_fork_in_child();

private:
    Descriptor file_;
    std::atomic<bool> forked_{false};
};

}  // namespace tpk
