// Reads experts from files into slots, on threads of its own.
//
// A slot's bytes come in pieces, which several threads read at once. `Readiness` says when all of
// them are there: each filling of a slot has a number, so that a piece of an earlier one, which
// nothing waits for any more, is not counted.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace lowtide {

constexpr long SECTOR_BYTES = 4096;  // direct reads begin, end and land on multiples of it

// State of a slot, if it is not an errno.
constexpr int PENDING = -1, READY = 0, FILE_ENDED = -2, FILE_CHANGED = -3, CANCELLED = -4;

class Readiness {
 public:
    explicit Readiness(long num_slots);

    // Begins to fill a slot in `num_pieces` pieces; returns the filling's number.
    std::uint32_t begin(long slot, std::uint32_t num_pieces);

    // A piece is there, or failed with `error`; of any thread.
    void end_piece(long slot, std::uint32_t filling, int error);

    // PENDING, READY, or the first error of the filling once none of its pieces is on its way
    // (CANCELLED if it has no other).
    int state(long slot) const;

    // Waits until the state is not PENDING, or for the time limit; returns it.
    int wait(long slot, double seconds);

 private:
    struct Slot {
        std::uint32_t filling = 0, num_missing = 0;
        int error = READY;
        std::atomic<int> state{READY};
    };

    std::unique_ptr<Slot[]> slots_;
    std::mutex changes_;
    std::condition_variable changed_;
};

// Part of a file that belongs in a slot, `target` bytes from its start.
struct Segment {
    std::int64_t start, num_bytes, target;
};

// A file that is open, and what it was as it was opened.
struct File {
    std::int64_t descriptor, num_bytes, modified_ns, changed_ns;
};

// A contiguous read: segments of one file in order, with small gaps.
struct Range {
    std::int64_t file, start, num_bytes, first_segment, num_segments;
};

// Sources and targets of a reader; Python owns them and keeps them alive.
struct Source {
    const std::int64_t* first_range;  // of each expert, in `ranges`, and the end
    const Range* ranges;
    const Segment* segments;
    const File* files;
    std::uint8_t* slots;
    std::uint8_t* buffers;  // [num_threads, piece_bytes + 2 * SECTOR_BYTES]; null: not direct
    long slot_bytes, piece_bytes;
    int num_threads;
};

class Reader {
 public:
    Reader(const Source& source, std::shared_ptr<Readiness> readiness);

    // Begins to fill a slot with an expert; the readiness says when it has ended. Once this is
    // closed, it is given up at once.
    void start(long expert, long slot);

    // Gives up what has not begun of a filling; its bytes.
    long cancel(long slot);

    // Gives up what has not begun, and waits for the rest; false: some of it has not ended.
    bool drain(double seconds);

    // Ends its threads; false: some read has not ended, and uses memory and files yet.
    bool close(double seconds);

    long num_bytes(long expert) const;

 private:
    struct Task {
        long range, number, slot;
        std::uint32_t filling;
    };

    struct State;  // shared with the threads, which may outlast this

    static void run(std::shared_ptr<State> state, int thread);

    std::shared_ptr<State> state_;
};

}  // namespace lowtide
