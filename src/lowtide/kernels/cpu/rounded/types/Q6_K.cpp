#include "rounded/rounded.hpp"

ROUNDED_TYPE(Q6_K, lowtide::ggml::Q6K)
