// Reads of experts: whole, interrupted, given up, failed, and such as never end.

#include <thread>

#include "checkpoint.hpp"
#include "unruly_reads.hpp"

namespace driver {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Of odd sizes; the last has no bytes.
std::vector<Bytes> random_experts() {
    std::vector<Bytes> experts;
    for (long size : {1, 4095, 4097, 12289, 29999, 70001}) experts.push_back(random_bytes(size));
    experts.push_back({});
    return experts;
}

constexpr long SLOT_BYTES = 70003, NUM_SLOTS = 4;

// Fillings one after the other, several at a time; what is behind an expert in its slot stays.
void check_fillings(const ReaderCalls& calls, const std::vector<Bytes>& experts,
                    const Checkpoint& checkpoint, const ReadSizes& sizes) {
    OwnReader own(calls, checkpoint, sizes);
    for (int round = 0; round < 4; ++round) {
        std::fill(own.slots.begin(), own.slots.end(), UNTOUCHED);
        Ids read;
        for (long slot = 0; slot < NUM_SLOTS; ++slot) {
            read.push_back(below(long(experts.size())));
            if (slot % 2 == 0) own.start(read[slot], slot);
        }
        std::thread other([&] {
            for (long slot = 1; slot < NUM_SLOTS; slot += 2) own.start(read[slot], slot);
        });
        other.join();
        for (long slot = NUM_SLOTS; slot-- > 0;) {
            const Bytes& expert = experts[read[slot]];
            const int state = own.wait(slot);
            expect(state == READY, "a read that ends well", state, read[slot], sizes.piece_bytes);
            Bytes wanted = expert;
            wanted.resize(SLOT_BYTES, UNTOUCHED);
            expect(own.slot(slot, SLOT_BYTES) == wanted, "bytes of an expert", read[slot],
                   sizes.piece_bytes, sizes.is_direct);
        }
    }
    expect(own.drain(LONG_S), "a drained reader", sizes.num_threads);
}

// What has failed is said once the last piece of the filling has ended, and pieces of earlier
// fillings count for nothing, whichever threads end them.
void check_readiness(const ReaderCalls& calls) {
    ReadinessHandle* readiness = calls.open_readiness(2);
    expect(calls.wait(readiness, 0, 0) == READY, "a slot that nothing fills");
    for (int round = 0; round < 20; ++round) {
        const std::uint32_t before = calls.begin(readiness, 1, 2);
        calls.end_piece(readiness, 1, before, EIO);
        const std::uint32_t filling = calls.begin(readiness, 1, 5);
        const int error = round % 2 ? EIO : READY;
        std::vector<std::thread> threads;
        for (int piece = 0; piece < 4; ++piece)
            threads.emplace_back([=] {
                calls.end_piece(readiness, 1, before, EIO);
                calls.end_piece(readiness, 1, filling, piece == round % 4 ? error : READY);
            });
        for (std::thread& thread : threads) thread.join();
        expect(calls.wait(readiness, 1, 0.001) == PENDING, "a filling with a piece on its way");
        std::thread last([=] { calls.end_piece(readiness, 1, filling, READY); });
        expect(calls.wait(readiness, 1, LONG_S) == error, "what a filling ended with", round);
        last.join();
        calls.end_piece(readiness, 1, filling, EIO);  // one too many
        expect(calls.wait(readiness, 1, 0) == error, "a filling that has ended", round);
    }
    // Of several errors the first, and any before a piece that was given up.
    const int errors[][4] = {{EIO, EBADF, READY, EIO}, {EIO, CANCELLED, READY, EIO},
                             {CANCELLED, EIO, EBADF, EIO}, {READY, CANCELLED, READY, CANCELLED}};
    for (const int (&each)[4] : errors) {
        const std::uint32_t filling = calls.begin(readiness, 1, 3);
        for (int piece = 0; piece < 3; ++piece)
            calls.end_piece(readiness, 1, filling, each[piece]);
        expect(calls.wait(readiness, 1, 0) == each[3], "which error is told", each[0], each[1]);
    }
    expect(calls.wait(readiness, 0, 0) == READY, "the other slot");
    calls.close_readiness(readiness);
}

// One expert in a single segment at the start of each file.
struct Whole {
    std::vector<Bytes> experts;
    Checkpoint checkpoint;

