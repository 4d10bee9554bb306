#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q4_K, lowtide::ggml::Q4K)
