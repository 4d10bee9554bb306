#include "packed/four_bit_products.hpp"

BLOCK_TYPE(Q4_0, lowtide::ggml::Q4_0)
