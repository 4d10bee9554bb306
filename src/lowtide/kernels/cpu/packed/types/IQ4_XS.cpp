#include "packed/block_products.hpp"

BLOCK_TYPE(IQ4_XS, lowtide::ggml::Iq4Xs)
