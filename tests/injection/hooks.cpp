// System calls and allocations that fail on demand, and a record of what is written: for tests, loaded by ctypes.
//
// `hook_install` replaces the slots of the C library's functions in the tables (GOT) of every object that is loaded, so
// that calls of Python, torch, Rust and the compiled core come here first. No preloading, hence no new interpreter. Not
// seen are calls that the C library makes within itself (a stream's write), system calls made without it, and objects
// that are loaded later: install again for those.
//
// Files count below one folder only, by the path they are opened with and by descriptor from then on.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>

namespace {

enum Class : std::uint32_t { kFiles = 1, kMemory = 2, kSockets = 4, kAllocations = 8 };

constexpr int kDescriptors = 65536;
constexpr std::size_t kPathBytes = 4096;

char folder[kPathBytes];  // files below it count; empty: none
std::atomic<bool> is_ours[kDescriptors];
std::atomic<std::uint32_t> armed{0};  // classes whose calls count
std::atomic<long> calls{0};
long fails_at = 0;  // the first call that fails, from 1 on; 0: none
bool for_good = false;
int with_error = 0;
char failed[64];
std::atomic<int> record{-1};  // descriptor of the record
std::mutex record_lock;

bool is_below(const char* path) {
    const std::size_t length = std::strlen(folder);
    return length != 0 && path != nullptr && std::strncmp(path, folder, length) == 0;
}

bool is_file(int fd) { return fd >= 0 && fd < kDescriptors && is_ours[fd].load(std::memory_order_relaxed); }

void note(int fd, bool ours) {
    if (fd >= 0 && fd < kDescriptors) is_ours[fd].store(ours, std::memory_order_relaxed);
}

// Whether this call is one that shall fail.
bool fails(Class what, const char* name) {
    if ((armed.load(std::memory_order_relaxed) & what) == 0) return false;
    const long number = calls.fetch_add(1) + 1;
    if (fails_at == 0 || number < fails_at || (number > fails_at && !for_good)) return false;
    if (number == fails_at) std::snprintf(failed, sizeof(failed), "%s", name);
    errno = with_error;
    return true;
}

// One entry of the record: a line of words, and then so many bytes.
void tell(const char* what, const char* from, const char* to, long long offset, const void* bytes, std::size_t count) {
    const int fd = record.load();
    if (fd < 0) return;
    const std::lock_guard<std::mutex> lock(record_lock);
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    char line[3 * kPathBytes];
    const int length = std::snprintf(line, sizeof(line), "%lld\t%s\t%s\t%s\t%lld\t%zu\n",
                                     now.tv_sec * 1000000000LL + now.tv_nsec, what, from, to, offset, count);
    // dprintf and write of our own table are not replaced: this object is left out.
    if (::write(fd, line, static_cast<std::size_t>(length)) < 0) std::abort();
    if (count != 0 && ::write(fd, bytes, count) < 0) std::abort();
}

void path_of(int fd, char* into) {
    char link[64];
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t length = ::readlink(link, into, kPathBytes - 1);
    into[length < 0 ? 0 : length] = '\0';
}

void tell_of(const char* what, int fd, long long offset, const void* bytes, std::size_t count) {
    if (record.load() < 0) return;
    char path[kPathBytes];
    path_of(fd, path);
    tell(what, path, "", offset, bytes, count);
}

// ---------------------------------------------------------------- what stands in for the C library's functions

int opened(const char* path, int flags, int fd) {
    if (fd < 0) return fd;
    note(fd, is_below(path));
    if (is_below(path) && (flags & (O_CREAT | O_TRUNC)) != 0)
        tell((flags & O_TRUNC) != 0 ? "truncate" : "create", path, "", 0, nullptr, 0);
    return fd;
}

int open_(const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = (flags & O_CREAT) != 0 ? static_cast<mode_t>(va_arg(more, int)) : 0;
    va_end(more);
    if (is_below(path) && fails(kFiles, "open")) return -1;
    return opened(path, flags, ::open(path, flags, mode));
}

int openat_(int at, const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = (flags & O_CREAT) != 0 ? static_cast<mode_t>(va_arg(more, int)) : 0;
    va_end(more);
    if (is_below(path) && fails(kFiles, "openat")) return -1;
    return opened(path, flags, ::openat(at, path, flags, mode));
}

int close_(int fd) {
    note(fd, false);
    return ::close(fd);
}

ssize_t write_(int fd, const void* bytes, std::size_t count) {
    if (!is_file(fd)) return ::write(fd, bytes, count);
    if (fails(kFiles, "write")) return -1;
    const off_t at = ::lseek(fd, 0, SEEK_CUR);
    const ssize_t done = ::write(fd, bytes, count);
    if (done > 0) tell_of("write", fd, at, bytes, static_cast<std::size_t>(done));
    return done;
}

ssize_t pwrite_(int fd, const void* bytes, std::size_t count, off_t at) {
    if (!is_file(fd)) return ::pwrite(fd, bytes, count, at);
    if (fails(kFiles, "pwrite")) return -1;
    const ssize_t done = ::pwrite(fd, bytes, count, at);
    if (done > 0) tell_of("write", fd, at, bytes, static_cast<std::size_t>(done));
    return done;
}

ssize_t writev_(int fd, const iovec* parts, int count) {
    if (!is_file(fd)) return ::writev(fd, parts, count);
    // As the kernel may, only the first part that is not empty: callers go on with the rest.
    for (int part = 0; part < count; ++part) {
        if (parts[part].iov_len != 0) return write_(fd, parts[part].iov_base, parts[part].iov_len);
    }
    return 0;
}

ssize_t read_(int fd, void* bytes, std::size_t count) {
    if (is_file(fd) && fails(kFiles, "read")) return -1;
    return ::read(fd, bytes, count);
}

ssize_t pread_(int fd, void* bytes, std::size_t count, off_t at) {
    if (is_file(fd) && fails(kFiles, "pread")) return -1;
    return ::pread(fd, bytes, count, at);
}

ssize_t preadv_(int fd, const iovec* parts, int count, off_t at) {
    if (is_file(fd) && fails(kFiles, "preadv")) return -1;
    return ::preadv(fd, parts, count, at);
}

int fsync_(int fd) {
    if (!is_file(fd)) return ::fsync(fd);
    if (fails(kFiles, "fsync")) return -1;
    tell_of("fsync", fd, 0, nullptr, 0);
    return ::fsync(fd);
}

int ftruncate_(int fd, off_t size) {
    if (!is_file(fd)) return ::ftruncate(fd, size);
    if (fails(kFiles, "ftruncate")) return -1;
    const int done = ::ftruncate(fd, size);
    if (done == 0) tell_of("size", fd, size, nullptr, 0);
    return done;
}

int rename_(const char* from, const char* to) {
    if (!is_below(from) && !is_below(to)) return ::rename(from, to);
    if (fails(kFiles, "rename")) return -1;
    const int done = ::rename(from, to);
    if (done == 0) tell("rename", from, to, 0, nullptr, 0);
    return done;
}

int on_path(const char* what, const char* path, int (*make)(const char*)) {
    if (!is_below(path)) return make(path);
    if (fails(kFiles, what)) return -1;
    const int done = make(path);
    if (done == 0) tell(what, path, "", 0, nullptr, 0);
    return done;
}

int mkdir_(const char* path, mode_t mode) {
    if (!is_below(path)) return ::mkdir(path, mode);
    if (fails(kFiles, "mkdir")) return -1;
    const int done = ::mkdir(path, mode);
    if (done == 0) tell("mkdir", path, "", 0, nullptr, 0);
    return done;
}

int unlink_(const char* path) { return on_path("unlink", path, ::unlink); }
int rmdir_(const char* path) { return on_path("rmdir", path, ::rmdir); }

void* mmap_(void* where, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
    const bool counts = is_file(fd) ? fails(kFiles, "mmap") : fd >= 0 && fails(kMemory, "mmap");
    return counts ? MAP_FAILED : ::mmap(where, bytes, protection, flags, fd, offset);
}

int memfd_create_(const char* name, unsigned flags) {
    return fails(kMemory, "memfd_create") ? -1 : ::memfd_create(name, flags);
}

int posix_fallocate_(int fd, off_t offset, off_t bytes) {
    return fails(kMemory, "posix_fallocate") ? with_error : ::posix_fallocate(fd, offset, bytes);
}

int fallocate_(int fd, int mode, off_t offset, off_t bytes) {
    return fails(kMemory, "fallocate") ? -1 : ::fallocate(fd, mode, offset, bytes);
}

int dup_(int fd) { return fails(kMemory, "dup") ? -1 : ::dup(fd); }

int socket_(int domain, int type, int protocol) {
    return fails(kSockets, "socket") ? -1 : ::socket(domain, type, protocol);
}

int bind_(int fd, const sockaddr* to, socklen_t bytes) { return fails(kSockets, "bind") ? -1 : ::bind(fd, to, bytes); }

int listen_(int fd, int backlog) { return fails(kSockets, "listen") ? -1 : ::listen(fd, backlog); }

int accept4_(int fd, sockaddr* from, socklen_t* bytes, int flags) {
    return fails(kSockets, "accept4") ? -1 : ::accept4(fd, from, bytes, flags);
}

int connect_(int fd, const sockaddr* to, socklen_t bytes) {
    return fails(kSockets, "connect") ? -1 : ::connect(fd, to, bytes);
}

ssize_t sendmsg_(int fd, const msghdr* message, int flags) {
    return fails(kSockets, "sendmsg") ? -1 : ::sendmsg(fd, message, flags);
}

ssize_t recvmsg_(int fd, msghdr* message, int flags) {
    return fails(kSockets, "recvmsg") ? -1 : ::recvmsg(fd, message, flags);
}

ssize_t send_(int fd, const void* bytes, std::size_t count, int flags) {
    return fails(kSockets, "send") ? -1 : ::send(fd, bytes, count, flags);
}

int posix_memalign_(void** into, std::size_t alignment, std::size_t bytes) {
    return fails(kAllocations, "posix_memalign") ? ENOMEM : ::posix_memalign(into, alignment, bytes);
}

struct Hook {
    const char* name;
    void* function;
};

const Hook kHooks[] = {
    {"open", reinterpret_cast<void*>(open_)},
    {"open64", reinterpret_cast<void*>(open_)},
    {"openat", reinterpret_cast<void*>(openat_)},
    {"openat64", reinterpret_cast<void*>(openat_)},
    {"close", reinterpret_cast<void*>(close_)},
    {"write", reinterpret_cast<void*>(write_)},
    {"pwrite", reinterpret_cast<void*>(pwrite_)},
    {"pwrite64", reinterpret_cast<void*>(pwrite_)},
    {"writev", reinterpret_cast<void*>(writev_)},
    {"read", reinterpret_cast<void*>(read_)},
    {"pread", reinterpret_cast<void*>(pread_)},
    {"pread64", reinterpret_cast<void*>(pread_)},
    {"preadv", reinterpret_cast<void*>(preadv_)},
    {"preadv64", reinterpret_cast<void*>(preadv_)},
    {"fsync", reinterpret_cast<void*>(fsync_)},
    {"fdatasync", reinterpret_cast<void*>(fsync_)},
    {"ftruncate", reinterpret_cast<void*>(ftruncate_)},
    {"ftruncate64", reinterpret_cast<void*>(ftruncate_)},
    {"rename", reinterpret_cast<void*>(rename_)},
    {"mkdir", reinterpret_cast<void*>(mkdir_)},
    {"unlink", reinterpret_cast<void*>(unlink_)},
    {"rmdir", reinterpret_cast<void*>(rmdir_)},
    {"mmap", reinterpret_cast<void*>(mmap_)},
    {"mmap64", reinterpret_cast<void*>(mmap_)},
    {"memfd_create", reinterpret_cast<void*>(memfd_create_)},
    {"posix_fallocate", reinterpret_cast<void*>(posix_fallocate_)},
    {"posix_fallocate64", reinterpret_cast<void*>(posix_fallocate_)},
    {"fallocate", reinterpret_cast<void*>(fallocate_)},
    {"fallocate64", reinterpret_cast<void*>(fallocate_)},
    {"dup", reinterpret_cast<void*>(dup_)},
    {"socket", reinterpret_cast<void*>(socket_)},
    {"bind", reinterpret_cast<void*>(bind_)},
    {"listen", reinterpret_cast<void*>(listen_)},
    {"accept4", reinterpret_cast<void*>(accept4_)},
    {"connect", reinterpret_cast<void*>(connect_)},
    {"sendmsg", reinterpret_cast<void*>(sendmsg_)},
    {"recvmsg", reinterpret_cast<void*>(recvmsg_)},
    {"send", reinterpret_cast<void*>(send_)},
    {"posix_memalign", reinterpret_cast<void*>(posix_memalign_)},
};

// ---------------------------------------------------------------- the tables of loaded objects

struct Tables {
    const ElfW(Sym) * symbols = nullptr;
    const char* names = nullptr;
    const ElfW(Rela) * jumps = nullptr;
    std::size_t num_jumps = 0;
    const ElfW(Rela) * others = nullptr;
    std::size_t num_others = 0;
};

// The loader has made these absolute, except in objects that it has not touched (the vdso).
template <typename T>
const T* at(const dl_phdr_info& object, ElfW(Addr) address) {
    return reinterpret_cast<const T*>(address < object.dlpi_addr ? object.dlpi_addr + address : address);
}

Tables tables_of(const dl_phdr_info& object, const ElfW(Dyn) * entry) {
    Tables found;
    for (; entry->d_tag != DT_NULL; ++entry) {
        switch (entry->d_tag) {
            case DT_SYMTAB:
                found.symbols = at<ElfW(Sym)>(object, entry->d_un.d_ptr);
                break;
            case DT_STRTAB:
                found.names = at<char>(object, entry->d_un.d_ptr);
                break;
            case DT_JMPREL:
                found.jumps = at<ElfW(Rela)>(object, entry->d_un.d_ptr);
                break;
            case DT_PLTRELSZ:
                found.num_jumps = entry->d_un.d_val / sizeof(ElfW(Rela));
                break;
            case DT_RELA:
                found.others = at<ElfW(Rela)>(object, entry->d_un.d_ptr);
                break;
            case DT_RELASZ:
                found.num_others = entry->d_un.d_val / sizeof(ElfW(Rela));
                break;
            default:
                break;
        }
    }
    return found;
}

void* stand_in(const char* name) {
    for (const Hook& hook : kHooks) {
        if (std::strcmp(hook.name, name) == 0) return hook.function;
    }
    return nullptr;
}

int replace(const dl_phdr_info& object, const Tables& tables, const ElfW(Rela) * relocations, std::size_t count) {
    int replaced = 0;
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    for (std::size_t index = 0; index < count; ++index) {
        const ElfW(Rela) & relocation = relocations[index];
        const auto symbol = ELF64_R_SYM(relocation.r_info);
        if (symbol == 0 || relocation.r_addend != 0) continue;
        void* function = stand_in(tables.names + tables.symbols[symbol].st_name);
        if (function == nullptr) continue;
        auto** slot = reinterpret_cast<void**>(object.dlpi_addr + relocation.r_offset);
        if (*slot == function) continue;
        void* start = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot) & ~(page - 1));
        if (::mprotect(start, 2 * page, PROT_READ | PROT_WRITE) != 0 &&
            ::mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
            continue;
        }
        *slot = function;
        ++replaced;
    }
    return replaced;
}

