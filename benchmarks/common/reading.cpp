// Reading memory and nothing else, in two ways: one range from its beginning to its end, and eight
// pages of it side by side, the next eight asked for meanwhile. Of each line one word is added up:
// memory delivers whole lines.

#include <cstdint>

namespace {

using Word = std::uint64_t;

constexpr long PAGE_BYTES = 4096, NUM_PAGES = 8, LINE_BYTES = 64;

Word word(const char* at) { return *reinterpret_cast<const Word*>(at); }

}  // namespace

extern "C" {

// num_bytes: a multiple of 32 KiB; `from` lies on a boundary of 8.
Word read_in_turn(const char* from, long num_bytes) {
    Word sums[4] = {};
    for (long at = 0; at < num_bytes; at += 4 * LINE_BYTES)
        for (long i = 0; i < 4; ++i) sums[i] += word(from + at + i * LINE_BYTES);
    return sums[0] + sums[1] + sums[2] + sums[3];
}

// As above.
Word read_side_by_side(const char* from, long num_bytes) {
    Word sums[NUM_PAGES] = {};
    for (long region = 0; region < num_bytes; region += NUM_PAGES * PAGE_BYTES)
        for (long at = 0; at < PAGE_BYTES; at += LINE_BYTES)
            for (long page = 0; page < NUM_PAGES; ++page) {
                const char* here = from + region + page * PAGE_BYTES + at;
                __builtin_prefetch(here + NUM_PAGES * PAGE_BYTES, 0, 2);
                sums[page] += word(here);
            }
    Word sum = 0;
    for (const Word one : sums) sum += one;
    return sum;
}

}
