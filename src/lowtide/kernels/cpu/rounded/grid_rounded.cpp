// ggml's types with a grid, for rows in int8.

#include "rounded/rounded.hpp"

const lowtide::RoundedType& lowtide::grid_rounded_type(int place) {
    return rounded_type_at(ggml::GridTypes(), place);
}
