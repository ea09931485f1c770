#include "cpu/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace tpk {

namespace {

[[noreturn]] void raise_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Descriptor::~Descriptor() {
    if (fd_ >= 0) close(fd_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
    if (this != &other) {
        if (fd_ >= 0) close(fd_);
        fd_ = other.release();
    }
    return *this;
}

int Descriptor::release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
}

Mapping::Mapping(int fd, std::size_t bytes, bool writable) : data_(nullptr), bytes_(bytes) {
    const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
    void* address = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED) raise_errno("cannot map " + std::to_string(bytes) + " bytes of shared memory");
    data_ = static_cast<std::byte*>(address);
    // A core dump of a rank is about its own state; the advice is best effort.
    madvise(address, bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

Descriptor make_memory_file(const char* name) {
    Descriptor file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file.get() < 0) raise_errno("cannot make shared memory (memfd_create)");
    if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) raise_errno("cannot seal shared memory");
    return file;
}

Descriptor duplicate(int fd) {
    Descriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) raise_errno("cannot duplicate a descriptor of shared memory");
    return copy;
}

int reserve(int fd, std::size_t offset, std::size_t bytes) {
    if (bytes == 0) return 0;
    int error;
    do {
        error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
    return error;
}

void give_back(int fd, std::size_t offset, std::size_t bytes) {
    if (bytes == 0) return;
    // Failure leaves memory reserved until the group goes, which is all that could be done about it.
    (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                    static_cast<off_t>(bytes));
}

void check_sealed(int fd, std::size_t bytes, const std::string& what) {
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw std::invalid_argument(what + " is not a memory file sealed against shrinking");
    }
    struct stat status{};
    if (fstat(fd, &status) != 0) raise_errno("cannot inspect " + what);
    if (static_cast<std::size_t>(status.st_size) < bytes) {
        throw std::invalid_argument(what + " has " + std::to_string(status.st_size) + " bytes, expected at least " +
                                    std::to_string(bytes));
    }
}

}  // namespace tpk
