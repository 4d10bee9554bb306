#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q5_K, lowtide::ggml::Q5K)
