#include "rounded/rounded.hpp"

ROUNDED_TYPE(q4, lowtide::Own<4>)
