#include "packed/block_products.hpp"

BLOCK_TYPE(Q3_K, lowtide::ggml::Q3K)
