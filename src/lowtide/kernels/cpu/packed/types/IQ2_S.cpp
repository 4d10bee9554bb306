#include "packed/block_products.hpp"

BLOCK_TYPE(IQ2_S, lowtide::ggml::Iq2S)
