#include "packed/block_products.hpp"

BLOCK_TYPE(IQ2_XS, lowtide::ggml::Iq2Xs)
