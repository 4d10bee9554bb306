#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q8_0, lowtide::ggml::Q8_0)
