// Products of rows in int8 by VNNI with 16 or 32 rows of x in the lanes: sums of each group are
// complete in their lane, so that no lanes are added to one another.
//
// Four codes of a row of weights are broadcast and multiplied with those of all rows of x; sixteen
// registers have the dots of a group of 16 rows of weights, or with 32 rows of x of eight. While a
// group is multiplied the one before is scaled and added, a register beside each word, and codes of
// 4 bits of the next are unpacked: all three have units of the processor of their own.
//
// Partial sums are those of int8_products.hpp, and added in the same tree; groups come in such an
// order that of 16 partial sums five at most are kept.

#pragma once

#include "int8_columns.hpp"
#include "tile_sums.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)

// Rows from which on they are faster so than by the groups of each; of 16 more beside the first.
constexpr long FEWEST_COLUMNS = 13, FEWEST_MORE_COLUMNS = 5;

// Where what a group makes is added: to `from`, and to the sums from `level` - 1 down to `to`, where
// all of it goes.
struct GroupTurn {
    long group;
    int from, level, to;
};

// Partial sums that are kept; those whose groups are not all through, zeros, and nobody's.
enum { SUM_LEVELS = 4, OWN_SUMS = SUM_LEVELS, NO_SUMS, LOST_SUMS, NUM_SUMS };

// A row's groups in the order of the tree over partial sums: lane i and i + 8 first, and so on.
class GroupTurns {
   public:
    explicit GroupTurns(long num_groups) : num_groups_(num_groups) { add(0, 1); }

    long size() const { return static_cast<long>(turns_.size()); }
    const GroupTurn& operator[](long number) const { return turns_[number]; }

   private:
    // Adds the lanes i, i + step, i + 2 step and so on. Lanes without a group would add nothing.
    void add(long lane, long step) {
        if (step == SUMS) return add_lane(lane);
        add(lane, 2 * step);
        if (lane + step >= num_groups_) return;
        add(lane + step, 2 * step);
        turns_.back().to -= 1, depth_ -= 1;
    }

    void add_lane(long lane) {
        for (long group = lane; group < num_groups_; group += SUMS)
            turns_.push_back({group, group == lane ? NO_SUMS : OWN_SUMS, OWN_SUMS, OWN_SUMS});
        turns_.back().level = turns_.back().to = depth_++;
    }

    const long num_groups_;
    int depth_ = 0;
    std::vector<GroupTurn> turns_;
};

template <int num_bits, int halves>
class Int8Columns {
   public:
    // x: of 16 rows each, as `columns_of` has them.
    Int8Columns(const Int8Product& p, const ColumnBlock* const (&x)[halves])
        : p_(p), x_(x), num_groups_(p.w.num_groups()), row_bytes_(p.w.row_bytes()),
          turns_(num_groups_), ends_(static_cast<std::size_t>(2 * OUTS * num_lanes())) {}

    // All rows of weights but those that do not fill a tile; how many it were.
    VNNI long run() {
        long first = 0;
        for (; first + OUTS <= p_.num_outs; first += OUTS) {
            const std::uint8_t* const rows = p_.w.row(first);
            const void* const next_rows =
                first + OUTS < p_.num_outs ? p_.w.row(first + OUTS) : p_.next;
            const long count = turns_.size();
            widen_ends(rows);
            GroupTurn before = {0, NO_SUMS, LOST_SUMS, LOST_SUMS};
            for (int o = 0; o < OUTS; ++o) unpack(rows, turns_[0].group, 0, o);
            for (long number = 0; number < count; ++number) {
                const long next = turns_[std::min(number + 1, count - 1)].group;
                step(rows, turns_[number].group, before, next, number % 2);
                before = turns_[number];
                ask_for_rows(next_rows, OUTS, row_bytes_, number, count);
            }
            for (int i = 0; i < NUM; ++i) add(before, (count - 1) % 2, i);
            store(first);
        }
        return first;
    }

   private:
    static constexpr int NUM = 16, OUTS = NUM / halves;
    static constexpr long GROUP_BYTES = GROUP * num_bits / 8;

    long num_lanes() const { return (num_groups_ + SUMS - 1) / SUMS * SUMS; }
    float* scales(long out) { return ends_.data() + 2 * out * num_lanes(); }
    float* zeros(long out) { return scales(out) + num_lanes(); }

    // Scales and zeros of a tile's rows of weights.
    VNNI INLINED void widen_ends(const std::uint8_t* rows) {
        for (long out = 0; out < OUTS; ++out, rows += row_bytes_) {
            const std::uint8_t* const from = rows + num_groups_ * GROUP_BYTES;
            for (long group = 0; group < num_groups_; group += SUMS) {
                const long left = std::min(num_groups_ - group, SUMS);
                const auto mask = static_cast<__mmask16>((1u << left) - 1);
                _mm512_storeu_ps(scales(out) + group, halves_at(from + 2 * group, mask));
                _mm512_storeu_ps(
                    zeros(out) + group, halves_at(from + 2 * (num_groups_ + group), mask));
            }
        }
    }

