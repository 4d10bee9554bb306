#include "packed/block_products.hpp"

BLOCK_TYPE(Q5_K, lowtide::ggml::Q5K)
