// Prefetch of weights that are read once.
//
// A single sequential stream does not use all of the memory's speed: the processor's own
// prefetcher works within a page and for a few streams at a time, and a row of weights is about a
// page. Reading eight pages side by side is 1.4 times as fast as one after another with nothing
// asked for (docs/log), whatever the length of a row.
//
// With `Ahead`, while one region of eight pages is read, in any order, the next one is prefetched,
// a line of each page in turn: into the second cache or, if unpacking takes the time (docs/log),
// into the first, from where the excess goes to the second. `LinesAhead` asks in the order of
// reading instead.

#pragma once

#include <limits>

#include "numbers.hpp"

namespace lowtide {

constexpr long LINE_BYTES = 64;

// Target cache of a prefetch, as __builtin_prefetch numbers it.
enum Cache { SECOND_CACHE = 2, FIRST_CACHE = 3 };

class Ahead {
   public:
    // The `num_bytes` from `from` on are read, roughly in order; then those at `next`, unless it
    // is null.
    Ahead(const void* from, long num_bytes, const void* next)
        : at_(static_cast<const char*>(from)), left_(num_bytes),
          next_(static_cast<const char*>(next)) {
        enter();
    }

    // Call after reading `num_lines` lines, a divisor or a multiple of 8; prefetches as many.
    template <int num_lines, Cache cache = SECOND_CACHE>
    INLINED void read() {
        if constexpr (num_lines < NUM_PAGES) {
            for (int i = 0; i < num_lines; ++i)
                __builtin_prefetch(pages_[page_ + i] + offset_, 0, cache);
            page_ += num_lines;
            if (page_ < NUM_PAGES) return;
            page_ = 0, offset_ += LINE_BYTES;
        } else {
            for (int i = 0; i < num_lines; ++i)
                __builtin_prefetch(
                    pages_[i % NUM_PAGES] + offset_ + i / NUM_PAGES * LINE_BYTES, 0, cache);
            offset_ += num_lines / NUM_PAGES * LINE_BYTES;
        }
        if (offset_ >= PAGE_BYTES) {
            at_ += REGION_BYTES, left_ -= REGION_BYTES;
            enter();
        }
    }

    // Call after reading `num_bytes` bytes; prefetches as many, a line of each page at a time.
    template <Cache cache = SECOND_CACHE>
    INLINED void read_bytes(long num_bytes) {
        unasked_bytes_ += num_bytes;
        for (; unasked_bytes_ >= NUM_PAGES * LINE_BYTES; unasked_bytes_ -= NUM_PAGES * LINE_BYTES)
            read<NUM_PAGES, cache>();
    }

   private:
    static constexpr long PAGE_BYTES = 4096, NUM_PAGES = 8;
    static constexpr long REGION_BYTES = NUM_PAGES * PAGE_BYTES;

    // Enters the region at `at_` and starts to prefetch the one after it. If the range ends there,
    // its pages continue with `next`; a last, shorter region also prefetches what the others left
    // out of it.
    void enter() {
        offset_ = 0;
        for (long page = 0; page < NUM_PAGES; ++page) {
            const long offset = REGION_BYTES + page * PAGE_BYTES;
            if (offset < left_) pages_[page] = at_ + offset;
            else if (next_ == nullptr) pages_[page] = at_;  // asked for once more, which does nothing
            else if (left_ >= REGION_BYTES) pages_[page] = next_ + (offset - left_);
            else pages_[page] = next_ + (REGION_BYTES - left_) + page * (left_ / NUM_PAGES);
        }
    }

    const char* at_;
    long left_;
    const char* next_;
    const char* pages_[NUM_PAGES];
    long unasked_bytes_ = 0;
    long page_ = 0, offset_ = 0;  // of what is asked for next: which of them, and where in it
};

inline bool has_amx() {
    static const bool has = lowtide_best_variant() == WITH_AMX;
    return has;
}

// Prefetch into the first cache of the lines that lie a fixed distance ahead, for weights that are
// read in order. Products that unpack in registers are faster with it than with eight pages at a time
// (docs/log), which processors with AMX keep: there it was not measured.
class LinesAhead {
   public:
    // Reads the same ranges as an `Ahead`.
    LinesAhead(const void* from, long num_bytes, const void* next)
        : pages_(from, num_bytes, next), from_(static_cast<const char*>(from)), end_(num_bytes),
          next_(static_cast<const char*>(next)) {
        if (asked_ >= end_) enter_next();
    }

    // Call after reading `num_bytes` bytes; prefetches as many. cache: for pages.
    template <Cache cache = FIRST_CACHE>
    INLINED void read_bytes(long num_bytes) {
        if (takes_pages_) return pages_.read_bytes<cache>(num_bytes);
        for (due_ += num_bytes; asked_ < due_; asked_ += LINE_BYTES)
            __builtin_prefetch(from_ + asked_, 0, FIRST_CACHE);
        if (asked_ >= end_) enter_next();
    }

   private:
    static constexpr long DISTANCE = 8192;

    // Goes on with the beginning of the next range, or with nothing.
    void enter_next() {
        if (next_ == nullptr) {
            asked_ = end_ = std::numeric_limits<long>::max();
        } else {
            from_ = next_, next_ = nullptr;
            due_ -= asked_, asked_ = 0, end_ = DISTANCE;
        }
    }

    const bool takes_pages_ = has_amx();
    Ahead pages_;
    const char* from_;
    long asked_ = DISTANCE, due_ = DISTANCE, end_;  // bytes after `from_`
    const char* next_;
};

// Prefetches the `number`-th of `count` parts of some rows of weights, which may be null: as many
// lines of each. For tiles that need all rows at once, earlier than `Ahead` would.
INLINED void ask_for_rows(
    const void* rows, long num_rows, long row_bytes, long number, long count
) {
    if (rows == nullptr) return;
    const long num_lines = row_bytes / LINE_BYTES + 1;
    const auto* const from = static_cast<const char*>(rows);
    for (long line = number * num_lines / count; line < (number + 1) * num_lines / count; ++line)
        for (long row = 0; row < num_rows; ++row)
            __builtin_prefetch(from + row * row_bytes + line * LINE_BYTES, 0, SECOND_CACHE);
}

}  // namespace lowtide
