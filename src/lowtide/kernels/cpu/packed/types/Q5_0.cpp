#include "packed/block_products.hpp"

BLOCK_TYPE(Q5_0, lowtide::ggml::Q5_0)
