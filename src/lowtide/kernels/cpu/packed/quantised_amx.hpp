// Products with weights in 8 or 4 bits by AMX: 16 rows of weights with up to 32 rows of x.
//
// A step of 16 rows of weights (quantised_vectors.hpp) is rounded to bfloat16 into the first cache,
// where it is four tiles. So weights are unpacked once for all rows of x, and more rows cost
// little. The rest is as in amx.hpp.
//
// A tile product has a latency of 52 cycles and a throughput of one in 16; unpacking its weights
// takes less than the latency. So tiles alternate between two sums. Rows beyond 16 have two sums of
// their own, so the order of a row's sum does not depend on the number of rows.

#pragma once

#include "dense/amx.hpp"
#include "packed/quantised_many_rows.hpp"

namespace lowtide {

#if defined(HAS_DOT_PRODUCTS)

#define UNPACKED_AMX __attribute__((target( \
    "amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")))

class QuantisedAmx : Amx {
   public:
    // p.num_rows: at most `MOST_QUANTISED_ROWS`. A tile cannot have 0 rows.
    template <int num_bits>
    UNPACKED_AMX static void run(const QuantisedProduct& p) {
        if (p.num_rows == 0 || p.num_outs == 0) return;
        const OrderedRows& ordered = ordered_rows<num_bits>(p);
        const Inputs& x =
            packed(ordered.row(0), ordered.stride(), p.num_rows, ordered.length, p.inputs);
        if (p.num_rows <= TILE) run_rows<num_bits, 1>(p, x);
        else run_rows<num_bits, 2>(p, x);
    }

   private:
    // Tiles 0 and 1 hold sums of the first 16 rows, 6 and 7 of the others; 2 and 3 hold weights; 4
    // and 5 hold x, of the first rows in turn, or 5 that of the others.
    template <int num_bits, int halves>
    UNPACKED_AMX static void run_rows(const QuantisedProduct& p, const Inputs& x) {
        const long of_first = std::min(p.num_rows, TILE), of_second = p.num_rows - of_first;
        Shapes shapes;
        for (int tile = 0; tile < (halves == 1 ? 6 : 8); ++tile) {
            const bool is_of_weights = tile == 2 || tile == 3;
            const bool is_of_second = halves == 2 && tile >= 5;
            const long bytes = is_of_weights ? TILE_BYTES : 4 * (is_of_second ? of_second : of_first);
            shapes.rows[tile] = TILE;
            shapes.row_bytes[tile] = static_cast<std::uint16_t>(bytes);
        }
        written(x.pairs()), written(&shapes);
        _tile_loadconfig(&shapes);
        Steps<num_bits, halves>(p, x).run();
        _tile_release();
    }

    // Runs all steps of 16 rows of weights, then those of the next 16. A step is multiplied
    // `BEHIND` steps after it was unpacked: loading a tile whose bytes have just been written would
    // wait until they reach the cache.
    template <int num_bits, int halves>
    class Steps {
       public:
        UNPACKED_AMX INLINED Steps(const QuantisedProduct& p, const Inputs& x)
            : p_(p), x_(x.pairs()), second_(x.pairs() + TILE * x.length),
              of_first_(std::min(p.num_rows, TILE)), of_second_(p.num_rows - of_first_),
              num_groups_(p.w.num_groups()), row_bytes_(p.w.row_bytes()),
              ahead_(p.w.rows, p.num_outs * p.w.row_bytes(), p.next) {}

        UNPACKED_AMX INLINED void run() {
            begin_sums();
            Place place = {0, 0}, behind = {0, 0};
            long num_behind = 0;
            for (; place.first < p_.num_outs; place = after(place))
                if (num_behind < BEHIND) {
                    step<true, false>(place, behind);
                    ++num_behind;
                } else {
                    step<true, true>(place, behind);
                    behind = multiplied(behind);
                }
            if (num_behind < BEHIND) turn_ = BEHIND;  // there is only one step
            for (; num_behind > 0; --num_behind) {
                step<false, true>(place, behind);
                behind = multiplied(behind);
            }
        }

       private:
        static constexpr long BEHIND = 2, NUM_TURNS = BEHIND + 1;
        static constexpr long GROUP_BYTES = GROUP * num_bits / 8, QUARTER = TILE / STEP_REGISTERS;

        // A step: 16 rows of weights from `first` on, two groups from `group` on.
        struct Place {
            long first, group;
        };

        INLINED Place after(const Place& place) const {
            if (place.group + 2 < num_groups_) return {place.first, place.group + 2};
            return {place.first + TILE, 0};
        }

        // Ends the multiplication of the step at `place`: stores its sums if they are complete, and
        // returns the next step.
        UNPACKED_AMX INLINED Place multiplied(const Place& place) {
            const Place next = after(place);
            if (next.group == 0) store(place.first);
            return next;
        }

