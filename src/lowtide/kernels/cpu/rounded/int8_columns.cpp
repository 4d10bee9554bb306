// The products of int8_many_rows.hpp.

#include "rounded/int8_tiles.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)

namespace {

// One step of the summation: a group's term is added to sum `from`; the result is added to the sums
// from `level` - 1 down to `to`, and stored in `to`.
struct GroupTurn {
    long group;
    int from, level, to;
};

// Indices of stored sums: complete partial sums by level, the partial sum under way, zeros, and a
// sum that is discarded.
enum { SUM_LEVELS = 4, OWN_SUMS = SUM_LEVELS, NO_SUMS, LOST_SUMS, NUM_SUMS };

// A row's groups in the order in which the tree adds partial sums: lanes i and i + 8 first, and so
// on.
class GroupTurns {
   public:
    explicit GroupTurns(long num_groups) : num_groups_(num_groups) { add(0, 1); }

    // Returns the thread's own turns; computes them if `num_groups` has changed.
    static const GroupTurns& of(long num_groups) {
        thread_local GroupTurns kept(num_groups);
        if (kept.num_groups_ != num_groups) kept = GroupTurns(num_groups);
        return kept;
    }

    long size() const { return static_cast<long>(turns_.size()); }
    const GroupTurn& operator[](long number) const { return turns_[number]; }

   private:
    // Adds lanes `lane`, `lane` + step, ... of the tree. Lanes without a group are left out: they
    // are 0.
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

    long num_groups_;
    int depth_ = 0;
    std::vector<GroupTurn> turns_;
};

// Multiplies `halves` blocks of up to 16 rows of x with `OUTS` rows of weights.
template <long group_size, bool has_offsets, int halves>
class Columns {
   public:
    static constexpr int NUM = 16, OUTS = NUM / halves;

    // first: the first row of weights.
    Columns(const UnpackedRows& w, const ManyRows& p, long first)
        : codes_(w.codes + first * group_size), scales_(w.scales + first * w.num_lanes()),
          offsets_(w.offsets + first * w.num_lanes()), num_lanes_(w.num_lanes()), p_(p), first_(first), turns_(GroupTurns::of(w.num_groups)) {
        for (int half = 0; half < halves; ++half) x_[half] = static_cast<const Block*>(p.x[half]);
        std::memset(sums_[NO_SUMS], 0, sizeof sums_[NO_SUMS]);
    }

    VNNI void run() {
        const long count = turns_.size();
        std::memset(dots_[1], 0, sizeof dots_[1]);  // added to the discarded sum
        GroupTurn before = {0, NO_SUMS, LOST_SUMS, LOST_SUMS};
        for (long number = 0; number < count; ++number) {
            step(turns_[number].group, before, number % 2);
            before = turns_[number];
            ask_for_rows(p_.next, TILE, p_.next_bytes, number + count * (first_ > 0),
                         count * (halves == 2 ? 2 : 1));
        }
        for (int i = 0; i < NUM; ++i) add(before, (count - 1) % 2, i);
        store();
    }

   private:
    static constexpr int WORDS = static_cast<int>(group_size / 4), TURNS = NUM / WORDS;
    using Block = ColumnBlock<WORDS>;

    // Multiplies a group while the terms of the group before are added. parity: index of the
    // group's `dots_`.
    VNNI INLINED void step(long group, const GroupTurn& before, long parity) {
        const std::uint8_t* const codes = codes_ + group * TILE * group_size;
        __m512i dots[NUM];
        UNROLLED for (int i = 0; i < NUM; ++i)
            dots[i] = _mm512_load_si512(block(i, group).starts[group % SUMS]);
        UNROLLED for (int word = 0; word < WORDS; ++word) {
            multiply_word(codes + 4 * word, group, word, dots);
            UNROLLED for (int i = 0; i < TURNS; ++i) add(before, 1 - parity, TURNS * word + i);
        }
        UNROLLED for (int i = 0; i < NUM; ++i) _mm512_store_si512(dots_[parity][i], dots[i]);
    }

