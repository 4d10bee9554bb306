// Products of many int8 rows with weights of any type. Some rows of weights are unpacked once for
// all rows of x: codes to bytes in their own order, scales and offsets to float32. Rows of x lie
// side by side, sixteen at a time, so that each lane holds a whole sum of a group.
//
// Four codes of a row of weights are broadcast and multiplied with those of all rows of x. Sixteen
// registers hold the dots of a group of 16 rows of weights, or with 32 rows of x of 8. While a
// group is multiplied, the one before is scaled and added: the two use different execution units.
//
// Partial sums are those of int8_products.hpp, added in the same tree. Groups come in an order in
// which at most five of the 16 partial sums exist at a time.

#pragma once

#include <type_traits>

#include "rounded/int8_products.hpp"
#include "dense/tile_sums.hpp"

namespace lowtide {

// Names 16 rows of x for the cache of columns: `number` identifies their contents, `chunk` their
// place.
struct Chunk {
    std::uint64_t number;
    std::size_t chunk;
};

#if defined(HAS_DOT_PRODUCTS) && defined(HAS_VNNI)

constexpr long COLUMNS = 16;  // rows of x side by side

// Sixteen groups of `words` words of four codes, of sixteen rows of x. Missing rows are 0.
template <long words>
struct alignas(64) ColumnBlock {
    std::int32_t codes[SUMS][words][COLUMNS];
    std::int32_t starts[SUMS][COLUMNS];
    float steps[SUMS][COLUMNS], sums[SUMS][COLUMNS];
};

// Sixteen unpacked rows of weights: the first group of each, then the second of each, and so on.
struct UnpackedRows {
    const std::uint8_t* codes;
    const float *scales, *offsets;  // row by row, each padded to a multiple of 16 groups
    long num_groups;

    long num_lanes() const { return (num_groups + SUMS - 1) / SUMS * SUMS; }
};

// Operands and outputs of a product of many rows, except the unpacked weights.
struct ManyRows {
    long num_rows;  // of x: at most 32, with tiles 16
    const void* x[2];  // `ColumnBlock`s of 16 rows each
    const bf16* bias;  // or null
    bf16* out;
    long out_stride, num_outs;  // num_outs: at most 16
    const void* next;  // the next rows of weights, to prefetch, or null
    long next_bytes;  // of each of these rows
};

// Multiply by vector registers (int8_columns.cpp), and by tiles of AMX (int8_tiles.hpp).
template <long group, bool has_offsets>
void multiply_columns(const UnpackedRows& w, const ManyRows& p);
template <long group, bool has_offsets>
void multiply_tiles(const UnpackedRows& w, const ManyRows& p);

// Copies sixteen groups of a row of x, with codes in the order of `Sixteen`, to column `row`.
template <class Type>
void put_column(const RoundedGroups<Type>& from, long row, ColumnBlock<Type::GROUP / 4>& to) {
    static constexpr WordOrder<Type> ORDER;
    constexpr long NUM_WORDS = Type::GROUP / 4;
    for (long place = 0; place < SUMS * NUM_WORDS; ++place) {
        // Where codes are ordered by halves, both halves have the same order.
        const long word = ORDER.words[place];
        std::memcpy(&to.codes[word / NUM_WORDS][word % NUM_WORDS][row], from.codes + 4 * place, 4);
    }
    for (int lane = 0; lane < SUMS; ++lane) {
        const int group = ggml::Sixteen<Type>::group(lane);
        to.steps[group][row] = from.steps[lane], to.sums[group][row] = from.sums[lane];
        to.starts[group][row] = from.starts[lane];
    }
}

// Returns up to 16 rows of x as columns. Each thread makes them once for all of its products with
// the same rows, and keeps those of up to 256 rows of a call.
template <class Type>
const void* columns_of(const RoundedProduct& p, long first, const Chunk& chunk) {
    using Block = ColumnBlock<Type::GROUP / 4>;
    struct Columns {
        std::vector<Line> lines;
        std::uint64_t number = 0;
    };
    thread_local std::vector<Columns> kept;
    if (kept.size() <= chunk.chunk) kept.resize(chunk.chunk + 1);
    Columns& of = kept[chunk.chunk];
    if (of.number == chunk.number) return of.lines.data();
    const long num_blocks = num_sixteens<Type>(p.num_k);
    of.lines.assign(static_cast<std::size_t>(num_blocks) * sizeof(Block) / sizeof(Line), Line{});
    auto* const blocks = reinterpret_cast<Block*>(of.lines.data());
    for (long row = 0; row < std::min(p.num_rows - first, COLUMNS); ++row)
        for (long block = 0; block < num_blocks; ++block)
            put_column<Type>(p.row<Type>(first + row)[block], row, blocks[block]);
    of.number = chunk.number;
    return of.lines.data();
}

// A thread's own buffers for sixteen unpacked rows of weights.
class UnpackedMemory {
   public:
    static UnpackedMemory& own(long num_codes, long num_lanes) {
        thread_local UnpackedMemory of;
        const auto codes = static_cast<std::size_t>(TILE * num_codes / 64);
        const auto ends = static_cast<std::size_t>(TILE * num_lanes);
        if (of.codes_.size() < codes) of.codes_.resize(codes);
        if (of.scales_.size() < ends) of.scales_.resize(ends), of.offsets_.resize(ends);
        return of;
    }

