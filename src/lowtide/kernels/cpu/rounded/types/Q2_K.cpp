#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q2_K, lowtide::ggml::Q2K)
