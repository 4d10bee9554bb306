#include "packed/block_products.hpp"

BLOCK_TYPE(IQ2_XXS, lowtide::ggml::Iq2Xxs)
