#include "packed/block_products.hpp"

BLOCK_TYPE(Q6_K, lowtide::ggml::Q6K)
