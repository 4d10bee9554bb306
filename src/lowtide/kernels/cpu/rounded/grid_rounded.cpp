// ggml's types with a grid, for rows in int8.

#include "rounded/rounded.hpp"

namespace lowtide {

const RoundedType& grid_rounded_type(int number) {
    using namespace ggml;
    static constexpr RoundedType TYPES[] = {
        rounded_type_of<Iq2Xxs>(), rounded_type_of<Iq2Xs>(), rounded_type_of<Iq2S>(),
        rounded_type_of<Iq3Xxs>(), rounded_type_of<Iq3S>(),
    };
    return TYPES[number];
}

}  // namespace lowtide
