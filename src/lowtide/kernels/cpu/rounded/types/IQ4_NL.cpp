#include "rounded/rounded.hpp"

ROUNDED_TYPE(IQ4_NL, lowtide::ggml::Iq4Nl)
