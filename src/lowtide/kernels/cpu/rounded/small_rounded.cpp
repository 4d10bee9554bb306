// ggml's types with blocks of 32 weights, for rows in int8.

#include "rounded/rounded.hpp"

namespace lowtide {

const RoundedType& small_rounded_type(int number) {
    using namespace ggml;
    static constexpr RoundedType TYPES[] = {
        rounded_type_of<Q4_0>(), rounded_type_of<Q4_1>(),  rounded_type_of<Q5_0>(),
        rounded_type_of<Q5_1>(), rounded_type_of<Q8_0>(), rounded_type_of<Iq4Nl>(),
        rounded_type_of<Mxfp4>(),
    };
    return TYPES[number];
}

}  // namespace lowtide