int visit(dl_phdr_info* object, std::size_t, void* total) {
    Dl_info own;
    if (::dladdr(reinterpret_cast<void*>(visit), &own) != 0 && own.dli_fname != nullptr &&
        std::strcmp(own.dli_fname, object->dlpi_name) == 0) {
        return 0;
    }
    const char* name = std::strrchr(object->dlpi_name, '/');
    name = name == nullptr ? object->dlpi_name : name + 1;
    // The C library itself, the loader and the vdso call each other in ways that are none of ours.
    for (const char* left_alone : {"libc.so", "ld-linux", "linux-vdso"}) {
        if (std::strncmp(name, left_alone, std::strlen(left_alone)) == 0) return 0;
    }
    for (int index = 0; index < object->dlpi_phnum; ++index) {
        if (object->dlpi_phdr[index].p_type != PT_DYNAMIC) continue;
        const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(object->dlpi_addr + object->dlpi_phdr[index].p_vaddr);
        const Tables tables = tables_of(*object, entry);
        if (tables.symbols == nullptr || tables.names == nullptr) continue;
        *static_cast<int*>(total) += replace(*object, tables, tables.jumps, tables.num_jumps) +
                                     replace(*object, tables, tables.others, tables.num_others);
    }
    return 0;
}

}  // namespace

extern "C" {

// How many slots were replaced.
int hook_install() {
    int total = 0;
    ::dl_iterate_phdr(visit, &total);
    return total;
}

// From now on calls of these classes are counted, and the n-th fails; with `good` all later ones, too.
void hook_arm(const char* below, std::uint32_t classes, long n, int error, int good) {
    armed.store(0);
    std::snprintf(folder, sizeof(folder), "%s", below);
    failed[0] = '\0';
    fails_at = n;
    for_good = good != 0;
    with_error = error;
    calls.store(0);
    armed.store(classes);
}

long hook_disarm() {
    armed.store(0);
    return calls.load();
}

// The name of the function that has failed; empty if none has.
const char* hook_failed() { return failed; }

// Write to this descriptor what is done to files below the folder; -1 ends it.
void hook_record(const char* below, int fd) {
    std::snprintf(folder, sizeof(folder), "%s", below);
    record.store(fd);
}
}
