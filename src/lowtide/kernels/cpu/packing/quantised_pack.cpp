// Rounds weights to codes of 8 or 4 bits: the same bytes as `QuantisedRows.pack` of
// formats/quantised.py makes, which says how scales and zeros are found.

#include <utility>

#include "packed/quantised.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using namespace lowtide;

namespace {

constexpr float SHRINKS[] = {1.0f, 0.92f, 0.84f, 0.76f};
constexpr int NUM_FITS = 3;
constexpr float LARGEST = 65504.0f;  // of float16

// Number: float, or bf16.
template <class Number>
struct Packing {
    const Number* weights;    // [num_rows, num_k]
    const float* importance;  // [num_k] of each input's error, or null where all are alike
    QuantisedWeights place;
    long num_rows;
};

// Group `number` of a matrix, counted row by row.
inline void write_group(
    const QuantisedWeights& place, long number, const void* codes, std::uint16_t scale,
    std::uint16_t zero
) {
    const long num_groups = place.num_groups(), group = number % num_groups;
    std::uint8_t* row = const_cast<std::uint8_t*>(place.row(number / num_groups));
    std::memcpy(row + group * place.group_bytes(), codes, place.group_bytes());
    std::uint8_t* ends = row + num_groups * place.group_bytes();
    std::memcpy(ends + 2 * group, &scale, 2);
    std::memcpy(ends + 2 * (num_groups + group), &zero, 2);
}

namespace portable {
#define SEARCH
#define VECTOR_BYTES 16
#include "packing/quantised_search.hpp"
#undef SEARCH
#undef VECTOR_BYTES
}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {
#define SEARCH AVX2
#define VECTOR_BYTES 32
#include "packing/quantised_search.hpp"
#undef SEARCH
#undef VECTOR_BYTES
}  // namespace avx2

namespace avx512 {
#define SEARCH AVX512
#define VECTOR_BYTES 64
#include "packing/quantised_search.hpp"
#undef SEARCH
#undef VECTOR_BYTES
}  // namespace avx512
#endif

template <int num_bits, bool is_weighted, class Number>
void pack(int variant, const Packing<Number>& p) {
#if defined(__x86_64__)
    if (variant >= WITH_AVX512) return avx512::pack<num_bits, is_weighted>(p);
    if (variant == WITH_AVX2) return avx2::pack<num_bits, is_weighted>(p);
#endif
    portable::pack<num_bits, is_weighted>(p);
}

template <class Number>
void pack(int variant, const Packing<Number>& p) {
    if (p.place.num_bits == 4)
        return p.importance ? pack<4, true>(variant, p) : pack<4, false>(variant, p);
    return p.importance ? pack<8, true>(variant, p) : pack<8, false>(variant, p);
}

}  // namespace

extern "C" {

// weights [num_rows, num_k], bfloat16 or float32, to out [num_rows, row_bytes]. importance [num_k]
// may be null.
void lowtide_quantised_pack(
    int variant, int num_bits, int is_bf16, const void* weights, const float* importance,
    std::uint8_t* out, long num_rows, long num_k
) {
    const QuantisedWeights place = {out, num_k, num_bits};
    if (is_bf16)
        pack<bf16>(variant, {static_cast<const bf16*>(weights), importance, place, num_rows});
    else
        pack<float>(variant, {static_cast<const float*>(weights), importance, place, num_rows});
}

}