        // Unpacks the step at `place`, and multiplies the step at `behind`.
        template <bool unpacks, bool multiplies>
        UNPACKED_AMX INLINED void step(const Place& place, const Place& behind) {
            const long num_outs = std::min(p_.num_outs - place.first, TILE);
            const std::uint8_t* rows = p_.w.row(place.first);
            if (unpacks && place.group % MOST_ENDS == 0)
                for (long o = 0; o < num_outs; ++o)
                    ends_[o].load(p_.w, rows + o * row_bytes_, place.group);
            rows += place.group * GROUP_BYTES;
            const bool is_usual = num_outs == TILE && place.group + 1 < num_groups_;
            for (long number = 0; number < STEP_REGISTERS; ++number) {
                if (multiplies) multiply(number, behind.group);
                if (!unpacks) continue;
                const long begin = number * QUARTER;
                if (is_usual)
                    unpack<true>(rows, begin, begin + QUARTER, place.group % MOST_ENDS);
                else if (place.group + 1 < num_groups_)
                    unpack<true>(
                        rows, begin, std::min(begin + QUARTER, num_outs), place.group % MOST_ENDS);
                else
                    unpack<false>(
                        rows, begin, std::min(begin + QUARTER, num_outs), place.group % MOST_ENDS);
            }
            if (unpacks) ahead_.read_bytes(num_outs * 2 * (GROUP_BYTES + 4));
            turn_ = turn_ == BEHIND ? 0 : turn_ + 1;
        }

        // Unpacks rows [begin, end) of the 16 rows at `codes`.
        template <bool has_both>
        UNPACKED_AMX INLINED void unpack(
            const std::uint8_t* codes, long begin, long end, long group
        ) {
            const long row_bytes = row_bytes_;
            const Ends<num_bits>* const ends = ends_;
            auto* const out = unpacked_[turn_];
            codes += begin * row_bytes;
            UNROLLED for (long o = begin; o < end; ++o, codes += row_bytes) {
                __m512i weights[STEP_REGISTERS];
                unpack_step(
                    StepCodes<num_bits>::template load<has_both>(codes), ends[o], group, weights);
                UNROLLED for (long i = 0; i < STEP_REGISTERS; ++i)
                    _mm512_store_si512(out[i][o], weights[i]);
            }
        }

        UNPACKED_AMX INLINED void multiply(long number, long group) const {
            const long k = group * GROUP + number * WORDS;
            const bf16* x = x_ + k * of_first_;
            const auto& weights = unpacked_[turn_ == BEHIND ? 0 : turn_ + 1][number];
            written(weights);
            if (number % 2 == 0) {
                _tile_loadd(2, weights, TILE_BYTES);
                _tile_loadd(4, x, of_first_ * 4);
                _tile_dpbf16ps(0, 2, 4);
            } else {
                _tile_loadd(3, weights, TILE_BYTES);
                if constexpr (halves == 1) {
                    _tile_loadd(5, x, of_first_ * 4);
                    _tile_dpbf16ps(1, 3, 5);
                } else {
                    _tile_loadd(4, x, of_first_ * 4);
                    _tile_dpbf16ps(1, 3, 4);
                }
            }
            if constexpr (halves == 2) {
                _tile_loadd(5, second_ + k * of_second_, of_second_ * 4);
                if (number % 2 == 0) _tile_dpbf16ps(6, 2, 5);
                else _tile_dpbf16ps(7, 3, 5);
            }
        }

        UNPACKED_AMX INLINED void begin_sums() const {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (halves == 2) {
                _tile_zero(6);
                _tile_zero(7);
            }
        }

        // Stores the sums of the 16 rows of weights from `first` on and clears the tiles.
        UNPACKED_AMX INLINED void store(long first) {
            alignas(64) float sums[2][TILE * TILE];
            const long stride = stored_bytes(of_first_);
            _tile_stored(0, sums[0], stride);
            _tile_stored(1, sums[1], stride);
            store_rows(sums, 0, of_first_, first);
            if constexpr (halves == 2) {
                const long stride_of_second = stored_bytes(of_second_);
                _tile_stored(6, sums[0], stride_of_second);
                _tile_stored(7, sums[1], stride_of_second);
                store_rows(sums, TILE, of_second_, first);
            }
            begin_sums();
        }

        // Adds the two sums of some rows of x and stores them.
        UNPACKED_AMX INLINED void store_rows(
            float (&sums)[2][TILE * TILE], long row, long num_rows, long first
        ) {
            written(sums);
            for (long i = 0; i < TILE * stored_bytes(num_rows) / TILE_BYTES; ++i)
                _mm512_store_ps(
                    sums[0] + i * TILE,
                    _mm512_add_ps(_mm512_load_ps(sums[0] + i * TILE),
                                  _mm512_load_ps(sums[1] + i * TILE)));
            store_tile_sums(
                p_, sums[0], row, num_rows, first, std::min(p_.num_outs - first, TILE));
        }

        const QuantisedProduct& p_;
        const bf16 *x_, *second_;  // the first 16 rows, and the others
        const long of_first_, of_second_;
        const long num_groups_, row_bytes_;
        Ahead ahead_;
        long turn_ = 0;  // index of the part of `unpacked_` that is written
        Ends<num_bits> ends_[TILE];
        alignas(64) bf16 unpacked_[NUM_TURNS][STEP_REGISTERS][TILE][WORDS] = {};
    };
};

#endif

template <int num_bits>
void multiply_quantised(int variant, const QuantisedProduct& p) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant == WITH_AMX) return QuantisedAmx::run<num_bits>(p);
    if (variant == WITH_AVX512_BF16) return multiply_pairs<num_bits>(p);
#endif
    vectorised(variant, [&p]() INLINED_LAMBDA { multiply_plainly<num_bits>(p); });
}

}  // namespace lowtide
