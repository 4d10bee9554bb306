#include "packed/mxfp4_products.hpp"

BLOCK_TYPE(MXFP4, lowtide::ggml::Mxfp4)
