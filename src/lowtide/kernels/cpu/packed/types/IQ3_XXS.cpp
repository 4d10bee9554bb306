#include "packed/block_products.hpp"

BLOCK_TYPE(IQ3_XXS, lowtide::ggml::Iq3Xxs)
