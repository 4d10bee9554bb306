// Reads of files as a system may answer them: late, interrupted, in parts, or never. A program's own
// `pread` is what the libraries that it loads call.

#include "unruly_reads.hpp"

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace driver {

std::atomic<bool> is_unruly{false};
std::atomic<long> num_reads{0};

}  // namespace driver

extern "C" ssize_t pread(int descriptor, void* target, size_t num_bytes, off_t offset) {
    static auto* const own = reinterpret_cast<decltype(&pread)>(dlsym(RTLD_NEXT, "pread"));
    const long number = driver::num_reads++;
    struct stat facts;
    // As a drive that does not answer: until somebody writes into the pipe, or closes it.
    if (fstat(descriptor, &facts) == 0 && S_ISFIFO(facts.st_mode))
        return read(descriptor, target, num_bytes);
    if (!driver::is_unruly) return own(descriptor, target, num_bytes, offset);
    std::this_thread::sleep_for(std::chrono::microseconds(number % 5 * 100));
    if (number % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    const bool may_be_direct = num_bytes % 4096 == 0 && offset % 4096 == 0;
    const size_t half = num_bytes / 2;
    return own(descriptor, target, may_be_direct ? half / 4096 * 4096 + (half < 4096) * num_bytes
                                                 : num_bytes - half, offset);
}

extern "C" ssize_t preadv(int descriptor, const iovec* parts, int num_parts, off_t offset) {
    static auto* const own = reinterpret_cast<decltype(&preadv)>(dlsym(RTLD_NEXT, "preadv"));
    if (!driver::is_unruly) return own(descriptor, parts, num_parts, offset);
    return pread(descriptor, parts->iov_base, parts->iov_len, offset);
}