    std::uint8_t* codes() { return codes_.data()->bytes; }
    float* scales() { return scales_.data(); }
    float* offsets() { return offsets_.data(); }

   private:
    std::vector<Line> codes_;
    std::vector<float> scales_, offsets_;
};

// Writes groups' codes in their own order, each group `TILE` group lengths after the one before.
template <class Type>
VNNI INLINED void codes_in_order(const ggml::Sixteen<Type>& groups, std::uint8_t* out) {
    static constexpr WordOrder<Type> ORDER;
    constexpr long NUM_WORDS = Type::GROUP / 4;
    alignas(64) std::int8_t codes[64 * NUM_WORDS], in_order[64 * NUM_WORDS];
    UNROLLED for (long i = 0; i < NUM_WORDS; ++i) _mm512_store_si512(codes + 64 * i, groups.of[i]);
    put_in_order<NUM_WORDS>(codes, ORDER.places, in_order);
    for (long g = 0; g < SUMS; ++g)
        std::memcpy(out + g * TILE * Type::GROUP, in_order + g * Type::GROUP, Type::GROUP);
}

// Returns the low halves of 16 bytes, then the high halves.
VNNI INLINED __m256i halves_of_16(const std::uint8_t* from) {
    const __m128i bytes = ggml::sixteen_bytes(from);
    const __m256i both = _mm256_inserti128_si256(
        _mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

VNNI INLINED __m512i halves_of_32(const std::uint8_t* from) {
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    return ggml::low_halves(_mm512_srlv_epi16(ggml::twice(from), shifts));
}

VNNI INLINED void store_32(std::uint8_t* out, __m256i codes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
}

// Does the same for the next groups of a row, sixteen or `left`. Types that store codes nearly in
// order have shorter code than `codes_in_order`.
template <class Type>
VNNI INLINED void unpack_codes(
    const WeightRow<Type>& row, long number, long left, const ggml::Sixteen<Type>& groups,
    std::uint8_t* out
) {
    constexpr long SPACING = TILE * Type::GROUP;
    const long count = std::min(left, SUMS), first = number * SUMS;
    if constexpr (HAS_ZEROS<Type>) {
        const std::uint8_t* codes = row.start + first * Type::CODE_BYTES;
        for (long g = 0; g < count; ++g, codes += Type::CODE_BYTES)
            _mm512_storeu_si512(out + g * SPACING, Type::CODE_BYTES == GROUP
                                                       ? _mm512_loadu_si512(codes)
                                                       : halves_of_32(codes));
    } else if constexpr (std::is_same_v<Type, ggml::Q8_0>) {
        for (long g = 0; g < count; ++g)
            store_32(out + g * SPACING,
                     _mm256_xor_si256(
                         ggml::half_register(row.start + (first + g) * Type::BYTES + 2),
                         _mm256_set1_epi8(-128)));
    } else if constexpr (std::is_same_v<Type, ggml::Q4_0> || std::is_same_v<Type, ggml::Q4_1>) {
        for (long g = 0; g < count; ++g)
            store_32(out + g * SPACING, halves_of_16(row.start + (first + g + 1) * Type::BYTES - 16));
    } else if constexpr (std::is_same_v<Type, ggml::Q4K>) {
        for (long g = 0; g < count; g += 2) {
            const __m512i two =
                halves_of_32(row.start + (first + g) / 8 * Type::BYTES + 16 + g % 8 * 16);
            store_32(out + g * SPACING, _mm512_castsi512_si256(two));
            store_32(out + (g + 1) * SPACING, _mm512_extracti64x4_epi64(two, 1));
        }
    } else {
        codes_in_order<Type>(groups, out);
    }
}

// Unpacks a whole row of weights.
template <class Type>
VNNI INLINED void unpack_row(
    const WeightRow<Type>& row, long num_groups, const std::uint8_t* end, std::uint8_t* codes,
    float* scales, float* offsets
) {
    for (long number = 0; number * SUMS < num_groups; ++number) {
        const long left = num_groups - number * SUMS;
        float *const own_scales = scales + number * SUMS, *const own = offsets + number * SUMS;
        ggml::Sixteen<Type> groups;
        if constexpr (HAS_ZEROS<Type>) {
            row.store_ends(number, left, own_scales, own);
        } else {
            if (left >= SUMS) row.load(number, groups);
            else row.load_last(number, left, end, groups);
            _mm512_storeu_ps(own_scales, in_order<Type>(groups.scale));
            if (Type::HAS_OFFSETS) _mm512_storeu_ps(own, in_order<Type>(groups.offset));
        }
        unpack_codes<Type>(row, number, left, groups, codes + number * TILE * NUMBERS<Type>);
    }
}

template <class Type>
VNNI NOT_INLINED UnpackedRows unpack_some(const RoundedProduct& p, long first, long num_outs) {
    const long num_blocks = num_sixteens<Type>(p.num_k);
    const long num_codes = num_blocks * NUMBERS<Type>;
    const long row_bytes = WeightRow<Type>::bytes(p.num_k);
    UnpackedMemory& memory = UnpackedMemory::own(num_codes, num_blocks * SUMS);
    const UnpackedRows out = {
        memory.codes(), memory.scales(), memory.offsets(),
        (p.num_k + Type::GROUP - 1) / Type::GROUP,
    };
    for (long o = 0; o < num_outs; ++o)
        unpack_row<Type>(
            WeightRow<Type>(p.w + (first + o) * row_bytes, p.num_k), out.num_groups,
            p.w + p.num_outs * row_bytes, memory.codes() + o * Type::GROUP,
            memory.scales() + o * num_blocks * SUMS, memory.offsets() + o * num_blocks * SUMS);
    return out;
}

// Fewest rows for which columns are faster than `multiply_few_rows`: alone, in a second block of
// 16, and by tiles, whose time does not depend on the number of rows.
constexpr long FEWEST_COLUMNS = 13, FEWEST_MORE_COLUMNS = 5, FEWEST_TILED = 8;

// Returns how many of `num_rows` rows the next product of columns takes; 0 if they are too few.
inline long num_together(int variant, long num_rows) {
    if (variant == INT8_AMX) return num_rows >= FEWEST_TILED ? std::min(num_rows, COLUMNS) : 0;
    if (num_rows >= COLUMNS + FEWEST_MORE_COLUMNS) return std::min(num_rows, 2 * COLUMNS);
    return num_rows >= FEWEST_COLUMNS ? std::min(num_rows, COLUMNS) : 0;
}

// Multiplies as many rows of x as columns are worth it for, and returns their number. chunk: names
// the first 16.
template <class Type>
long multiply_many_rows(int variant, const RoundedProduct& p, const Chunk& chunk) {
    const long row_bytes = WeightRow<Type>::bytes(p.num_k);
    long num_done = 0;
    while (const long count = num_together(variant, p.num_rows - num_done)) num_done += count;
    for (long first = 0; num_done > 0 && first < p.num_outs; first += TILE) {
        const long num_outs = std::min(p.num_outs - first, TILE);
        const UnpackedRows w = unpack_some<Type>(p, first, num_outs);
        const void* next = first + TILE < p.num_outs ? p.w + (first + TILE) * row_bytes : p.next;
        for (long row = 0, count; row < num_done; row += count) {
            count = num_together(variant, p.num_rows - row);
            ManyRows some = {
                count, {}, p.bias ? p.bias + first : nullptr,
                p.out + row * p.out_stride + first, p.out_stride, num_outs,
                next, row_bytes,
            };
            next = nullptr;  // prefetched once
            for (long half = 0; half * COLUMNS < count; ++half) {
                const auto which = static_cast<std::size_t>(row / COLUMNS + half);
                some.x[half] = columns_of<Type>(
                    p, row + half * COLUMNS, {chunk.number + which, chunk.chunk + which});
            }
            if (variant == INT8_AMX) multiply_tiles<Type::GROUP, Type::HAS_OFFSETS>(w, some);
            else multiply_columns<Type::GROUP, Type::HAS_OFFSETS>(w, some);
        }
    }
    return num_done;
}

#endif

}  // namespace lowtide
