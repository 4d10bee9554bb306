#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q4_1, lowtide::ggml::Q4_1)
