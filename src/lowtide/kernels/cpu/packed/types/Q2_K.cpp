#include "packed/block_products.hpp"

BLOCK_TYPE(Q2_K, lowtide::ggml::Q2K)
