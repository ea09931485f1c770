// Ends calls whose peers have died on this host, however long the interpreter is kept from doing so.
//
// A wait in a channel looks around by itself (channel.h).  One in gloo ends with its connection: at once where the peer
// at the other end has died, but a rank may wait for a living one, which cannot go on without the dead one.  Such waits
// are ended by the monitor, a Python thread, and it stands still for as long as another thread holds Python's lock.  Then
// the thread of this file shuts the connections of the group down: gloo's own threads see that and fail all transfers,
// here and at the peers, which thereby learn of it as well.  The call raises when Python has its lock back.
//
// It is the second to act: only when a call is still in flight some time after the death of a peer.  It asks the kernel
// alone (a process descriptor is readable when its process has ended, reaped or not), reads nothing that others write,
// takes no lock that is held during a call, and sleeps as long as nobody dies.
//
// Owns: one thread per process, from the first Watch on; it ends with the process.  A forked child has none, and needs
// none: the group is not its own.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace tpk {

class Process;

// A connected socket of this process.  The cookie tells it from another one that got its number later.
struct Connection {
    int fd;
    std::uint64_t cookie;
};

// The kernel's number of a socket, never used twice; 0 if `fd` is no socket.
std::uint64_t cookie_of(int fd);

// What the thread knows of one group.  Every method may be called from any thread.
class Watch {
public:
    struct Peer {
        int rank;
        int pid;
    };

    // Throws std::system_error where the kernel has no process descriptors (Linux before 5.3, some sandboxes).
    Watch(const std::vector<Peer>& peers, std::vector<Connection> connections, double grace_s);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // A call is in flight from here on, and is not any more.
    void enter();
    void leave();

    // The ranks that have died, first ones first, and when that was seen.
    std::vector<std::pair<int, double>> deaths() const;
    // When this thread ended a call, and how often it has.
    double ended_at() const;
    std::uint64_t ended() const;

private:
    struct State;
    friend class Watchdog;
    const std::shared_ptr<State> state_;
};

}  // namespace tpk
