// ggml's types with blocks of 256 weights, for rows in int8.

#include "rounded/rounded.hpp"

namespace lowtide {

const RoundedType& k_rounded_type(int number) {
    using namespace ggml;
    static constexpr RoundedType TYPES[] = {
        rounded_type_of<Q2K>(), rounded_type_of<Q3K>(), rounded_type_of<Q4K>(),
        rounded_type_of<Q5K>(), rounded_type_of<Q6K>(), rounded_type_of<Iq4Xs>(),
    };
    return TYPES[number];
}

}  // namespace lowtide
