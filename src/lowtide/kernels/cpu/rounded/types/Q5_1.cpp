#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q5_1, lowtide::ggml::Q5_1)
