// ggml's types with blocks of 32 weights, for rows in int8.

#include "rounded/rounded.hpp"

const lowtide::RoundedType& lowtide::small_rounded_type(int place) {
    return rounded_type_at(ggml::SmallTypes(), place);
}
