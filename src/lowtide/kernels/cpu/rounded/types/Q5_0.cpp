#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q5_0, lowtide::ggml::Q5_0)
