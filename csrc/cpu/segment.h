// Shared memory that leaves nothing behind: memfds, reserved up front, mapped once at a fixed address.
//
// A data segment belongs to one rank, which alone maps it writable.  Its mapping is as large as a segment can ever
// get, so that growing needs no new mapping and no new descriptor on any rank: the owner reserves more pages, and
// pointers stay valid.  Pages are reserved with posix_fallocate: a machine without memory says so in an error here, not
// with SIGBUS later.  A shrinking seal keeps every peer safe from truncation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tpk {

// A call may stage this much in each of two slots.
constexpr std::size_t kSlotBytes = std::size_t{1} << 35;
constexpr std::size_t kSegmentBytes = 2 * kSlotBytes;

// Owns a file descriptor.
class Descriptor {
public:
    explicit Descriptor(int fd = -1) : fd_(fd) {}
    ~Descriptor();
    Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept;
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    int get() const { return fd_; }
    int release();

private:
    int fd_;
};

// Owns a mapping.
class Mapping {
public:
    // Throws std::system_error when the kernel refuses.
    Mapping(int fd, std::size_t bytes, bool writable);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

private:
    std::byte* data_;
    std::size_t bytes_;
};

// A new anonymous memory file that only this process can reach until it passes the descriptor on.
// Throws std::system_error.
Descriptor make_memory_file(const char* name);

// Another descriptor of the same open file; throws std::system_error.
Descriptor duplicate(int fd);

// Reserve pages [offset, offset + bytes) of the file; 0 or an errno.
int reserve(int fd, std::size_t offset, std::size_t bytes);

// Give reserved pages back; the file keeps its size.
void give_back(int fd, std::size_t offset, std::size_t bytes);

// Throws std::invalid_argument unless `fd` is a memory file sealed against shrinking of at least `bytes` bytes: a file
// that a peer could truncate under our feet would kill us with SIGBUS.
void check_sealed(int fd, std::size_t bytes, const std::string& what);

}  // namespace tpk
