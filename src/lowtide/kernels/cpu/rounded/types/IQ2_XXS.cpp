#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ2_XXS, lowtide::ggml::Iq2Xxs)
