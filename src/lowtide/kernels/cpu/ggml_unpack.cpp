// Weights of ggml's packed types to bfloat16, by the variant's instructions.

#include "ggml.hpp"
#include "ggml_vectors.hpp"

namespace lowtide {
namespace {

using namespace ggml;

template <class Type>
void unpack_blocks(int variant, const u8* stored, long num_blocks, bf16* out) {
#if defined(HAS_DOT_PRODUCTS)
    if (variant >= WITH_AVX512_BF16) return vectors::unpack<Type>(stored, num_blocks, out);
#endif
    vectorised(variant, [=]() INLINED_LAMBDA {
        for (long block = 0; block < num_blocks; ++block)
            unpack_block<Type>(stored + block * Type::BYTES, out + block * Type::SIZE);
    });
}

template <class Type>
constexpr PackedType packed() {
    return {unpack_blocks<Type>, Type::BYTES, Type::SIZE};
}

constexpr PackedType TYPES[] = {
    packed<Q4_0>(),  packed<Q4_1>(), packed<Q5_0>(), packed<Q8_0>(), packed<Iq4Nl>(),
    packed<Mxfp4>(), packed<Q2K>(),  packed<Q3K>(),  packed<Q4K>(),  packed<Q5K>(),
    packed<Q6K>(),   packed<Iq4Xs>(), {nullptr, sizeof(bf16), 1},
};

}  // namespace

const PackedType& packed_type(int number) { return TYPES[number]; }

}  // namespace lowtide