    // Multiplies a group of a tile's rows of weights, adds what the one before made, and unpacks
    // the next. parity: which of two `dots_` and `codes_` are the group's.
    VNNI INLINED void step(
        const std::uint8_t* rows, long group, const GroupTurn& before, long next, long parity
    ) {
        const std::uint8_t* codes = rows + group * GROUP_BYTES;
        long row_bytes = row_bytes_;
        if constexpr (num_bits == 4) codes = codes_[parity][0], row_bytes = GROUP;
        __m512i dots[NUM];
        UNROLLED for (int i = 0; i < NUM; ++i) dots[i] = _mm512_setzero_si512();
        UNROLLED for (int word = 0; word < GROUP_WORDS; ++word) {
            multiply_word(codes + 4 * word, row_bytes, group, word, dots);
            add(before, 1 - parity, word);
            if (word % halves == 0) unpack(rows, next, 1 - parity, word / halves);
        }
        UNROLLED for (int i = 0; i < NUM; ++i) _mm512_store_si512(dots_[parity][i], dots[i]);
    }

    VNNI INLINED void multiply_word(
        const std::uint8_t* codes, long row_bytes, long group, int word, __m512i (&dots)[NUM]
    ) const {
        __m512i x[halves];
        UNROLLED for (int half = 0; half < halves; ++half)
            x[half] = _mm512_load_si512(x_[half][group / SUMS].words[group % SUMS][word]);
        UNROLLED for (int o = 0; o < OUTS; ++o) {
            std::int32_t four;
            std::memcpy(&four, codes + o * row_bytes, sizeof four);
            const __m512i weights = _mm512_set1_epi32(four);
            UNROLLED for (int half = 0; half < halves; ++half) {
                const int i = o * halves + half;
                dots[i] = _mm512_dpbusd_epi32(dots[i], weights, x[half]);
            }
        }
    }

    // Register `i` of a group's dots.
    VNNI INLINED void add(const GroupTurn& turn, long parity, int i) {
        const ColumnBlock& x = x_[i % halves][turn.group / SUMS];
        const long lane = turn.group % SUMS, out = i / halves;
        const __m512 dots = _mm512_cvtepi32_ps(_mm512_load_si512(dots_[parity][i]));
        const __m512 scaled = _mm512_mul_ps(dots, _mm512_set1_ps(scales(out)[turn.group]));
        const __m512 shift = _mm512_mul_ps(
            _mm512_load_ps(x.sums[lane]), _mm512_set1_ps(zeros(out)[turn.group]));
        const __m512 term = _mm512_mul_ps(
            _mm512_add_ps(scaled, shift), _mm512_load_ps(x.steps[lane]));
        __m512 sum = _mm512_add_ps(_mm512_load_ps(sums_[turn.from][i]), term);
        for (int level = turn.level; level > turn.to; --level)
            sum = _mm512_add_ps(_mm512_load_ps(sums_[level - 1][i]), sum);
        _mm512_store_ps(sums_[turn.to][i], sum);
    }

    // A group's codes of 4 bits of row `o` of a tile in their own order, each to a byte.
    VNNI INLINED void unpack(const std::uint8_t* rows, long group, long parity, int o) {
        if constexpr (num_bits == 8) return;
        const __m512i shifts = _mm512_inserti64x4(
            _mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(rows + o * row_bytes_ + group * GROUP_BYTES)));
        _mm512_store_si512(
            codes_[parity][o],
            _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), _mm512_set1_epi8(15)));
    }

    VNNI INLINED void store(long first) {
        const Product<bf16> places = {
            nullptr, 0, nullptr, p_.bias, p_.out, p_.out_stride, p_.num_rows, p_.num_outs, 0,
        };
        alignas(64) float sums[TILE][COLUMNS] = {};
        for (int half = 0; half < halves; ++half) {
            for (int o = 0; o < OUTS; ++o)
                std::memcpy(sums[o], sums_[0][o * halves + half], sizeof sums[o]);
            const long row = half * COLUMNS;
            store_tile_sums(
                places, sums[0], row, std::min(p_.num_rows - row, COLUMNS), first, OUTS);
        }
    }

    const Int8Product& p_;
    const ColumnBlock* const (&x_)[halves];
    const long num_groups_, row_bytes_;
    const GroupTurns turns_;
    std::vector<float> ends_;  // scales and zeros of a tile's rows of weights
    alignas(64) float sums_[NUM_SUMS][NUM][COLUMNS] = {};
    alignas(64) std::int32_t dots_[2][NUM][COLUMNS] = {};
    alignas(64) std::uint8_t codes_[2][OUTS][GROUP] = {};
};

// p.num_rows: `FEWEST_COLUMNS` to 16, or to 32 with `FEWEST_MORE_COLUMNS` behind the first 16.
// of: which these are.
template <int num_bits>
VNNI void multiply_columns(const Int8Product& p, const Chunk& of) {
    const auto columns = [&p](long first, const Chunk& chunk) {
        return columns_of<num_bits>(
            p.x + first * p.num_blocks, p.num_blocks, std::min(p.num_rows - first, COLUMNS), chunk);
    };
    long done = 0;
    if (p.num_rows <= COLUMNS) {
        const ColumnBlock* const x[1] = {columns(0, of)};
        done = Int8Columns<num_bits, 1>(p, x).run();
    } else {
        const ColumnBlock* const x[2] = {
            columns(0, of), columns(COLUMNS, {of.number + 1, of.chunk + 1})};
        done = Int8Columns<num_bits, 2>(p, x).run();
    }
    if (done == p.num_outs) return;
    Int8Product rest = p;
    rest.w = p.w.from(done), rest.out += done, rest.num_outs -= done;
    if (p.bias) rest.bias += done;
    for (long row = 0; row < p.num_rows; row += rest.num_rows) {
        rest.num_rows = std::min(p.num_rows - row, COLUMNS);
        rest.x = p.x + row * p.num_blocks, rest.out = p.out + row * p.out_stride + done;
        multiply_dots<num_bits>(rest);
    }
}

#endif

}  // namespace lowtide
