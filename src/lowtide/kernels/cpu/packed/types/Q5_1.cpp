#include "packed/block_products.hpp"

BLOCK_TYPE(Q5_1, lowtide::ggml::Q5_1)
