#include "packed/block_products.hpp"

BLOCK_TYPE(Q4_1, lowtide::ggml::Q4_1)
