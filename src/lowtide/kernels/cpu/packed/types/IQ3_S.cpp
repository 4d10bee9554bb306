#include "packed/block_products.hpp"

BLOCK_TYPE(IQ3_S, lowtide::ggml::Iq3S)
