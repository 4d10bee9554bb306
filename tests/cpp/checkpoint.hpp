// Experts in files, each in several segments somewhere in some of them, and what reads them.

#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>

#include "driver.hpp"
#include "team/reader.hpp"

namespace driver {

using lowtide::CANCELLED;
using lowtide::FILE_CHANGED;
using lowtide::FILE_ENDED;
using lowtide::PENDING;
using lowtide::READY;
using Bytes = std::vector<std::uint8_t>;

constexpr double LONG_S = 60, SHORT_S = 0.02;

inline Bytes random_bytes(long count) {
    Bytes out(count);
    for (std::uint8_t& each : out) each = static_cast<std::uint8_t>(generator()());
    return out;
}

// What is to be in a slot, the parts that are read into it in several segments.
class Checkpoint {
   public:
    static constexpr long NUM_FILES = 3;

    // Cuts each expert into segments of random sizes and writes them in random order, with gaps.
    explicit Checkpoint(const std::vector<Bytes>& experts) {
        const char* folder = std::getenv("TMPDIR");
        folder_ = std::string(folder == nullptr ? "/tmp" : folder) + "/lowtide-driver-XXXXXX";
        if (mkdtemp(&folder_[0]) == nullptr) std::perror(folder_.c_str()), std::exit(2);
        for (const Bytes& expert : experts) add(expert);
        for (long i = 0; i < NUM_FILES; ++i) write(i, contents_[i]);
    }

    ~Checkpoint() {
        for (long i = 0; i < NUM_FILES; ++i) unlink(path(i).c_str());
        rmdir(folder_.c_str());
    }
    Checkpoint(const Checkpoint&) = delete;

    std::string path(long file) const { return folder_ + "/" + std::to_string(file); }

    void write(long file, const Bytes& content) const {
        const int descriptor = open(path(file).c_str(), O_WRONLY | O_CREAT, 0600);
        const auto num_bytes = static_cast<ssize_t>(content.size());
        expect(::write(descriptor, content.data(), content.size()) == num_bytes, "a file written");
        close(descriptor);
    }

    const Bytes& content(long file) const { return contents_[file]; }

    Ids first_range = {0};
    std::vector<lowtide::Range> ranges;
    std::vector<lowtide::Segment> segments;

   private:
    void add(const Bytes& expert) {
        const long size = long(expert.size());
        std::vector<long> cuts = {0, size};
        for (long i = below(6); size > 0 && i > 0; --i) cuts.push_back(below(size));
        std::sort(cuts.begin(), cuts.end());
        cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
        std::vector<long> order(cuts.size() - 1);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), generator());
        for (std::size_t i = 0; i < order.size();) {
            const long file = below(NUM_FILES), num_segments = 1 + below(long(order.size() - i));
            Bytes& content = contents_[file];
            append(content, random_bytes(below(9000)));
            const long start = long(content.size()), first = long(segments.size());
            for (long n = 0; n < num_segments; ++n) {
                const long from = cuts[order[i]], to = cuts[order[i] + 1];
                if (n > 0) append(content, random_bytes(below(3) * below(5000)));
                segments.push_back({long(content.size()), to - from, from});
                content.insert(content.end(), expert.begin() + from, expert.begin() + to);
                ++i;
            }
            ranges.push_back({file, start, long(content.size()) - start, first, num_segments});
        }
        first_range.push_back(long(ranges.size()));
    }

    static void append(Bytes& content, const Bytes& more) {
        content.insert(content.end(), more.begin(), more.end());
    }

    std::string folder_;
    Bytes contents_[NUM_FILES];
};

using ReadinessHandle = std::shared_ptr<lowtide::Readiness>;

// The functions of reader.cpp.
struct ReaderCalls {
    explicit ReaderCalls(const Library& kernels)
        : open_readiness(kernels.function<ReadinessHandle*(long)>("lowtide_open_readiness")),
          close_readiness(kernels.function<void(ReadinessHandle*)>("lowtide_close_readiness")),
          begin(kernels.function<std::uint32_t(ReadinessHandle*, long, std::uint32_t)>(
              "lowtide_begin_slot")),
          end_piece(kernels.function<void(ReadinessHandle*, long, std::uint32_t, int)>(
              "lowtide_end_piece")),
          wait(kernels.function<int(ReadinessHandle*, long, double)>("lowtide_wait_for_slot")),
          open(kernels.function<lowtide::Reader*(const lowtide::Source*, ReadinessHandle*)>(
              "lowtide_open_reader")),
          start(kernels.function<void(lowtide::Reader*, long, long)>("lowtide_start_read")),
          cancel(kernels.function<long(lowtide::Reader*, long)>("lowtide_cancel_read")),
          drain(kernels.function<int(lowtide::Reader*, double)>("lowtide_drain_reader")),
          close(kernels.function<int(lowtide::Reader*, double)>("lowtide_close_reader")),
          free(kernels.function<void(lowtide::Reader*)>("lowtide_free_reader")) {}

