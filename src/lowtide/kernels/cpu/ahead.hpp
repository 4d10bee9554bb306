// Weights that are read once, asked for before they are wanted.
//
// One stream after another is not the fastest way through memory: the processor fetches ahead by
// itself, but within a page and for some streams at a time, and a row of weights is about a page.
// Eight pages read side by side are 1.4 times as fast as one after the other (docs/log.md), whatever
// the length of a row. So while one region of eight pages is read, in whatever order, the next one
// is asked for, a line of each page in turn, into the second cache.

#pragma once

#include "numbers.hpp"

namespace lowtide {

constexpr long LINE_BYTES = 64;

class Ahead {
   public:
    // `num_bytes` from `from` on are read, more or less in order; then what lies at `next`, or null.
    Ahead(const void* from, long num_bytes, const void* next)
        : at_(static_cast<const char*>(from)), left_(num_bytes),
          next_(static_cast<const char*>(next)) {
        enter();
    }

    // As many lines of the range have been read: asks for as many.
    template <int num_lines>
    INLINED void read() {
        for (int i = 0; i < num_lines; ++i, ++number_)
            __builtin_prefetch(pages_[number_ % NUM_PAGES] + number_ / NUM_PAGES * LINE_BYTES, 0, 2);
        if (number_ >= NUM_LINES) {
            at_ += REGION_BYTES, left_ -= REGION_BYTES;
            enter();
        }
    }

   private:
    static constexpr long PAGE_BYTES = 4096, NUM_PAGES = 8;
    static constexpr long REGION_BYTES = NUM_PAGES * PAGE_BYTES;
    static constexpr long NUM_LINES = REGION_BYTES / LINE_BYTES;

    // The region at `at_` is read from now on, so the one behind it is asked for. Where the range
    // ends within that, its pages go on with `next`; a last region, shorter than others, asks for
    // what these left out of it.
    void enter() {
        number_ = 0;
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
    long number_ = 0;  // of the line of the region
};

}  // namespace lowtide
