#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ4_XS, lowtide::ggml::Iq4Xs)
