#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q4_0, lowtide::ggml::Q4_0)
