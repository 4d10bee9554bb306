// Computes products tile by tile.

#include "dense/products.hpp"

#include "dense/amx.hpp"
#include "dense/many_rows.hpp"
#include "dense/tiles.hpp"

namespace lowtide {
namespace {

inline void store(bf16& out, float sum) { out = round_bf16(sum); }
inline void store(float& out, float sum) { out = sum; }

template <class Isa, int rows, int outs, class Number>
void run_tile(const Product<Number>& p, long row, long first, Ahead* ahead) {
    float sums[rows * outs];
    const bf16 *x = p.x + row * p.x_stride, *w = p.w + first * p.num_k;
    Isa::template tile<rows, outs>(x, p.x_stride, w, p.num_k, sums, ahead);
    for (int r = 0; r < rows; ++r)
        for (int o = 0; o < outs; ++o) {
            const float bias = p.bias ? widen(p.bias[first + o]) : 0.0f;
            store(p.out[(row + r) * p.out_stride + first + o], sums[r * outs + o] + bias);
        }
}

// Multiplies `rows` rows of x, from `row` on, with rows `first` to `last` of w.
template <class Isa, int rows, class Number>
void run_rows(const Product<Number>& p, long row, long first, long last, Ahead* ahead) {
    constexpr int outs = Isa::SUMS / rows;
    for (; first + outs <= last; first += outs)
        run_tile<Isa, rows, outs>(p, row, first, ahead);
    for (; first < last; ++first) run_tile<Isa, rows, 1>(p, row, first, ahead);
}

// Takes as many rows of x at once as possible, then half as many, and so on.
template <class Isa, int rows, class Number>
void run_all_rows(const Product<Number>& p, long row, long first, long last, Ahead* ahead) {
    for (; row + rows <= p.num_rows; row += rows)
        run_rows<Isa, rows>(p, row, first, last, row == 0 ? ahead : nullptr);
    if constexpr (rows > 1) run_all_rows<Isa, rows / 2>(p, row, first, last, ahead);
}

// Multiplies all `rows` rows of x with one row of w after another.
template <class Isa, int rows, class Number>
void run_in_order(const Product<Number>& p) {
    for (long o = 0; o < p.num_outs; ++o) run_tile<Isa, rows, 1>(p, 0, o, nullptr);
}

// Multiplies all rows of x with a few of w, which the first of them bring into the cache.
template <class Isa, class Number>
void run(const Product<Number>& p) {
    if constexpr (Isa::READS_IN_ORDER) {
        if (p.num_rows == 1 && !p.is_cached) return run_in_order<Isa, 1>(p);
        if (p.num_rows == 2 && !p.is_cached) return run_in_order<Isa, 2>(p);
    }
    const long num_bytes = p.num_outs * p.num_k * static_cast<long>(sizeof(bf16));
    Ahead ahead(p.w, num_bytes, p.next);
    for (long first = 0; first < p.num_outs; first += Isa::SUMS) {
        const long last = std::min<long>(first + Isa::SUMS, p.num_outs);
        run_all_rows<Isa, Isa::ROWS>(p, 0, first, last, &ahead);
    }
}

#if defined(HAS_DOT_PRODUCTS)

// Number of rows of x from which tiles of many rows are faster.
constexpr long FEWEST_MANY = 9;

// Pads rows of x by one register each.
AVX512_BF16 const PaddedRows& padded_rows(const Product<bf16>& p) {
    thread_local PaddedRows of;
    if (p.inputs != 0 && p.inputs == of.number) return of;
    of.make_room(p.num_rows, p.num_k);
    for (long row = 0; row < p.num_rows; ++row)
        std::memcpy(of.row(row), p.x + row * p.x_stride, p.num_k * sizeof(bf16));
    of.number = p.inputs;
    return of;
}

template <int rows, int outs>
AVX512_BF16 NOT_INLINED void many_tile(
    const Product<bf16>& p, const PaddedRows& x, long row, long first
) {
    __m512 sums[rows * outs];
    UNROLLED for (int i = 0; i < rows * outs; ++i) sums[i] = _mm512_setzero_ps();
    ManyPlace at = {x.row(row), p.w + first * p.num_k, x.stride(), p.num_k};
    for (long k = 0; k < p.num_k; k += REGISTER_WORDS) {
        add_registers<rows, outs>(at, sums);
        at.x += REGISTER_WORDS, at.w += REGISTER_WORDS;
    }
    store_tile<rows, outs>(p, row, first, sums);
}

// Gives the bits of the tiles of `Avx512Bf16`. p.num_k: whole registers.
void run_many(const Product<bf16>& p) {
    const long row_bytes = p.num_k * static_cast<long>(sizeof(bf16));
    const long num_tiles = (p.num_rows + MANY_ROWS - 1) / MANY_ROWS;
    const PaddedRows& x = padded_rows(p);
    Ahead ahead(p.w, p.num_outs * row_bytes, p.next);
    for_many_outs(p.num_outs, [&](auto outs, long first) {
        for_many_rows(p.num_rows, [&](auto rows, long row) {
            many_tile<rows.value, outs.value>(p, x, row, first);
            ahead.read_bytes(outs.value * row_bytes / num_tiles);
        });
    });
}

#endif

template <class Number>
void in_float32(int variant, const Product<Number>& p) {
#if defined(__x86_64__)
    if (variant >= WITH_AVX512) return run<Avx512>(p);
    if (variant == WITH_AVX2) return run<Avx2>(p);
#endif
    run<Portable>(p);
}

}  // namespace

void multiply(int variant, const Product<bf16>& p) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant == WITH_AMX) return Amx::run(p, [&p] { return StoredTiles(p); });
    if (variant == WITH_AVX512_BF16)
        return p.num_rows >= FEWEST_MANY && p.num_k % REGISTER_WORDS == 0 ? run_many(p)
                                                                           : run<Avx512Bf16>(p);
#endif
    in_float32(variant, p);
}

void multiply_in_float32(int variant, const Product<float>& p) { in_float32(variant, p); }

}  // namespace lowtide
