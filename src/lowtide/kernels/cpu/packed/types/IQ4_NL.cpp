#include "packed/block_products.hpp"

BLOCK_TYPE(IQ4_NL, lowtide::ggml::Iq4Nl)
