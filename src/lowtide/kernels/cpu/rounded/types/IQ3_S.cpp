#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ3_S, lowtide::ggml::Iq3S)