    const Block& block(int i, long group) const { return x_[i % halves][group / SUMS]; }

    VNNI INLINED void multiply_word(
        const std::uint8_t* codes, long group, int word, __m512i (&dots)[NUM]
    ) const {
        __m512i x[halves];
        UNROLLED for (int half = 0; half < halves; ++half)
            x[half] = _mm512_load_si512(block(half, group).codes[group % SUMS][word]);
        UNROLLED for (int o = 0; o < OUTS; ++o) {
            std::int32_t four;
            std::memcpy(&four, codes + o * group_size, sizeof four);
            const __m512i weights = _mm512_set1_epi32(four);
            UNROLLED for (int half = 0; half < halves; ++half) {
                const int i = o * halves + half;
                dots[i] = _mm512_dpbusd_epi32(dots[i], weights, x[half]);
            }
        }
    }

    // Adds the terms of register `i` of a group's dots.
    VNNI INLINED void add(const GroupTurn& turn, long parity, int i) {
        const Block& x = block(i, turn.group);
        const long lane = turn.group % SUMS, end = i / halves * num_lanes_ + turn.group;
        const __m512 dots = _mm512_cvtepi32_ps(_mm512_load_si512(dots_[parity][i]));
        __m512 term = _mm512_mul_ps(dots, _mm512_set1_ps(scales_[end]));
        if (has_offsets)
            term = _mm512_sub_ps(
                term, _mm512_mul_ps(_mm512_load_ps(x.sums[lane]), _mm512_set1_ps(offsets_[end])));
        term = _mm512_mul_ps(term, _mm512_load_ps(x.steps[lane]));
        __m512 sum = _mm512_add_ps(_mm512_load_ps(sums_[turn.from][i]), term);
        for (int level = turn.level; level > turn.to; --level)
            sum = _mm512_add_ps(_mm512_load_ps(sums_[level - 1][i]), sum);
        _mm512_store_ps(sums_[turn.to][i], sum);
    }

    VNNI INLINED void store() {
        alignas(64) float sums[TILE][COLUMNS] = {};
        for (int half = 0; half < halves; ++half) {
            for (int o = 0; o < OUTS; ++o)
                std::memcpy(sums[o], sums_[0][o * halves + half], sizeof sums[o]);
            const long row = half * COLUMNS;
            store_tile_sums(
                p_, sums[0], row, std::min(p_.num_rows - row, COLUMNS), first_,
                std::min<long>(OUTS, p_.num_outs - first_));
        }
    }

    const std::uint8_t* const codes_;
    const float *const scales_, *const offsets_;
    const long num_lanes_;
    const ManyRows& p_;
    const long first_;
    const GroupTurns& turns_;
    const Block* x_[halves];
    alignas(64) float sums_[NUM_SUMS][NUM][COLUMNS];
    alignas(64) std::int32_t dots_[2][NUM][COLUMNS];
};

}  // namespace

template <long group, bool has_offsets>
void multiply_columns(const UnpackedRows& w, const ManyRows& p) {
    if (p.num_rows <= COLUMNS) return Columns<group, has_offsets, 1>(w, p, 0).run();
    constexpr long OUTS = Columns<group, has_offsets, 2>::OUTS;
    for (long first = 0; first < p.num_outs; first += OUTS)
        Columns<group, has_offsets, 2>(w, p, first).run();
}

#define MANY_ROWS_OF(group, has_offsets)                                                           \
    template void multiply_columns<group, has_offsets>(const UnpackedRows&, const ManyRows&);      \
    template void multiply_tiles<group, has_offsets>(const UnpackedRows&, const ManyRows&);

MANY_ROWS_OF(16, true)
MANY_ROWS_OF(16, false)
MANY_ROWS_OF(32, true)
MANY_ROWS_OF(32, false)
MANY_ROWS_OF(64, true)

#endif

}  // namespace lowtide
