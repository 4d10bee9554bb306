#include "packed/block_products.hpp"

BLOCK_TYPE(Q4_0, lowtide::ggml::Q4_0)
