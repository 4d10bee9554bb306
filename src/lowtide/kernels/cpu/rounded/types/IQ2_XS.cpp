#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ2_XS, lowtide::ggml::Iq2Xs)
