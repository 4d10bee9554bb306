// ggml's types with blocks of 256 weights, for rows in int8.

#include "rounded/rounded.hpp"

const lowtide::RoundedType& lowtide::k_rounded_type(int place) {
    return rounded_type_at(ggml::KTypes(), place);
}
