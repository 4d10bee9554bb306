#include "packed/block_products.hpp"

BLOCK_TYPE(Q8_0, lowtide::ggml::Q8_0)
