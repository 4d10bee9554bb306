#include "packed/four_bit_products.hpp"

BLOCK_TYPE(MXFP4, lowtide::ggml::Mxfp4)