    Whole() : checkpoint({}) {
        for (long i = 0; i < Checkpoint::NUM_FILES; ++i) {
            experts.push_back(random_bytes(9001));
            checkpoint.write(i, experts[i]);
            checkpoint.segments.push_back({0, 9001, 0});
            checkpoint.ranges.push_back({i, 0, 9001, i, 1});
            checkpoint.first_range.push_back(i + 1);
        }
    }
};

// Segments of whole sectors, which lie on sectors of the slot in another order than in the file.
void check_places(const ReaderCalls& calls) {
    constexpr long SECTOR = lowtide::SECTOR_BYTES, NUM_SECTORS = 8;
    Checkpoint checkpoint({});
    const Bytes content = random_bytes(NUM_SECTORS * SECTOR);
    checkpoint.write(0, content);
    long start = 0;
    for (long num_sectors : {1, 3, 2, 2}) {
        checkpoint.segments.push_back({start, num_sectors * SECTOR, 0});
        start += num_sectors * SECTOR;
    }
    checkpoint.ranges.push_back({0, 0, start, 0, long(checkpoint.segments.size())});
    checkpoint.first_range.push_back(1);
    for (long piece_bytes : {SECTOR, 3 * SECTOR, 1L << 20}) {
        OwnReader own(calls, checkpoint, {1, start + SECTOR, piece_bytes, 2, true});
        const auto address = reinterpret_cast<std::uintptr_t>(own.slots.data());
        const long first = long((SECTOR - address % SECTOR) % SECTOR);
        Bytes wanted(own.slots);
        long target = first + start;
        for (lowtide::Segment& segment : checkpoint.segments) {
            segment.target = target -= segment.num_bytes;
            const auto from = content.begin() + segment.start;
            std::copy(from, from + segment.num_bytes, wanted.begin() + target);
        }
        own.start(0, 0);
        expect(own.wait(0) == READY && own.slots == wanted, "sectors in another order", piece_bytes);
    }
}

// Two sectors of a file that lie far apart, in one range: the pieces between them are not read.
void check_gaps(const ReaderCalls& calls, bool is_direct) {
    constexpr long SECTOR = lowtide::SECTOR_BYTES, NUM_SECTORS = 9;
    Checkpoint checkpoint({});
    const Bytes content = random_bytes(NUM_SECTORS * SECTOR);
    checkpoint.write(0, content);
    const long last = (NUM_SECTORS - 1) * SECTOR;
    checkpoint.segments = {{0, SECTOR, 0}, {last, SECTOR, SECTOR}};
    checkpoint.ranges.push_back({0, 0, NUM_SECTORS * SECTOR, 0, 2});
    checkpoint.first_range.push_back(1);
    OwnReader own(calls, checkpoint, {1, 2 * SECTOR, SECTOR, 1, is_direct});
    const long begun = num_reads;
    own.start(0, 0);
    expect(own.cancel(0) <= 2 * SECTOR, "bytes between segments that are queued", is_direct);
    own.wait(0);
    own.start(0, 0);
    expect(own.wait(0) == READY, "a read of what lies apart", own.wait(0), is_direct);
    expect(num_reads - begun <= 4, "pieces that are read", num_reads - begun, is_direct);
    Bytes wanted(content.begin(), content.begin() + SECTOR);
    wanted.insert(wanted.end(), content.end() - SECTOR, content.end());
    expect(own.slot(0, 2 * SECTOR) == wanted, "bytes that lie apart", is_direct);
}

// Files that are not what they were as they were opened. `spoil(path, descriptor)` does it.
template <class Spoil>
void check_failure(const ReaderCalls& calls, bool is_direct, int wanted, const Spoil& spoil) {
    const Whole whole;
    OwnReader own(calls, whole.checkpoint, {3, 9001, 4096, 2, is_direct});
    spoil(whole.checkpoint.path(0), static_cast<int>(own.files[0].descriptor));
    for (long i = 0; i < 3; ++i) own.start(i, i);
    const int state = own.wait(0);
    expect(state == wanted, "how a read failed", state, wanted, is_direct);
    for (long i = 1; i < 3; ++i) {
        expect(own.wait(i) == READY, "the read of another file", i);
        expect(own.slot(i, 9001) == whole.experts[i], "bytes of another file", i);
    }
}

void check_failures(const ReaderCalls& calls, bool is_direct) {
    check_failure(calls, is_direct, FILE_ENDED, [](const std::string& path, int) {
        expect(truncate(path.c_str(), 100) == 0, "a truncated file");
    });
    check_failure(calls, is_direct, FILE_CHANGED, [](const std::string& path, int) {
        const int file = open(path.c_str(), O_WRONLY);
        expect(write(file, "other", 5) == 5, "a file written to");
        const timespec other[2] = {{1, 0}, {1, 0}};  // a clock's tick may be milliseconds
        futimens(file, other);
        close(file);
    });
    check_failure(calls, is_direct, EBADF, [](const std::string&, int file) { close(file); });
}

// A read of the first file that does not end before `end`.
struct Blocked {
    Blocked(const ReaderCalls& calls, int num_threads) {
        expect(pipe(ends) == 0, "a pipe");
        own.reset(new OwnReader(calls, whole.checkpoint, {3, 9001, 4096, num_threads, false},
                                ends[0]));
        const long begun = num_reads;
        own->start(0, 0);
        const long num_blocked = std::min(num_threads, 3);  // of three pieces
        while (num_reads < begun + num_blocked) std::this_thread::yield();
    }

