#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ2_S, lowtide::ggml::Iq2S)
