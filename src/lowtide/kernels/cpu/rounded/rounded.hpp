// Functions of one type of packed weights for the table in rounded.cpp.

#pragma once

#include <type_traits>

#include "packed/block_types.hpp"
#include "rounded/int8_avx2.hpp"
#include "rounded/int8_few_rows.hpp"
#include "rounded/int8_many_rows.hpp"

extern "C" int lowtide_has_vbmi();  // of processor.cpp

namespace lowtide {

struct RoundedType {
    long (*row_bytes)(long num_k);  // of weights
    long (*row_lines)(long num_k);  // of x
    void (*round_row)(int variant, const bf16* x, long num_k, Line* out);
    void (*multiply)(int variant, const RoundedProduct& p, const Chunk& chunk);
};

// True if a type has words for AVX-512's VNNI (ggml_words.hpp). For other types rows stay in their
// own order in every variant, and int8_avx2.hpp multiplies.
template <class Type>
constexpr bool HAS_WORDS = !ggml::HAS_GRID<Type>;

template <class Type>
void round_for(int variant, const bf16* x, long num_k, Line* out) {
#ifdef HAS_VNNI
    if constexpr (HAS_WORDS<Type>)
        if (variant >= INT8_VNNI) return round_row<Type>(x, num_k, out);
#endif
    vectorised(vectors_of(variant), [=]() INLINED_LAMBDA {
        round_row_plainly<Type>(x, num_k, out);
    });
}

#ifdef HAS_VNNI

// Multiplies any number of rows by AVX-512's VNNI, a few at a time.
template <class Type>
void multiply_by_vnni(int variant, const RoundedProduct& p) {
    if constexpr (std::is_same_v<Type, ggml::Mxfp4>) {
        static const bool has_vbmi = lowtide_has_vbmi() != 0;
        if (has_vbmi) return multiply_by_few_rows<ggml::WithVbmi<Type>>(p);
    }
    multiply_by_few_rows<Type>(p);
}

#endif

// Multiplies any number of rows. chunk: names the first 16.
template <class Type>
void multiply_rounded(int variant, const RoundedProduct& p, const Chunk& chunk) {
#ifdef HAS_VNNI
    if constexpr (HAS_WORDS<Type>)
        if (variant >= INT8_VNNI) {
            long done = 0;
#if defined(HAS_DOT_PRODUCTS)
            done = multiply_many_rows<Type>(variant, p, chunk);
#endif
            return multiply_by_vnni<Type>(variant, p.rows(done, p.num_rows - done));
        }
#endif
    for (long done = 0; done < p.num_rows; done += MOST_ROUNDED) {
        const RoundedProduct some = p.rows(done, std::min(MOST_ROUNDED, p.num_rows - done));
#if defined(__x86_64__)
        if (variant >= INT8_AVX2) {
            multiply_by_avx2<Type>(variant, some);
            continue;
        }
#endif
        multiply_plainly<Type>(some);
    }
}

template <class Type>
constexpr RoundedType rounded_type_of() {
    return {WeightRow<Type>::bytes, row_lines<Type>, round_for<Type>, multiply_rounded<Type>};
}

void set_rounded_type(int number, const RoundedType& type);

// Registers a type; stands in the type's own file.
#define ROUNDED_TYPE(name, Type)                                                                   \
    static const lowtide::Registered<lowtide::RoundedType, lowtide::set_rounded_type> REGISTERED(  \
        lowtide::BLOCK_##name, lowtide::rounded_type_of<Type>());

}  // namespace lowtide
