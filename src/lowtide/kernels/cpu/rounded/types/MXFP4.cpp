#include "rounded/rounded.hpp"

ROUNDED_TYPE(MXFP4, lowtide::ggml::Mxfp4)
