#include "packed/block_products.hpp"

BLOCK_TYPE(Q4_K, lowtide::ggml::Q4K)
