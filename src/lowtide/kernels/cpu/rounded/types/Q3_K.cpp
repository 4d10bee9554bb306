#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q3_K, lowtide::ggml::Q3K)
