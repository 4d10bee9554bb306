#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ3_XXS, lowtide::ggml::Iq3Xxs)