    // The file is said to end, or gives some bytes first, which are written to the slot.
    void end(bool has_bytes) {
        if (has_bytes) expect(write(ends[1], "late", 4) == 4, "a pipe written to");
        close(ends[1]);
    }

    ~Blocked() {
        own.reset();
        close(ends[0]);
    }

    Whole whole;
    int ends[2];
    std::unique_ptr<OwnReader> own;
};

void check_cancel(const ReaderCalls& calls) {
    Blocked blocked(calls, 1);
    OwnReader& own = *blocked.own;
    own.start(1, 1), own.start(2, 2);
    expect(own.wait(1, SHORT_S) == PENDING, "a read behind another");
    expect(own.cancel(1) == 9001, "a read that is given up before it begins");
    expect(own.wait(1) == CANCELLED, "what a read that was given up ends with");
    expect(own.slot(1, 9001) == Bytes(9001, UNTOUCHED), "bytes that nobody reads");
    const long given_up = own.cancel(0);  // two of its three pieces
    expect(given_up > 0 && given_up < 9001 && own.wait(0, 0) == PENDING,
           "a read that is on its way", given_up);
    blocked.end(false);
    expect(own.wait(0) == FILE_ENDED, "a read that was on its way", own.wait(0));
    expect(own.wait(2) == READY && own.slot(2, 9001) == blocked.whole.experts[2],
           "what was not given up");
    own.start(1, 1);
    expect(own.wait(1) == READY && own.slot(1, 9001) == blocked.whole.experts[1],
           "the slot's next filling");
}

void check_drain(const ReaderCalls& calls) {
    for (int num_threads : {1, 2}) {
        Blocked blocked(calls, num_threads);
        OwnReader& own = *blocked.own;
        own.start(1, 1);
        const auto start = Clock::now();
        expect(!own.drain(SHORT_S) && seconds_since(start) < LONG_S, "a drain that is limited");
        expect(own.wait(1) == CANCELLED, "what had not begun");
        blocked.end(false);
        expect(own.drain(LONG_S), "a drain to the end");
        expect(own.wait(0, 0) == FILE_ENDED, "what had begun", own.wait(0, 0));
        own.start(1, 1);
        expect(own.wait(1) == READY, "a read after a drain");
    }
}

// What the threads use after all has been closed around them is their own.
void check_close(const ReaderCalls& calls) {
    for (int num_threads : {1, 3})
        for (bool has_bytes : {false, true}) {
            Blocked blocked(calls, num_threads);
            OwnReader& own = *blocked.own;
            own.start(1, 1);
            std::thread waits([&] { expect(own.wait(1) == CANCELLED, "who waits for a read"); });
            const auto start = Clock::now();
            expect(!own.close(SHORT_S) && seconds_since(start) < LONG_S, "a close that is limited");
            waits.join();
            own.start(2, 2);
            expect(own.wait(2) == CANCELLED, "a read after a close");
            ReadinessHandle kept = *own.readiness;
            own.free();
            blocked.end(has_bytes);
            expect(calls.wait(&kept, 0, LONG_S) == FILE_ENDED, "a read that ends late");
            while (kept.use_count() > 1 && seconds_since(start) < LONG_S)
                std::this_thread::yield();
            expect(kept.use_count() == 1, "threads that end", num_threads);
        }
}

}  // namespace

void check_reader(const Library& kernels) {
    const ReaderCalls calls(kernels);
    check_readiness(calls);
    const std::vector<Bytes> experts = random_experts();
    const Checkpoint checkpoint(experts);
    const bool has_direct = can_read_direct(checkpoint);
    for (bool is_direct : {false, true}) {
        if (is_direct && !has_direct) continue;
        for (bool unruly : {false, true})
            for (int num_threads : THREADS)
                for (long piece_bytes : {4096, 12288, 1 << 20}) {
                    is_unruly = unruly;
                    check_fillings(calls, experts, checkpoint,
                                   {NUM_SLOTS, SLOT_BYTES, piece_bytes, num_threads, is_direct});
                    if (is_direct) check_places(calls);
                }
        is_unruly = false;
        check_gaps(calls, is_direct);
        check_failures(calls, is_direct);
    }
    check_cancel(calls);
    check_drain(calls);
    check_close(calls);
}

}  // namespace driver