    ReadinessHandle* (*open_readiness)(long);
    void (*close_readiness)(ReadinessHandle*);
    std::uint32_t (*begin)(ReadinessHandle*, long, std::uint32_t);
    void (*end_piece)(ReadinessHandle*, long, std::uint32_t, int);
    int (*wait)(ReadinessHandle*, long, double);
    lowtide::Reader* (*open)(const lowtide::Source*, ReadinessHandle*);
    void (*start)(lowtide::Reader*, long, long);
    long (*cancel)(lowtide::Reader*, long);
    int (*drain)(lowtide::Reader*, double);
    int (*close)(lowtide::Reader*, double);
    void (*free)(lowtide::Reader*);
};

struct ReadSizes {
    long num_slots, slot_bytes, piece_bytes;
    int num_threads;
    bool is_direct;
};

constexpr std::uint8_t UNTOUCHED = 0xA5;

// Owns a reader, and slots that it fills.
class OwnReader {
   public:
    // pipe: what is read instead of the checkpoint's first file, or -1.
    OwnReader(const ReaderCalls& calls, const Checkpoint& checkpoint, const ReadSizes& sizes,
              int pipe = -1)
        : slots(sizes.num_slots * sizes.slot_bytes, UNTOUCHED), calls_(calls), sizes_(sizes) {
        for (long i = 0; i < Checkpoint::NUM_FILES; ++i) {
            const int flags = O_RDONLY | (sizes.is_direct ? O_DIRECT : 0);
            struct stat facts {};
            const bool is_pipe = i == 0 && pipe >= 0;
            const int file = is_pipe ? dup(pipe) : ::open(checkpoint.path(i).c_str(), flags);
            expect(file >= 0 && fstat(file, &facts) == 0, "a file that opens", i);
            const long modified_ns = facts.st_mtim.tv_sec * 1000000000L + facts.st_mtim.tv_nsec;
            const long changed_ns = facts.st_ctim.tv_sec * 1000000000L + facts.st_ctim.tv_nsec;
            files.push_back({file, facts.st_size, modified_ns, changed_ns});
        }
        if (sizes.is_direct) {
            const long each = sizes.piece_bytes + 2 * lowtide::SECTOR_BYTES;
            buffers_ = std::aligned_alloc(lowtide::SECTOR_BYTES, sizes.num_threads * each);
        }
        const lowtide::Source source = {
            checkpoint.first_range.data(), checkpoint.ranges.data(), checkpoint.segments.data(),
            files.data(), slots.data(), static_cast<std::uint8_t*>(buffers_),
            sizes.slot_bytes, sizes.piece_bytes, sizes.num_threads,
        };
        readiness = calls.open_readiness(sizes.num_slots);
        reader = calls.open(&source, readiness);
        expect(reader != nullptr, "a reader that opens", sizes.num_threads);
    }

    ~OwnReader() {
        if (reader != nullptr) {
            expect(close(LONG_S), "a reader that closes", sizes_.num_threads);
            free();
        }
        for (const lowtide::File& file : files) ::close(static_cast<int>(file.descriptor));
        std::free(buffers_);
    }
    OwnReader(const OwnReader&) = delete;

    void start(long expert, long slot) const { calls_.start(reader, expert, slot); }
    int wait(long slot, double seconds = LONG_S) const {
        return calls_.wait(readiness, slot, seconds);
    }
    long cancel(long slot) const { return calls_.cancel(reader, slot); }
    bool drain(double seconds) const { return calls_.drain(reader, seconds); }
    bool close(double seconds) const { return calls_.close(reader, seconds); }

    // Nobody asks any more: threads that read yet have their own share.
    void free() {
        calls_.free(reader), calls_.close_readiness(readiness);
        reader = nullptr, readiness = nullptr;
    }

    // As `num_bytes` of a slot are.
    Bytes slot(long number, long num_bytes) const {
        const auto start = slots.begin() + number * sizes_.slot_bytes;
        return Bytes(start, start + num_bytes);
    }

    Bytes slots;
    std::vector<lowtide::File> files;
    ReadinessHandle* readiness = nullptr;
    lowtide::Reader* reader = nullptr;

   private:
    const ReaderCalls& calls_;
    const ReadSizes sizes_;
    void* buffers_ = nullptr;
};

// Whether the checkpoint's file system has direct reads.
inline bool can_read_direct(const Checkpoint& checkpoint) {
    const int file = ::open(checkpoint.path(0).c_str(), O_RDONLY | O_DIRECT);
    if (file < 0) return false;
    void* buffer = std::aligned_alloc(lowtide::SECTOR_BYTES, lowtide::SECTOR_BYTES);
    const bool is_read = pread(file, buffer, lowtide::SECTOR_BYTES, 0) >= 0;
    std::free(buffer);
    ::close(file);
    return is_read;
}

}  // namespace driver
